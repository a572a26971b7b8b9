"Runs against a server with faults, runs that are killed and resumed, models of transformers made on the spot."

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from compvl.core import CompvlError
from compvl.text.aligned_lines import AlignedLines
from compvl.text.clients import Answer, Client, RewriteRequest, Unanswered
from compvl.text.llm import generate
from compvl.text.masked_model import Unmasker
from compvl.text.openai_client import OpenAIClient
from compvl.text.rewrites import REWRITES
from compvl.text.transformers_client import TransformersClient

MANY = [f"A man with {i} hats rides a bike." for i in range(120)]


def changed(caption):
    return caption.replace("bike", "bicycle")


class Endpoint(ThreadingHTTPServer):
    """An OpenAI-compatible server with faults: `fault(n, caption)` of request n may give (status, headers, error), 'cut', 'slow', 'page', 'garbage', 'empty', or an answer instead of the right one.
    `log`: (seconds, caption, key) of every request. No answer is given before `together` requests have been in flight at a time, or 30 seconds have passed."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Talk)
        self.fault, self.latency, self.log, self.lock, self.flying, self.most, self.together = (
            lambda n, caption: None,
            0.0,
            [],
            threading.Condition(),
            0,
            0,
            0,
        )
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        pass

    @property
    def asked(self):
        return [caption for _, caption, _ in self.log]


class Talk(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def say(self, status, body, headers={}, type="application/json", cut=None):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"Content-Type": type, "Content-Length": len(body), **headers}
        self.wfile.write(
            f"HTTP/1.1 {status} X\r\n".encode()
            + b"".join(f"{k}: {v}\r\n".encode() for k, v in head.items())
            + b"\r\n"
            + body[:cut]
        )
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def do_GET(self):
        self.say(
            200,
            dict(
                object="list",
                data=[dict(id="other-model", object="model", created=0, owned_by="x")],
            ),
        )

    def do_POST(self):
        s, asked = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["messages"][-1]["content"] if "messages" in asked else asked["prompt"]
        caption = prompt.rsplit("Input: ", 1)[1].removesuffix("\nOutput:")
        with s.lock:
            s.log.append((time.monotonic(), caption, self.headers["Authorization"]))
            n = len(s.log) - 1
            s.flying += 1
            s.most = max(s.most, s.flying)
        with s.lock:
            s.lock.notify_all()
            s.lock.wait_for(lambda: s.most >= s.together, 30)
        time.sleep(s.latency)
        with s.lock:
            s.flying -= 1
        text = (
            fault
            if isinstance(fault := s.fault(n, caption), str)
            and fault not in ("cut", "slow", "page", "garbage", "empty")
            else changed(caption)
        )
        choice = dict(
            index=0,
            finish_reason="length" if text.endswith("…") else "stop",
            **(
                dict(message=dict(role="assistant", content=text))
                if "messages" in asked
                else dict(text=text)
            ),
        )
        body = dict(
            id="x", object="chat.completion", created=0, model=asked["model"], choices=[choice]
        )
        if fault == "slow":
            time.sleep(1)
        if isinstance(fault, tuple):
            self.say(fault[0], dict(error=dict(message=fault[2], code=fault[2])), fault[1])
        elif fault == "page":
            self.say(200, b"<html>busy</html>", type="text/html")
        elif fault == "garbage":
            self.say(200, b'{"choices": [{"mess')
        elif fault == "empty":
            self.say(200, {**body, "choices": []})
        else:
            self.say(200, body, cut=60 if fault == "cut" else None)


@pytest.fixture
def server(monkeypatch):
    for k in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(k, raising=False)
    s = Endpoint()
    threading.Thread(target=s.serve_forever, kwargs=dict(poll_interval=0.02), daemon=True).start()
    yield s
    s.shutdown()
    s.server_close()


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def whole(out, captions=MANY):
    "Every caption has its line, in order, with the right hard positive."
    return [(r["caption"], r["hard_positive"]) for r in lines(out)] == [
        (c, changed(c)) for c in captions
    ]


@pytest.fixture
def quick(monkeypatch):
    "No back-off longer than a tenth of a second."
    monkeypatch.setattr("compvl.text.openai_client.random.uniform", lambda a, b: 0.02)


# --- the endpoint


def test_many_in_flight_are_at_least_ten_times_as_fast(server):
    server.latency, times = 0.3, {}
    requests = [RewriteRequest(i, REWRITES["replace"].ask(c)) for i, c in enumerate(MANY[:96])]
    list(OpenAIClient(server.url, "m").complete(requests[:1]))  # imports and such
    for concurrency, n in ((1, 24), *[(32, 96)] * 6):
        if times.get(1, 0) >= 10 * times.get(32, 1):
            break  # measured again where other programs took the cores: client and server share one interpreter
        server.most, server.together, start = 0, concurrency, time.perf_counter()
        answers = list(
            OpenAIClient(server.url, "m", concurrency=concurrency).complete(requests[:n])
        )
        times[concurrency] = (time.perf_counter() - start) / n
        assert sorted(a.key for a in answers) == list(range(n)) and all(
            a.text == changed(MANY[a.key]) and not a.error for a in answers
        )
        assert server.most == concurrency
    print(
        f"{1000 * times[1]:.0f} ms a request one at a time, {1000 * times[32]:.1f} ms with 32 in flight: {times[1] / times[32]:.1f} times as fast"
    )
    assert times[1] / times[32] >= 10


def test_faults_cost_tries_and_no_answer(server, quick, tmp_path):
    faults = [
        (500, {}, "oh"),
        "cut",
        "garbage",
        "page",
        "empty",
        (503, {"Retry-After": "0.1"}, "loading"),
        (429, {}, "slower"),
        "slow",
        (429, {"Retry-After": "0.2"}, "slower"),
        (408, {}, "late"),
    ]
    server.fault = lambda n, caption: (
        faults[n // 3] if n % 3 == 0 and n // 3 < len(faults) else None
    )
    counts = generate(
        MANY,
        OpenAIClient(server.url, "m", timeout=0.6, concurrency=4),
        out=tmp_path / "hp.jsonl",
        progress=False,
    )
    assert (
        counts.made == len(MANY)
        and whole(tmp_path / "hp.jsonl")
        and not lines(tmp_path / "hp.rejected.jsonl")
    )
    assert len(server.log) == len(MANY) + len(faults)


def test_a_429_pauses_all_requests_for_as_long_as_it_says(server):
    server.fault = lambda n, caption: (429, {"Retry-After": "0.7"}, "slower") if n == 8 else None
    answers = list(
        OpenAIClient(server.url, "m", concurrency=4, retries=0).complete(
            RewriteRequest(i, REWRITES["replace"].ask(c)) for i, c in enumerate(MANY[:40])
        )
    )
    times = [t for t, *_ in server.log]
    assert len(answers) == 40 and len(times) == 41 and not any(a.error for a in answers)
    assert max(b - a for a, b in zip(times, times[1:])) > 0.6


def test_requests_per_minute(server):
    start = time.perf_counter()
    assert (
        len(
            list(
                OpenAIClient(server.url, "m", rpm=1200).complete(
                    RewriteRequest(i, REWRITES["replace"].ask(c)) for i, c in enumerate(MANY[:21])
                )
            )
        )
        == 21
    )
    assert time.perf_counter() - start > 1


@pytest.mark.parametrize(
    "fault, parts",
    [
        ((401, {}, "bad key sk-secret"), ["MY_KEY", "refuses the key"]),
        ((404, {}, "no such model"), ["no model m", "other-model"]),
        ((400, {}, "max_tokens?"), ["refuses every request", "max_tokens?"]),
        ((429, {}, "insufficient_quota"), ["insufficient_quota", "account"]),
        ((429, {"Retry-After": "7200"}, "tomorrow"), ["wait 7200 s", "rpm="]),
        ((500, {}, "broken"), ["does not answer", "broken", "3 times"]),
        ("page", ["malformed"]),
    ],
)
def test_what_cannot_be_mended_stops_the_run(server, quick, tmp_path, monkeypatch, fault, parts):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    server.fault = lambda n, caption: fault if n >= 0 else None
    client = OpenAIClient(server.url, "m", key_env="MY_KEY", retries=2)
    with pytest.raises(Unanswered) as e:
        generate(MANY, client, out=tmp_path / "hp.jsonl", progress=False)
    for p in parts + ["same command"]:
        assert p in str(e.value)
    assert server.log[0][2] == "Bearer sk-secret" and "sk-secret" not in str(e.value) + "".join(
        f.read_text() for f in tmp_path.iterdir()
    )
    server.fault = lambda n, caption: None
    assert generate(MANY, client, out=tmp_path / "hp.jsonl", progress=False).made == len(
        MANY
    ) and whole(tmp_path / "hp.jsonl")


def test_nobody_there():
    with pytest.raises(Unanswered, match="does not answer"):
        list(
            OpenAIClient("http://127.0.0.1:9/v1", "m", retries=0).complete([RewriteRequest(0, "x")])
        )


def test_a_caption_that_the_server_refuses_or_never_answers_is_a_line_with_a_reason(
    server, quick, tmp_path
):
    server.latency = 0.01
    server.fault = lambda n, caption: (
        (400, {}, "too rude")
        if caption == MANY[7]
        else "cut"
        if caption == MANY[9]
        else "A man with 11 ha…"
        if caption == MANY[11]
        else "Sure:\n"
        if caption == MANY[13]
        else None
    )
    counts = generate(
        MANY,
        OpenAIClient(server.url, "m", retries=1, concurrency=8),
        out=tmp_path / "hp.jsonl",
        rejected=tmp_path / "no.jsonl",
        progress=False,
    )
    assert counts.made == len(MANY) - 4 and counts.refused == counts.rejected == {
        "HTTP 400": 1,
        "no answer": 1,
        "cut off": 1,
        "too many words changed": 1,
    }
    rejected = lines(tmp_path / "no.jsonl")
    assert [(r["index"], r["reason"]) for r in rejected] == [
        (7, "HTTP 400"),
        (9, "no answer"),
        (11, "cut off"),
        (13, "too many words changed"),
    ]
    assert (
        rejected[0]["answer"] == "too rude"
        and [r["hard_positive"] for r in lines(tmp_path / "hp.jsonl")].count(None) == 4
    )


def test_rejected_answers_are_asked_again_with_another_seed(server, tmp_path):
    server.fault = lambda n, caption: (
        caption if MANY.index(caption) % 10 == 0 and server.asked.count(caption) < 3 else None
    )
    counts = generate(
        MANY, OpenAIClient(server.url, "m"), out=tmp_path / "hp.jsonl", attempts=3, progress=False
    )
    assert (
        counts.made == len(MANY)
        and counts.rejected == {"identical": 24}
        and whole(tmp_path / "hp.jsonl")
    )


def test_half_a_character_is_kept(server, tmp_path):
    server.fault = lambda n, caption: "a dog and a kitten \ud83d"
    assert (
        generate(
            ["a dog and a cat \ud83d"] * 2,
            OpenAIClient(server.url, "m"),
            "replace",
            tmp_path / "hp.jsonl",
            progress=False,
        ).made
        == 2
    )
    assert lines(tmp_path / "hp.jsonl")[1]["hard_positive"] == "a dog and a kitten \ud83d"


def test_plain_completions_and_a_loop_that_runs_already(server, tmp_path):
    async def notebook():
        return generate(
            MANY[:5],
            OpenAIClient(server.url, "m", chat=False),
            out=tmp_path / "hp.jsonl",
            progress=False,
        )

    assert asyncio.run(notebook()).made == 5 and whole(tmp_path / "hp.jsonl", MANY[:5])


# --- runs

SAME = REWRITES["replace"]._replace(
    valid=lambda caption, answer: "identical" if answer == caption else ""
)  # needs no lexicon

CHILD = textwrap.dedent("""
    import sys
    sys.path.insert(0, sys.argv[1])
    from test_language_models import MANY, SAME, generate, OpenAIClient
    print(generate(MANY, OpenAIClient(sys.argv[2], "m", concurrency=8), SAME, out=sys.argv[3], attempts=2, progress=False))
""")


def child(server, out):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, os.path.dirname(__file__), server.url, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # a shell starts its background jobs deaf to it


def test_a_kill_loses_what_is_in_flight_and_a_resume_doubles_nothing(server, tmp_path):
    out, stops = tmp_path / "hp.jsonl", [25, 60, 90]
    server.latency = 0.03
    server.fault = lambda n, caption: (
        "cut"
        if n % 13 == 5
        else caption
        if caption in MANY[3::20] and server.asked.count(caption) == 1
        else None
    )
    for asked, sign in zip(stops, (signal.SIGKILL, signal.SIGINT, signal.SIGKILL)):
        process = child(server, out)
        while len(server.log) < asked and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(sign)
        stderr = process.communicate()[1]
        assert process.returncode == -sign, stderr
        if sign == signal.SIGINT:
            assert "the same command goes on" in stderr
    counts = generate(
        MANY,
        OpenAIClient(server.url, "m", concurrency=8),
        SAME,
        out=out,
        attempts=2,
        progress=False,
    )
    assert whole(out) and counts.captions == counts.made == len(MANY)
    asked, twice = len(server.log), len(server.log) - len(set(server.asked))
    assert [r["index"] for r in lines(tmp_path / "hp.rejected.jsonl")] == sorted(
        {r["index"] for r in lines(tmp_path / "hp.rejected.jsonl")}
    )
    assert twice <= 3 * 8 + asked // 13 + 1 + 6  # in flight at a stop, connections cut, asked again
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        ".hp.jsonl.lock",
        "hp.jsonl",
        "hp.jsonl.journal",
        "hp.rejected.jsonl",
    ]


class Table(Client):
    "Answers in the order `order` of a window of requests."

    identity = dict(model="table")

    def __init__(self, order=lambda held: 0, size=10):
        self.order, self.size = order, size

    def complete(self, requests):
        held = []
        for r in requests:
            if r is not None:
                held.append(r)
            while held and (r is None or len(held) == self.size):
                r = held.pop(self.order(held))
                yield Answer(
                    r.key, changed(r.prompt.rsplit("Input: ", 1)[1].removesuffix("\nOutput:"))
                )
        for r in held:
            yield Answer(r.key, changed(r.prompt.rsplit("Input: ", 1)[1].removesuffix("\nOutput:")))


class Crash(BaseException):
    pass


def crashing(after):
    "An `open` whose appended files together take `after` bytes; then the process is as good as killed."
    room = after

    class Dying:
        def __init__(self, f):
            self.f = f

        def __getattr__(self, name):
            return getattr(self.f, name)

        def write(self, text):
            nonlocal room
            self.f.write(text[: max(room, 0)])
            self.f.flush()
            room -= len(text)
            if room < 0:
                raise Crash

    return lambda path, mode="r", **kw: (
        Dying(open(path, mode, **kw)) if mode == "a" else open(path, mode, **kw)
    )


def test_any_state_of_the_files_at_a_kill_is_mended(tmp_path, monkeypatch):
    captions, total = MANY[:12], 0

    class Odd(Table):
        def complete(self, requests):
            return (
                a._replace(text="Something else.") if a.key % 4 == 1 else a
                for a in super().complete(requests)
            )

    monkeypatch.setattr(AlignedLines, "EVERY", 3)
    monkeypatch.setattr(AlignedLines, "COMPACT", 9)
    for after in [10**9, *range(0, 10**9, 41)]:
        folder, crashed = tmp_path / str(after), False
        with monkeypatch.context() as m:
            m.setattr("compvl.text.aligned_lines.open", crashing(after), raising=False)
            try:
                generate(
                    captions,
                    Odd(lambda held: len(held) // 2, size=5),
                    out=folder / "hp.jsonl",
                    progress=False,
                )
            except Crash:
                crashed = True
        counts = generate(captions, Odd(), out=folder / "hp.jsonl", progress=False)
        assert [(r["caption"], r["hard_positive"]) for r in lines(folder / "hp.jsonl")] == [
            (c, None if i % 4 == 1 else changed(c)) for i, c in enumerate(captions)
        ], after
        assert (counts.made, counts.refused, counts.rejected, counts.captions) == (
            9,
            {"too many words changed": 3},
            {"too many words changed": 3},
            12,
        ), after
        assert [r["index"] for r in lines(folder / "hp.rejected.jsonl")] == [1, 5, 9], after
        if not crashed and after < 10**9:
            break
    assert after > 3000


def test_memory_is_a_window(tmp_path):
    read = written = most = 0

    def rows():
        nonlocal read
        for read in range(1, 20_001):
            yield f"n{read}", f"A dog and {read} bikes." if read % 5 else "Two dogs."

    def record(row, r):
        nonlocal written, most
        written += 1
        most = max(most, read - written)
        return r.text

    counts = generate(
        rows(),
        Table(lambda held: -1),
        "swap",
        tmp_path / "hp.jsonl",
        record=record,
        window=500,
        progress=False,
    )  # the newest first: the oldest wait until the window is full
    assert (
        400 < most < 500 + AlignedLines.EVERY
        and counts.captions == 20_000 == len(lines(tmp_path / "hp.jsonl"))
        and counts.refused == {"no and": 4000, "words not kept": 16_000}
    )
    assert (tmp_path / "hp.jsonl.journal").stat().st_size < 1000


def test_what_was_changed_between_is_not_mixed(tmp_path):
    out = tmp_path / "hp.jsonl"

    def run(captions=MANY, kind="replace", **kw):
        return generate(captions, Table(), kind, out, progress=False, **kw)

    run(MANY[:50])
    for wrong, part in [
        (lambda: run(["A cat.", *MANY[1:]]), "other captions"),
        (lambda: run(MANY[:40]), "50 captions"),
        (lambda: run(kind="swap"), "kind: then 'replace'"),
        (lambda: run(attempts=2), "attempts: then '1', now '2'"),
        (
            lambda: run(kind=REWRITES["replace"]._replace(prompt="Input: {caption}\nOutput:")),
            "prompt: then",
        ),
    ]:
        with pytest.raises(CompvlError, match=part):
            wrong()
    assert run().captions == len(MANY) and whole(out)  # the same and more
    text = out.read_text()
    out.write_text(text + '"one more"\n')
    with pytest.raises(CompvlError, match="was changed"):
        run()
    out.write_text(text[:500])
    with pytest.raises(CompvlError, match="was changed"):
        run()
    assert run(resume=False).captions == len(MANY) and whole(out)
    journal = out.with_name("hp.jsonl.journal")
    kept = journal.read_text()
    journal.write_text(kept + "}{\n")
    with pytest.raises(CompvlError, match="journal:3 is damaged"):
        run()
    journal.unlink()
    with pytest.raises(CompvlError, match="without the journal"):
        run()
    journal.write_text(kept)
    with (
        AlignedLines(out, json.loads(kept.splitlines()[0])["settings"], lambda row, r: r.text),
        pytest.raises(CompvlError, match="Another process"),
    ):
        run()


# --- models in process


def bpe(folder, **special):
    "A byte-level BPE tokenizer with words of the captions."
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    t = ByteLevelBPETokenizer()
    t.train_from_iterator(
        [*MANY, *map(REWRITES["replace"].ask, MANY), *map(REWRITES["swap"].ask, MANY)] * 3,
        vocab_size=600,
        special_tokens=list(special.values()),
        show_progress=False,
    )
    t = transformers.PreTrainedTokenizerFast(tokenizer_object=t._tokenizer, **special)
    t.save_pretrained(folder)
    return t


def test_a_causal_model_with_a_chat_template(tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    tok = bpe(tmp_path, eos_token="<eos>", pad_token="<pad>")
    tok.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    tok.save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=len(tok),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=tok.eos_token_id,
        bos_token_id=None,
        pad_token_id=tok.pad_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    client = TransformersClient(str(tmp_path), "cpu", batch_size=4, max_tokens=8)
    prompts = [
        REWRITES["swap"].ask(c)
        for c in (
            "A cat and a dog",
            "a very long caption of a cat, a mouse and a dog",
            "salt and pepper",
        )
    ]
    alone = [a.text for p in prompts for a in client.complete([RewriteRequest(0, p)])]
    assert [
        a.text for a in client.complete(RewriteRequest(i, p) for i, p in enumerate(prompts))
    ] == alone  # padding changes nothing
    state = torch.random.get_rng_state()
    again = [
        [a.text for a in client.complete([RewriteRequest(0, prompts[0], attempt)])][0]
        for attempt in (1, 1, 2)
    ]
    assert again[0] == again[1] != again[2] and torch.equal(state, torch.random.get_rng_state())
    counts = generate(MANY[:6], client, out=tmp_path / "hp.jsonl", attempts=2, progress=False)
    assert counts.captions == 6 and sum(counts.rejected.values()) == 12


def test_proposals_of_a_byte_level_model_are_whole_words(tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    tok = bpe(tmp_path, mask_token="<mask>", pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    config = transformers.RobertaConfig(
        vocab_size=len(tok),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=130,
        pad_token_id=tok.pad_token_id,
    )
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)
    unmask = Unmasker(tmp_path, "cpu", batch_size=2)
    captions = [
        "A man rides a bike",
        "a dog",
        "a <mask> and a bike",
        "A man rides a bike" * 40 + " bike",
    ]
    spans = [(2, 5), (2, 5), (15, 19), (721, 725)]
    found = unmask.candidates(captions, spans, top_k=7)
    vocabulary = {
        w for p in REWRITES.values() for c in MANY for w in p.ask(c).replace(".", "").split()
    }
    assert (
        [len(f) for f in found] == [7, 7, 7, 0]
        and all(w.isalpha() for f in found for w in f)
        and "man" not in map(str.lower, found[0])
    )
    assert unmask.candidates(captions[:1], spans[:1], top_k=3) == [found[0][:3]]
    with pytest.raises(CompvlError, match="2 captions and 1 spans"):
        unmask.candidates(["a", "b"], [(0, 1)])


def test_models_that_are_not_there_say_how_to_give_one(tmp_path, monkeypatch):
    for load in (Unmasker, TransformersClient):
        with pytest.raises(CompvlError, match="give a folder"):
            load(tmp_path)

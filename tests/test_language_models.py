"""Hard positives by language models.

A server with faults, runs that are killed and resumed, models of transformers made on the spot.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest
from conftest import listen_to_interrupts

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
    """Return the right hard positive of a caption."""
    return caption.replace("bike", "bicycle")


def caption_of(prompt):
    """Return the caption that a prompt ends with."""
    return prompt.rsplit("Input: ", 1)[1].removesuffix("\nOutput:")


def requests_for(captions):
    """Return a request for each caption, with its index as the key."""
    kind = REWRITES["replace"]
    return [RewriteRequest(i, kind.ask(caption)) for i, caption in enumerate(captions)]


def read_lines(path):
    """Read one JSON value a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_complete(out, captions=MANY):
    """Every caption has its line, in order, with the right hard positive."""
    found = [(row["caption"], row["hard_positive"]) for row in read_lines(out)]
    assert found == [(caption, changed(caption)) for caption in captions]


# --- a server with faults ---


class Failure(NamedTuple):
    """A response with an HTTP status other than 200."""

    status: int
    message: str
    retry_after: str | None = None


class Fault(Enum):
    """A response with status 200 that is not a right answer."""

    CUT = auto()  # the connection closes in the middle
    SLOW = auto()  # it comes after three seconds
    PAGE = auto()  # HTML
    GARBAGE = auto()  # half of a JSON value
    EMPTY = auto()  # no choices


class Logged(NamedTuple):
    """A request that the server got."""

    seconds: float
    caption: str
    authorization: str


def no_fault(n, caption):
    """Give every request the right answer."""
    return None


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server.

    `fault(n, caption)` of request n may return a `Failure`, a `Fault`, or the text of an answer
    that replaces the right one. Every request waits until `together` requests have been in flight
    at a time, or for 30 seconds, and then for `latency` seconds.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.fault = no_fault
        self.latency = 0.0
        self.together = 0
        self.log = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.condition = threading.Condition()

    def handle_error(self, request, client_address):
        """Say nothing about connections that a client closed."""

    @property
    def captions(self):
        """The captions of all requests."""
        return [request.caption for request in self.log]

    def admit(self, caption, authorization):
        """Log a request, let it wait, and return its number."""
        with self.condition:
            self.log.append(Logged(time.monotonic(), caption, authorization))
            n = len(self.log) - 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.most_in_flight >= self.together, 30)
        time.sleep(self.latency)
        with self.condition:
            self.in_flight -= 1
        return n


def prompt_of(request):
    """Return the prompt of a chat request or of a plain one."""
    if "messages" in request:
        return request["messages"][-1]["content"]
    return request["prompt"]


def completion(request, text):
    """Return the body of an answer to a chat request or to a plain one."""
    choice = dict(index=0, finish_reason="length" if text.endswith("…") else "stop")
    if "messages" in request:
        choice["message"] = dict(role="assistant", content=text)
    else:
        choice["text"] = text
    return dict(
        id="x",
        object="chat.completion",
        created=0,
        model=request["model"],
        choices=[choice],
    )


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Print nothing."""

    def send(self, status, body, retry_after=None, content_type="application/json", cut=None):
        """Send a response, or only the first `cut` bytes of its body."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        head = [
            f"HTTP/1.1 {status} X",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
        ]
        if retry_after is not None:
            head.append(f"Retry-After: {retry_after}")
        self.wfile.write("\r\n".join([*head, "", ""]).encode() + body[:cut])
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def do_GET(self):
        """List the models: there is one, `other-model`."""
        model = dict(id="other-model", object="model", created=0, owned_by="x")
        self.send(200, dict(object="list", data=[model]))

    def do_POST(self):
        """Answer a request, or respond with the fault of the server."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        caption = caption_of(prompt_of(request))
        n = self.server.admit(caption, self.headers["Authorization"])
        fault = self.server.fault(n, caption)
        if isinstance(fault, Failure):
            error = dict(message=fault.message, code=fault.message)
            self.send(fault.status, dict(error=error), fault.retry_after)
            return
        text = fault if isinstance(fault, str) else changed(caption)
        self.send_with_fault(completion(request, text), fault)

    def send_with_fault(self, body, fault):
        """Send an answer as its fault requires."""
        if fault is Fault.SLOW:
            time.sleep(3)
        if fault is Fault.PAGE:
            self.send(200, b"<html>busy</html>", content_type="text/html")
        elif fault is Fault.GARBAGE:
            self.send(200, b'{"choices": [{"mess')
        elif fault is Fault.EMPTY:
            self.send(200, {**body, "choices": []})
        elif fault is Fault.CUT:
            self.send(200, body, cut=60)
        else:
            self.send(200, body)


@pytest.fixture
def server(monkeypatch):
    """A server that runs in a thread of this process."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    thread = threading.Thread(
        target=server.serve_forever, kwargs=dict(poll_interval=0.02), daemon=True
    )
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def quick(monkeypatch):
    """Multiply every back-off by 0.02."""
    monkeypatch.setattr("compvl.text.openai_client.random.uniform", lambda low, high: 0.02)


# --- the client of such a server ---


def seconds_a_request(server, requests, concurrency):
    """Time a client, and check that its answers are right and that it keeps the server busy."""
    server.most_in_flight = 0
    server.together = concurrency
    start = time.perf_counter()
    answers = list(OpenAIClient(server.url, "m", concurrency=concurrency).complete(requests))
    seconds = (time.perf_counter() - start) / len(requests)
    assert sorted(answer.key for answer in answers) == list(range(len(requests)))
    for answer in answers:
        assert answer.text == changed(MANY[answer.key])
        assert not answer.error
    assert server.most_in_flight == concurrency
    return seconds


def test_many_in_flight_are_at_least_ten_times_as_fast(server):
    """32 requests in flight take at most a tenth of the time of one at a time."""
    server.latency = 0.3
    requests = requests_for(MANY[:96])
    list(OpenAIClient(server.url, "m").complete(requests[:1]))  # imports and such
    alone = seconds_a_request(server, requests[:24], 1)
    for _ in range(6):  # again where other programs took the cores that client and server share
        together = seconds_a_request(server, requests, 32)
        if alone >= 10 * together:
            break
    assert alone / together >= 10


def test_faults_are_retried(server, quick, tmp_path):
    """Every fault costs one more request, and no caption its hard positive."""
    faults = [
        Failure(500, "oh"),
        Fault.CUT,
        Fault.GARBAGE,
        Fault.PAGE,
        Fault.EMPTY,
        Failure(503, "loading", retry_after="0.1"),
        Failure(429, "slower"),
        Fault.SLOW,
        Failure(429, "slower", retry_after="0.2"),
        Failure(408, "late"),
    ]

    def fault(n, caption):
        if n % 3 == 0 and n // 3 < len(faults):
            return faults[n // 3]
        return None

    server.fault = fault
    client = OpenAIClient(server.url, "m", timeout=2, concurrency=4)
    counts = generate(MANY, client, out=tmp_path / "hp.jsonl", progress=False)
    assert counts.made == len(MANY)
    assert_complete(tmp_path / "hp.jsonl")
    assert not read_lines(tmp_path / "hp.rejected.jsonl")
    assert len(server.log) == len(MANY) + len(faults)


def test_a_429_pauses_all_requests_for_as_long_as_it_says(server):
    """After a 429 no request begins before its Retry-After, and none is lost."""

    def fault(n, caption):
        return Failure(429, "slower", retry_after="0.7") if n == 8 else None

    server.fault = fault
    client = OpenAIClient(server.url, "m", concurrency=4, retries=0)
    answers = list(client.complete(requests_for(MANY[:40])))
    assert len(answers) == 40
    assert not any(answer.error for answer in answers)
    times = [request.seconds for request in server.log]
    assert len(times) == 41
    assert max(after - before for before, after in itertools.pairwise(times)) > 0.6


def test_requests_per_minute(server):
    """At 1,200 requests a minute, 21 requests take a second or more."""
    start = time.perf_counter()
    client = OpenAIClient(server.url, "m", rpm=1_200)
    answers = list(client.complete(requests_for(MANY[:21])))
    assert len(answers) == 21
    assert time.perf_counter() - start > 1


@pytest.mark.parametrize(
    "fault, parts",
    [
        (Failure(401, "bad key sk-secret"), ["MY_KEY", "refuses the key"]),
        (Failure(404, "no such model"), ["no model m", "other-model"]),
        (Failure(400, "max_tokens?"), ["refuses every request", "max_tokens?"]),
        (Failure(429, "insufficient_quota"), ["insufficient_quota", "account"]),
        (Failure(429, "tomorrow", retry_after="7200"), ["wait 7200 s", "rpm="]),
        (Failure(500, "broken"), ["does not answer", "broken", "3 times"]),
        (Fault.PAGE, ["malformed"]),
    ],
)
def test_a_fault_of_every_request_stops_the_run(server, quick, tmp_path, monkeypatch, fault, parts):
    """The error says what to do and not the key; without the fault, the same call completes."""
    monkeypatch.setenv("MY_KEY", "sk-secret")
    out = tmp_path / "hp.jsonl"
    server.fault = lambda n, caption: fault
    client = OpenAIClient(server.url, "m", key_env="MY_KEY", retries=2)
    with pytest.raises(Unanswered) as error:
        generate(MANY, client, out=out, progress=False)
    message = str(error.value)
    for part in [*parts, "same command"]:
        assert part in message
    assert server.log[0].authorization == "Bearer sk-secret"
    assert "sk-secret" not in message
    for path in tmp_path.iterdir():
        assert "sk-secret" not in path.read_text()

    server.fault = no_fault
    assert generate(MANY, client, out=out, progress=False).made == len(MANY)
    assert_complete(out)


def test_a_server_that_is_not_there():
    """An address where no server listens is `Unanswered`."""
    client = OpenAIClient("http://127.0.0.1:9/v1", "m", retries=0)
    with pytest.raises(Unanswered, match="does not answer"):
        list(client.complete([RewriteRequest(0, "x")]))


def test_a_fault_of_one_caption_is_a_line_with_a_reason(server, quick, tmp_path):
    """A caption that the server refuses, or never answers well, does not stop the run."""
    faults = {
        MANY[7]: Failure(400, "too rude"),
        MANY[9]: Fault.CUT,
        MANY[11]: "A man with 11 ha…",
        MANY[13]: "Sure:\n",
    }
    server.latency = 0.01
    server.fault = lambda n, caption: faults.get(caption)
    out = tmp_path / "hp.jsonl"
    client = OpenAIClient(server.url, "m", retries=1, concurrency=8)
    counts = generate(MANY, client, out=out, rejected=tmp_path / "no.jsonl", progress=False)
    reasons = {"HTTP 400": 1, "no answer": 1, "cut off": 1, "too many words changed": 1}
    assert counts.made == len(MANY) - 4
    assert counts.refused == reasons
    assert counts.rejected == reasons
    rejected = read_lines(tmp_path / "no.jsonl")
    assert [(row["index"], row["reason"]) for row in rejected] == [
        (7, "HTTP 400"),
        (9, "no answer"),
        (11, "cut off"),
        (13, "too many words changed"),
    ]
    assert rejected[0]["answer"] == "too rude"
    assert [row["hard_positive"] for row in read_lines(out)].count(None) == 4


def test_rejected_answers_are_requested_again_with_another_seed(server, tmp_path):
    """Every tenth caption comes back identical twice; its third answer counts."""

    def fault(n, caption):
        again = MANY.index(caption) % 10 == 0 and server.captions.count(caption) < 3
        return caption if again else None

    server.fault = fault
    out = tmp_path / "hp.jsonl"
    client = OpenAIClient(server.url, "m")
    counts = generate(MANY, client, out=out, attempts=3, progress=False)
    assert counts.made == len(MANY)
    assert counts.rejected == {"identical": 24}
    assert_complete(out)


def test_half_a_character_is_kept(server, tmp_path):
    """Half a surrogate pair survives the request and the file."""
    server.fault = lambda n, caption: "a dog and a kitten \ud83d"
    out = tmp_path / "hp.jsonl"
    captions = ["a dog and a cat \ud83d"] * 2
    counts = generate(captions, OpenAIClient(server.url, "m"), "replace", out, progress=False)
    assert counts.made == 2
    assert read_lines(out)[1]["hard_positive"] == "a dog and a kitten \ud83d"


def test_plain_completions_inside_a_running_loop(server, tmp_path):
    """A notebook, whose event loop runs already, can generate by plain completions."""
    out = tmp_path / "hp.jsonl"
    client = OpenAIClient(server.url, "m", chat=False)

    async def notebook():
        return generate(MANY[:5], client, out=out, progress=False)

    assert asyncio.run(notebook()).made == 5
    assert_complete(out, MANY[:5])


# --- runs that are killed ---


def reason_if_identical(caption, answer):
    """Reject only an answer that is the caption; unlike the shipped rule it needs no lexicon."""
    return "identical" if answer == caption else ""


SAME = REWRITES["replace"]._replace(valid=reason_if_identical)

CHILD = textwrap.dedent("""
    import sys

    sys.path.insert(0, sys.argv[1])
    from test_language_models import MANY, SAME, OpenAIClient, generate

    client = OpenAIClient(sys.argv[2], "m", concurrency=8)
    print(generate(MANY, client, SAME, out=sys.argv[3], attempts=2, progress=False))
""")


def start(server, out):
    """Start a run in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, os.path.dirname(__file__), server.url, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )


def stop(process, server, n, sign):
    """Stop a run by a signal once the server has had `n` requests; return its standard error."""
    while len(server.log) < n and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(sign)
    stderr = process.communicate()[1]
    assert process.returncode == -sign, stderr
    return stderr


def test_a_resumed_run_repeats_only_what_was_in_flight(server, tmp_path):
    """A run that was stopped three times is completed, with no line lost or doubled."""
    out = tmp_path / "hp.jsonl"

    def fault(n, caption):
        if n % 13 == 5:
            return Fault.CUT
        if caption in MANY[3::20] and server.captions.count(caption) == 1:
            return caption
        return None

    server.latency = 0.03
    server.fault = fault
    for n, sign in [(25, signal.SIGKILL), (60, signal.SIGINT), (90, signal.SIGKILL)]:
        stderr = stop(start(server, out), server, n, sign)
        if sign == signal.SIGINT:
            assert "the same command goes on" in stderr

    client = OpenAIClient(server.url, "m", concurrency=8)
    counts = generate(MANY, client, SAME, out=out, attempts=2, progress=False)
    assert_complete(out)
    assert counts.captions == counts.made == len(MANY)
    rejected = [row["index"] for row in read_lines(tmp_path / "hp.rejected.jsonl")]
    assert rejected == sorted(set(rejected))
    requests = len(server.log)
    repeated = requests - len(set(server.captions))
    in_flight_at_stops = 3 * 8
    connections_cut = requests // 13 + 1
    identical_answers = 6
    assert repeated <= in_flight_at_stops + connections_cut + identical_answers
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".hp.jsonl.lock",
        "hp.jsonl",
        "hp.jsonl.journal",
        "hp.rejected.jsonl",
    ]


def oldest(waiting):
    """Index of the request that has waited longest."""
    return 0


def middle(waiting):
    """Index of the request in the middle."""
    return len(waiting) // 2


def newest(waiting):
    """Index of the request that came last."""
    return -1


class Table(Client):
    """A client without a model, which answers right; `order` picks one of `size` requests."""

    identity = dict(model="table")

    def __init__(self, order=oldest, size=10):
        self.order = order
        self.size = size

    def answer(self, request):
        """Answer one request."""
        return Answer(request.key, changed(caption_of(request.prompt)))

    def complete(self, requests):
        """Answer a request whenever `size` of them wait, or no more come before an answer."""
        waiting = []
        for request in requests:
            if request is not None:
                waiting.append(request)
            if waiting and (request is None or len(waiting) == self.size):
                yield self.answer(waiting.pop(self.order(waiting)))
        for request in waiting:
            yield self.answer(request)


class WrongTable(Table):
    """A client whose answer to every fourth caption, from the second on, is wrong."""

    def answer(self, request):
        """Answer one request, rightly or wrongly."""
        if request.key % 4 == 1:
            return Answer(request.key, "Something else.")
        return super().answer(request)


class Crash(BaseException):
    """What stands for a kill: no code of the library catches it."""


class Disk:
    """A disk on which the files that a process appends to have `room` bytes together."""

    def __init__(self, room):
        self.room = room

    def open_file(self, path, mode="r", **options):
        """Open a file as `open` does; a file to append to may crash."""
        file = open(path, mode, **options)  # noqa: SIM115 - its caller closes it
        return CrashingFile(file, self) if mode == "a" else file


class CrashingFile:
    """A file whose `write` crashes in the middle of the text that has no room left."""

    def __init__(self, file, disk):
        self.file = file
        self.disk = disk

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, text):
        """Write what there is room for."""
        self.file.write(text[: max(self.disk.room, 0)])
        self.file.flush()
        self.disk.room -= len(text)
        if self.disk.room < 0:
            raise Crash


def generate_until_crash(captions, out, room, monkeypatch):
    """Run until `room` bytes are written; return whether that came before the end."""
    client = WrongTable(middle, size=5)
    with monkeypatch.context() as patch:
        disk = Disk(room)
        patch.setattr("compvl.text.aligned_lines.open", disk.open_file, raising=False)
        try:
            generate(captions, client, out=out, progress=False)
        except Crash:
            return True
    return False


def assert_completed_by_a_second_run(captions, out):
    """A second run gives the lines and the counts of a run that was not killed."""
    counts = generate(captions, WrongTable(), out=out, progress=False)
    expected = []
    for i, caption in enumerate(captions):
        expected.append((caption, None if i % 4 == 1 else changed(caption)))
    assert [(row["caption"], row["hard_positive"]) for row in read_lines(out)] == expected, out
    assert counts.made == 9, out
    assert counts.captions == 12, out
    assert counts.refused == {"too many words changed": 3}, out
    assert counts.rejected == {"too many words changed": 3}, out
    rejected = read_lines(out.with_name("hp.rejected.jsonl"))
    assert [row["index"] for row in rejected] == [1, 5, 9], out


def test_a_run_is_resumed_after_a_kill_at_any_byte(tmp_path, monkeypatch):
    """Whatever a kill leaves of the files, the same call completes them."""
    captions = MANY[:12]
    monkeypatch.setattr(AlignedLines, "EVERY", 3)
    monkeypatch.setattr(AlignedLines, "COMPACT", 9)
    out = tmp_path / "whole" / "hp.jsonl"
    assert not generate_until_crash(captions, out, 10**9, monkeypatch)
    assert_completed_by_a_second_run(captions, out)
    for room in itertools.count(0, step=41):
        out = tmp_path / str(room) / "hp.jsonl"
        crashed = generate_until_crash(captions, out, room, monkeypatch)
        assert_completed_by_a_second_run(captions, out)
        if not crashed:
            break
    assert room > 3_000


class Backlog:
    """Counts the rows that were read and are not written yet."""

    def __init__(self):
        self.read = 0
        self.written = 0
        self.most = 0

    def rows(self, n):
        """Yield `n` rows; every fifth caption has no bikes."""
        for i in range(1, n + 1):
            self.read = i
            yield f"n{i}", f"A dog and {i} bikes." if i % 5 else "Two dogs."

    def record(self, row, outcome):
        """Return the value of a line, and note how many rows wait."""
        self.written += 1
        self.most = max(self.most, self.read - self.written)
        return outcome.text


def test_memory_is_bounded_by_the_window(tmp_path):
    """No more rows than the window wait, even if the oldest is always answered last."""
    out = tmp_path / "hp.jsonl"
    backlog = Backlog()
    counts = generate(
        backlog.rows(20_000),
        Table(newest),
        "swap",
        out,
        record=backlog.record,
        window=500,
        progress=False,
    )
    assert 400 < backlog.most < 500 + AlignedLines.EVERY
    assert counts.captions == 20_000
    assert len(read_lines(out)) == 20_000
    assert counts.refused == {"no and": 4_000, "words not kept": 16_000}
    assert (tmp_path / "hp.jsonl.journal").stat().st_size < 1_000


# --- files that changed between two runs ---


@pytest.fixture
def out(tmp_path):
    """The output of a run."""
    return tmp_path / "hp.jsonl"


def run(out, captions=MANY, **options):
    """Write hard positives of `captions` by the client without a model."""
    return generate(captions, Table(), out=out, progress=False, **options)


def assert_run_completes(out, **options):
    """A run over all captions ends well."""
    assert run(out, **options).captions == len(MANY)
    assert_complete(out)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(captions=["A cat.", *MANY[1:]]), "other captions"),
        (dict(captions=MANY[:40]), "50 captions"),
        (dict(kind="swap"), "kind: then 'replace'"),
        (dict(attempts=2), "attempts: then '1', now '2'"),
        (
            dict(kind=REWRITES["replace"]._replace(prompt="Input: {caption}\nOutput:")),
            "prompt: then",
        ),
    ],
    ids=["other captions", "fewer captions", "kind", "attempts", "prompt"],
)
def test_a_run_goes_on_only_as_it_began(out, change, message):
    """Other captions or settings are refused; the same captions and more are taken."""
    run(out, MANY[:50])
    with pytest.raises(CompvlError, match=message):
        run(out, **change)
    assert_run_completes(out)


def test_an_output_that_was_edited_is_refused(out):
    """An output with a line more, or cut, is refused; without `resume` the run begins anew."""
    run(out, MANY[:50])
    assert_run_completes(out)
    text = out.read_text()
    out.write_text(text + '"one more"\n')
    with pytest.raises(CompvlError, match="was changed"):
        run(out)
    out.write_text(text[:500])
    with pytest.raises(CompvlError, match="was changed"):
        run(out)
    assert_run_completes(out, resume=False)


def test_a_damaged_or_absent_journal_is_refused(out):
    """The error names the damaged line of the journal, or says that there is no journal."""
    assert_run_completes(out)
    journal = out.with_name("hp.jsonl.journal")
    with open(journal, "a") as file:
        file.write("}{\n")
    with pytest.raises(CompvlError, match="journal:3 is damaged"):
        run(out)
    journal.unlink()
    with pytest.raises(CompvlError, match="without the journal"):
        run(out)


def test_two_processes_do_not_write_one_file(out):
    """A file that is being written is refused."""
    assert_run_completes(out)
    journal = out.with_name("hp.jsonl.journal")
    settings = read_lines(journal)[0]["settings"]
    with (
        AlignedLines(out, settings, record=lambda row, outcome: outcome.text),
        pytest.raises(CompvlError, match="Another process"),
    ):
        run(out)


# --- models in this process ---


def training_texts():
    """The captions, and their prompts of both kinds."""
    texts = [*MANY]
    for kind in ("replace", "swap"):
        texts.extend(REWRITES[kind].ask(caption) for caption in MANY)
    return texts


def save_tokenizer(folder, **special):
    """Save a byte-level BPE tokenizer of the words of these texts."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        training_texts() * 3,
        vocab_size=600,
        special_tokens=list(special.values()),
        show_progress=False,
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """The client of a small causal model with random weights and a chat template."""
    import torch
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("causal")
    tokenizer = save_tokenizer(folder, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return TransformersClient(str(folder), "cpu", batch_size=4, max_tokens=8)


def answer_of(client, prompt, attempt=0):
    """Return the answer to one request."""
    (answer,) = client.complete([RewriteRequest(0, prompt, attempt)])
    return answer.text


def test_padding_changes_no_answer_of_a_causal_model(causal):
    """Prompts of several lengths get the same answers in one batch as alone."""
    captions = [
        "A cat and a dog",
        "a very long caption of a cat, a mouse and a dog",
        "salt and pepper",
    ]
    prompts = [REWRITES["swap"].ask(caption) for caption in captions]
    requests = [RewriteRequest(i, prompt) for i, prompt in enumerate(prompts)]
    together = [answer.text for answer in causal.complete(requests)]
    assert together == [answer_of(causal, prompt) for prompt in prompts]


def test_another_attempt_draws_another_answer(causal):
    """An attempt always draws the same answer, another attempt another, from its own generator."""
    import torch

    prompt = REWRITES["swap"].ask("A cat and a dog")
    state = torch.random.get_rng_state()
    first = answer_of(causal, prompt, attempt=1)
    assert answer_of(causal, prompt, attempt=1) == first
    assert answer_of(causal, prompt, attempt=2) != first
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_causal_model_generates_a_file(causal, tmp_path):
    """Both attempts of all six captions are rejected, since the weights are random."""
    counts = generate(MANY[:6], causal, out=tmp_path / "hp.jsonl", attempts=2, progress=False)
    assert counts.captions == 6
    assert sum(counts.rejected.values()) == 12


@pytest.fixture(scope="module")
def unmasker(tmp_path_factory):
    """A small masked language model with random weights and a byte-level tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("masked")
    tokenizer = save_tokenizer(
        folder, mask_token="<mask>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=130,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    return Unmasker(folder, "cpu", batch_size=2)


def test_proposals_of_a_byte_level_model_are_whole_words(unmasker):
    """Proposals begin words of the training text, and the word there is none of them.

    The last caption is too long for the model.
    """
    captions = [
        "A man rides a bike",
        "a dog",
        "a <mask> and a bike",
        "A man rides a bike" * 40 + " bike",
    ]
    spans = [(2, 5), (2, 5), (15, 19), (721, 725)]
    proposals = unmasker.candidates(captions, spans, top_k=7)
    assert [len(words) for words in proposals] == [7, 7, 7, 0]
    training_text = " ".join(" ".join(training_texts()).split())
    for word in itertools.chain(*proposals):
        assert word.isalpha()
        assert f" {word}" in training_text
    assert "man" not in [word.lower() for word in proposals[0]]
    best = unmasker.candidates(captions[:1], spans[:1], top_k=3)
    assert best == [proposals[0][:3]]


def test_every_caption_needs_a_span(unmasker):
    """Captions and spans of different number are an error."""
    with pytest.raises(CompvlError, match="2 captions and 1 spans"):
        unmasker.candidates(["a", "b"], [(0, 1)])


@pytest.mark.parametrize("load", [Unmasker, TransformersClient])
def test_a_folder_without_a_model_is_an_error(tmp_path, load):
    """The error says how to give a model."""
    with pytest.raises(CompvlError, match="give a folder"):
        load(tmp_path)

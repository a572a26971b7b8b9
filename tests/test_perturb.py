"Files of captions perturbed: killed and resumed, changed, malformed, large; by one process and by several."

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from compvl.core import CompvlError, read_json, read_jsonl
from compvl.data.aligned import read_aligned
from compvl.text.caption_files import Captions
from compvl.text.pipeline import perturb_file
from compvl.text.workers import CHUNK

REAL = Path(os.environ.get("COMPVL_REAL") or Path(__file__).resolve().parents[2] / "shared/real")

RULES = """
import os, time
from compvl.text.operators import Perturbed, Refused, Step

def quick(caption, rng, words, parsed):
    if "refuse" in caption: raise Refused("told to")
    new = rng.choice(["near", "above"])
    return Perturbed(caption, f"{caption} {new}", (Step(rng.choice(["add", "swap"]), "object", caption, f"{caption} {new}", len(caption), len(caption), "", new),))

def slow(*args): time.sleep(.001); return quick(*args)
def fails(caption, *args):
    if caption.startswith("700 "): raise ZeroDivisionError("by a caption")
    return quick(caption, *args)
def dies(caption, *args):
    if caption.startswith("700 "): os._exit(9)
    return quick(caption, *args)
"""
DRIVER = """
import json, sys
from compvl.text.pipeline import perturb_file
if __name__ == "__main__": print(json.dumps(perturb_file(**json.loads(sys.argv[1])).__dict__))
"""


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    "Folder of a module with rules, on the path of this process and its children."
    folder, patch = tmp_path_factory.mktemp("rules"), pytest.MonkeyPatch()
    (folder / "perturb_rules.py").write_text(RULES)
    (folder / "driver.py").write_text(DRIVER)
    patch.syspath_prepend(str(folder))
    patch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    )
    yield folder
    patch.undo()


def captions(n):
    return [f"{i} dogs on a red {'refuse ' if i % 7 == 3 else ''}mat" for i in range(n)]


def jsonl(path, values):
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


def run(src, dst, method="quick", kind="hn", **k):
    return perturb_file(
        kind, f"perturb_rules:{method}", src, dst, **dict(dict(workers=0, progress=False), **k)
    )


def start(rules, src, dst, method="slow", **k):
    return subprocess.Popen(
        [
            sys.executable,
            str(rules / "driver.py"),
            json.dumps(
                dict(
                    kind="hn",
                    method=f"perturb_rules:{method}",
                    src=str(src),
                    dst=str(dst),
                    progress=False,
                )
                | k
            ),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # a shell starts its background jobs deaf to it


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


@pytest.mark.parametrize(
    "workers, sign", [(1, signal.SIGKILL), (3, signal.SIGKILL), (1, signal.SIGINT)]
)
def test_stopped_and_taken_up(rules, tmp_path, workers, sign):
    src, n = jsonl(tmp_path / "in.jsonl", captions(4000)), 4000
    whole = run(src, tmp_path / "whole.jsonl")
    p, part, side = (
        start(rules, src, tmp_path / "out.jsonl", workers=workers),
        tmp_path / "out.jsonl.part",
        tmp_path / "out.jsonl.summary.json",
    )
    until = time.monotonic() + 60
    while not (side.exists() and part.exists()):
        assert p.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    children = psutil.Process(p.pid).children(recursive=True)
    assert len(children) >= workers
    p.send_signal(sign)
    err = p.communicate(timeout=60)[1]
    assert p.returncode != 0 and not (tmp_path / "out.jsonl").exists() and gone(children)
    if sign == signal.SIGINT:
        assert "goes on from there" in err and err.count("Traceback") == 1  # the workers are silent
    with open(part, "ab") as f:
        f.write(b'{"id": 99, "capt')  # half a line, as a cut may leave it
    (state := read_json(side))["config"]["method"] = (
        "perturb_rules:quick"  # the same rule without its pauses
    )
    side.write_text(json.dumps(state))
    s = run(src, tmp_path / "out.jsonl", workers=workers - 1)
    assert 0 < s.kept < n == s.n and (s.made, s.refused, s.sample) == (
        whole.made,
        whole.refused,
        whole.sample,
    )
    assert (tmp_path / "out.jsonl").read_bytes() == (
        tmp_path / "whole.jsonl"
    ).read_bytes() and not part.exists()
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.summary.json",
        "whole.jsonl",
        "whole.jsonl.summary.json",
    ]


def test_same_bytes_by_any_number_of_processes(rules, tmp_path):
    src = jsonl(tmp_path / "in.jsonl", captions(3 * CHUNK + 17))
    summaries = [run(src, tmp_path / f"{w}.jsonl", workers=w, progress=True) for w in (0, 2)]
    assert len({(tmp_path / f"{w}.jsonl").read_bytes() for w in (0, 2)}) == 1
    assert all(
        (s.made, s.refused, s.sample, s.n)
        == (summaries[0].made, summaries[0].refused, summaries[0].sample, 3 * CHUNK + 17)
        for s in summaries
    )
    rows = read_jsonl(tmp_path / "0.jsonl")
    assert [r["caption"] for r in rows] == captions(len(rows)) and [r["id"] for r in rows] == list(
        range(1, len(rows) + 1)
    )
    assert all(
        (r["hard_negative"] is None) == (r["refused"] == "told to") == ("refuse" in r["caption"])
        for r in rows
    )
    assert [
        len(t) for t in read_aligned(tmp_path / "0.jsonl", len(rows), side="hard_negative")
    ] == [r["hard_negative"] is not None for r in rows]


def test_what_does_not_fit_is_refused(rules, tmp_path):
    src, out = jsonl(tmp_path / "in.jsonl", captions(1200)), tmp_path / "out.jsonl"
    run(src, tmp_path / "whole.jsonl")
    first = run(src, out, limit=700)
    assert first.n == 700 and len(read_jsonl(out)) == 700
    for change, said in [
        (dict(seed=1), "seed was 0 and is 1"),
        (dict(method="slow"), "method was"),
        (dict(kind="hp"), "kind was 'hn' and is 'hp'"),
        (dict(bare=True), "form was"),
        (dict(limit=5), "700 captions already"),
    ]:
        with pytest.raises(CompvlError, match=said):
            run(src, out, **change)
    with pytest.raises(CompvlError, match="it has changed"):
        run(jsonl(tmp_path / "other.jsonl", captions(1200)[1:]), out)
    with pytest.raises(CompvlError, match="it has changed"):
        run(jsonl(tmp_path / "other.jsonl", captions(600)), out)
    kept, side = out.read_bytes(), tmp_path / "out.jsonl.summary.json"
    assert (
        kept == b"".join((tmp_path / "whole.jsonl").read_bytes().splitlines(True)[:700])
        and not (tmp_path / "out.jsonl.part").exists()
    )
    out.write_bytes(kept.replace(b"near", b"nose", 1))
    with pytest.raises(CompvlError, match="changed or damaged"):
        run(src, out)
    out.write_bytes(kept)
    state = side.read_bytes()
    side.unlink()
    with pytest.raises(CompvlError, match="--restart"):
        run(src, out)
    side.write_bytes(state)
    more = run(src, out)
    assert (more.kept, more.n) == (700, 1200) and out.read_bytes() == (
        tmp_path / "whole.jsonl"
    ).read_bytes()
    before = out.stat()
    again = run(src, out)
    assert (again.kept, again.n, again.made) == (
        1200,
        1200,
        more.made,
    ) and out.stat().st_mtime_ns == before.st_mtime_ns
    assert (
        run(src, out, seed=1, resume=False).kept == 0
        and out.read_bytes() != (tmp_path / "whole.jsonl").read_bytes()
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_malformed_line(rules, tmp_path, workers):
    good = captions(1300)
    src = jsonl(tmp_path / "in.jsonl", good)
    run(src, tmp_path / "whole.jsonl")
    lines = src.read_text().splitlines(True)
    src.write_text("".join(lines[:1201] + ['{"caption": \n'] + lines[1202:]))
    with pytest.raises(CompvlError, match=r"in.jsonl:1202 .*--skip-bad"):
        run(src, tmp_path / "out.jsonl", workers=workers)
    assert len(read_jsonl(tmp_path / "out.jsonl.part")) == 1201  # nothing that was made is lost
    src.write_text("".join(lines))
    s = run(src, tmp_path / "out.jsonl")
    assert (
        s.kept == 1201
        and (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    )
    src.write_text("".join(lines[:5] + ["7\n", '{"image": 3}\n'] + lines[7:]))
    s = run(src, tmp_path / "skipped.jsonl", skip_bad=True)
    rows = read_jsonl(tmp_path / "skipped.jsonl")
    assert (
        len(rows) == s.n == 1300
        and [r["refused"] for r in rows[5:7]]
        == ["is neither a caption nor an object with one", "has no caption"]
        and rows[5]["hard_negative"] is None
    )
    assert s.refused["has no caption"] == 1 and rows[7:] == read_jsonl(tmp_path / "whole.jsonl")[7:]


@pytest.mark.parametrize("workers", [0, 1])
def test_fault_of_a_rule(rules, tmp_path, workers):
    src = jsonl(tmp_path / "in.jsonl", captions(1300))
    with pytest.raises(RuntimeError, match="on caption 701: '700 dogs") as e:
        run(src, tmp_path / "out.jsonl", "fails", workers=workers)
    assert "ZeroDivisionError: by a caption" in str(e.value.__cause__) + repr(
        e.value.__cause__
    ) + "ZeroDivisionError: by a caption" * (workers == 0)
    assert (
        len(read_jsonl(tmp_path / "out.jsonl.part")) == CHUNK
        and not (tmp_path / "out.jsonl.lock").exists()
    )
    if workers:
        with pytest.raises(CompvlError, match="a worker process ended early"):
            run(src, tmp_path / "dead.jsonl", "dies", workers=workers)


def test_no_room_left(rules, tmp_path):
    resource = pytest.importorskip("resource")
    src, limits = (
        jsonl(tmp_path / "in.jsonl", captions(3000)),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    run(src, tmp_path / "whole.jsonl")
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (tmp_path.joinpath("whole.jsonl").stat().st_size * 2 // 5, limits[1])
    )
    try:
        with pytest.raises(
            CompvlError, match=r"cannot be written \(File too large\) after 1,000 captions"
        ):
            run(src, tmp_path / "out.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        run(src, tmp_path / "out.jsonl").kept == 1000
        and (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    )
    (tmp_path / "file").touch()
    with pytest.raises(CompvlError, match="cannot be written"):
        run(src, tmp_path / "file" / "out.jsonl")


def test_unknown_methods(rules, tmp_path):
    for method, workers in [
        ("nowhere:f", 0),
        ("perturb_rules:nothing", 0),
        ("no-such-method", 0),
        ("no-such-method", 1),
    ]:
        with pytest.raises(CompvlError, match="nowhere|nothing|Unknown method"):
            perturb_file(
                "hn",
                method,
                jsonl(tmp_path / "in.jsonl", captions(3)),
                tmp_path / "x.jsonl",
                workers=workers,
                progress=False,
            )
    assert not list(tmp_path.glob("x.jsonl*"))


def test_tables_coco_and_bare(rules, tmp_path):
    n, texts = 40, captions(40)
    with open(tmp_path / "in.csv", "w", newline="") as f:
        csv.writer(f).writerows(
            [["id", "title", "url"], *([f"n{i}", c, "a,b"] for i, c in enumerate(texts))]
        )
    run(tmp_path / "in.csv", tmp_path / "records.jsonl")
    run(tmp_path / "in.csv", tmp_path / "out.csv")
    run(tmp_path / "in.csv", tmp_path / "out.tsv", limit=3)
    rows, records = (
        list(csv.DictReader(open(tmp_path / "out.csv", newline=""))),
        read_jsonl(tmp_path / "records.jsonl"),
    )
    assert list(rows[0]) == ["id", "title", "url", "hard_negative", "operator", "target", "refused"]
    assert [
        (r["id"], r["title"], r["url"], r["hard_negative"] or None, r["refused"] or None)
        for r in rows
    ] == [(r["id"], r["caption"], "a,b", r["hard_negative"], r["refused"]) for r in records]
    assert list(csv.DictReader(open(tmp_path / "out.tsv", newline=""), delimiter="\t")) == rows[:3]
    coco = dict(
        info={},
        images=[dict(id=1, file_name="1.jpg")],
        annotations=[dict(id=100 + i, image_id=1, caption=c) for i, c in enumerate(texts)],
    )
    (tmp_path / "captions.json.gz").write_bytes(gzip.compress(json.dumps(coco).encode()))
    run(tmp_path / "captions.json.gz", tmp_path / "coco.jsonl", kind="hp")
    found = read_jsonl(tmp_path / "coco.jsonl")
    assert [(r["id"], r["caption"], r["hard_positive"]) for r in found] == [
        (100 + i, r["caption"], r["hard_negative"]) for i, r in enumerate(records)
    ]
    run(tmp_path / "captions.json.gz", tmp_path / "replace_hp.jsonl", kind="hp", bare=True)
    assert read_jsonl(tmp_path / "replace_hp.jsonl") == [
        r["hard_positive"] or "None" for r in found
    ]
    assert read_aligned(tmp_path / "replace_hp.jsonl", n) == read_aligned(
        tmp_path / "coco.jsonl", n, side="hard_positive"
    )
    with pytest.raises(CompvlError, match="suffix of the file to write"):
        run(tmp_path / "in.csv", tmp_path / "out.json")
    with pytest.raises(CompvlError, match="is the file that is read"):
        run(tmp_path / "records.jsonl", tmp_path / "records.jsonl")
    (tmp_path / "cut.json.gz").write_bytes((tmp_path / "captions.json.gz").read_bytes()[:-40])
    with pytest.raises(CompvlError, match="damaged gzip"):
        run(tmp_path / "cut.json.gz", tmp_path / "cut.jsonl")


def test_a_large_document_is_read_in_little_memory(tmp_path):
    "39 MB of COCO captions: memory grows by less than a tenth of it."
    with open(tmp_path / "large.json", "w") as f:
        f.write(
            '{"images": ['
            + ", ".join(
                f'{{"id": {i}, "file_name": "{i:012}.jpg", "url": "http://images/{i:012}.jpg"}}'
                for i in range(50_000)
            )
            + '], "annotations": ['
        )
        f.write(
            ", ".join(
                f'{{"image_id": {i // 5}, "id": {i}, "caption": "A {i} year old dog on a red mat, next to {i % 97} bowls and a window."}}'
                for i in range(300_000)
            )
            + "]}"
        )
    assert (tmp_path / "large.json").stat().st_size > 3.8e7
    p, before, n = psutil.Process(), None, 0
    for n, row in enumerate(Captions(tmp_path / "large.json"), 1):
        if n == 1:
            before = p.memory_info().rss
    assert n == 300_000 and row.id == 299_999 and p.memory_info().rss - before < 4e6


STREAM = """
import json, os, psutil, sys
from compvl.text.pipeline import perturb_file
from compvl.text.resumable_lines import ResumableLines
seen, add = [], ResumableLines.add
def measured(self, rows, block): add(self, rows, block); seen.append(psutil.Process().memory_info().rss)
ResumableLines.add = measured
s = perturb_file("hn", sys.argv[3], sys.argv[1], sys.argv[2], workers=0, progress=False)
print(json.dumps(dict(n=s.n, early=max(seen[:20]), late=max(seen))))
"""


def test_a_long_stream_is_perturbed_in_bounded_memory(rules, tmp_path):
    "50,000 captions in one process: what it holds after 10,000 is nearly all that it will hold."
    with open(tmp_path / "in.jsonl", "w") as f:
        for i in range(50_000):
            f.write(
                json.dumps(
                    f"A {('red', 'small', 'wooden')[i % 3]} dog number {i} on a mat next to {i % 89} bowls."
                )
                + "\n"
            )
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['torch'] = None\n" + STREAM,
            str(tmp_path / "in.jsonl"),
            str(tmp_path / "out.jsonl"),
            "perturb_rules:quick",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(out)
    assert (
        found["n"] == 50_000 and found["late"] - found["early"] < 60e6 and found["late"] < 400e6
    ), found


@pytest.mark.skipif(not (REAL / "aro").exists(), reason=f"there is no {REAL}/aro")
def test_real_captions(rules, tmp_path):
    src = REAL / "aro" / "coco_val_neg_captions.tsv"
    s = run(src, tmp_path / "out.jsonl", limit=600)
    rows = list(csv.DictReader(open(src, newline="", encoding="utf-8"), delimiter="\t"))[:600]
    assert [r["caption"] for r in read_jsonl(tmp_path / "out.jsonl")] == [
        r["title"] for r in rows
    ] and s.n == 600


class Stub:
    "Stands for both kinds of language model: a client that answers `n` requests, and a masked model."

    identity, name = dict(model="stub"), "stub"

    def __init__(self, n=10**6):
        self.n, self.asked = n, []

    def complete(self, requests):
        from compvl.text.clients import Answer, Unanswered

        for r in requests:
            if r is None:
                continue
            if len(self.asked) == self.n:
                raise Unanswered("It went home.")
            self.asked.append(r.key)
            yield Answer(
                r.key,
                r.prompt.rsplit("Input: ", 1)[1]
                .removesuffix("\nOutput:")
                .replace("red", "crimson"),
            )

    def candidates(self, texts, spans, top_k):
        return [["chair", "blue", "under"] for _ in texts]


def test_language_models(tmp_path):
    texts = [t for t in captions(300) if "refuse" not in t] + ["nothing"]
    src = jsonl(tmp_path / "in.jsonl", texts)

    def ask(client, **k):
        return perturb_file(
            "hp",
            "lm-replace",
            src,
            tmp_path / k.pop("out", "out.jsonl"),
            client=client,
            progress=False,
            **k,
        )

    tired, fresh = Stub(100), Stub()
    with pytest.raises(CompvlError, match="went home"):
        ask(tired)
    s = ask(fresh)
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert (
        [r["caption"] for r in rows] == texts
        and rows[-1]["refused"] == "identical"
        and s.refused == {"identical": 1}
        and sorted(tired.asked + fresh.asked) == list(range(len(texts)))
    )
    assert all(
        r["hard_positive"] == r["caption"].replace("red", "crimson")
        and r["steps"][0]["old"] == "red"
        for r in rows[:-1]
    )
    assert (
        s.n == len(texts)
        and s.total == len(texts) - 1
        and 0 < s.kept < s.n
        and len(s.sample) == 2
        and set(rows[0])
        == {"id", "caption", "hard_positive", "operator", "target", "steps", "refused"}
    )
    ask(Stub(), out="bare.jsonl", bare=True, limit=9)
    assert read_jsonl(tmp_path / "bare.jsonl") == [r["hard_positive"] for r in rows[:9]]
    s = perturb_file(
        "hn", "svlc-lm", src, tmp_path / "svlc.jsonl", unmasker=Stub(), sound=False, progress=False
    )
    assert s.n == len(texts) and all(
        r["operator"] == "replace" and r["hard_negative"] != r["caption"]
        for r in read_jsonl(tmp_path / "svlc.jsonl")[:-1]
    )
    for k in (
        dict(method="lm-swap"),
        dict(method="svlc-lm", kind="hn"),
        dict(method="swap", client=Stub()),
        dict(method="rules", kind="hn", unmasker=Stub()),
        dict(method="lm-swap", client=Stub(), kind="hn"),
    ):
        with pytest.raises(CompvlError, match="model|hard positives"):
            perturb_file(**dict(dict(kind="hp", src=src, dst=tmp_path / "no.jsonl"), **k))

"""Perturbing files of captions, by one process and by several.

Runs that are killed and resumed, files that changed between runs, malformed lines, large files.
"""

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from conftest import listen_to_interrupts
from released import REAL

from compvl.core import CompvlError, read_json, read_jsonl
from compvl.data.aligned import read_aligned
from compvl.text.caption_files import Captions
from compvl.text.clients import Answer, Unanswered
from compvl.text.pipeline import perturb_file
from compvl.text.workers import CHUNK

RULES = """
import os
import time

from compvl.text.operators import Perturbed, Refused, Step


def quick(caption, rng, words, parsed):
    if "refuse" in caption:
        raise Refused("on purpose")
    word = rng.choice(["near", "above"])
    new = f"{caption} {word}"
    operator = rng.choice(["add", "swap"])
    end = len(caption)
    step = Step(operator, "object", caption, new, end, end, "", word)
    return Perturbed(caption, new, (step,))


def slow(*args):
    time.sleep(0.001)
    return quick(*args)


def fails(caption, *args):
    if caption.startswith("700 "):
        raise ZeroDivisionError("by a caption")
    return quick(caption, *args)


def dies(caption, *args):
    if caption.startswith("700 "):
        os._exit(9)
    return quick(caption, *args)
"""

DRIVER = """
import json
import sys

from compvl.text.pipeline import perturb_file

if __name__ == "__main__":
    summary = perturb_file(**json.loads(sys.argv[1]))
    print(json.dumps(summary.__dict__))
"""

MEASURED = """
import json
import sys

sys.modules["torch"] = None

import psutil

from compvl.text.pipeline import perturb_file
from compvl.text.resumable_lines import ResumableLines

memory = []
add = ResumableLines.add


def measured(self, rows, block):
    add(self, rows, block)
    memory.append(psutil.Process().memory_info().rss)


ResumableLines.add = measured
summary = perturb_file("hn", sys.argv[3], sys.argv[1], sys.argv[2], workers=0, progress=False)
print(json.dumps(dict(n=summary.n, early=max(memory[:20]), late=max(memory))))
"""


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    """Folder of a module with rules, on the path of this process and its children."""
    folder = tmp_path_factory.mktemp("rules")
    (folder / "perturb_rules.py").write_text(RULES)
    (folder / "driver.py").write_text(DRIVER)
    paths = [str(folder)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))
    yield folder
    patch.undo()


def captions(n):
    """Return `n` captions; the rules refuse every seventh."""
    return [f"{i} dogs on a red {'refuse ' if i % 7 == 3 else ''}mat" for i in range(n)]


def write_jsonl(path, values):
    """Write one JSON value a line."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def read_table(path, delimiter=","):
    """Read the rows of a table, each a dictionary by column."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def run(src, dst, method="quick", kind="hn", **options):
    """Perturb a file by one of the rules, in this process unless `workers` are given."""
    options = {"workers": 0, "progress": False, **options}
    return perturb_file(kind, f"perturb_rules:{method}", src, dst, **options)


# --- runs that are stopped ---


def start(rules, src, dst, workers):
    """Start a slow run in a process of its own."""
    settings = dict(
        kind="hn",
        method="perturb_rules:slow",
        src=str(src),
        dst=str(dst),
        progress=False,
        workers=workers,
    )
    return subprocess.Popen(
        [sys.executable, str(rules / "driver.py"), json.dumps(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )


def wait_for_files(process, *paths):
    """Wait until a running process has written all of `paths`."""
    until = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)


def stop(process, sign, workers):
    """Stop a run and all its workers by a signal; return its standard error."""
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= workers
    process.send_signal(sign)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    return stderr


def resume_by_the_quick_rule(summary_path):
    """Let the quick rule resume a run of the slow rule, which is the same but for its pauses."""
    state = read_json(summary_path)
    state["config"]["method"] = "perturb_rules:quick"
    summary_path.write_text(json.dumps(state))


@pytest.mark.parametrize(
    "workers, sign", [(1, signal.SIGKILL), (3, signal.SIGKILL), (1, signal.SIGINT)]
)
def test_a_stopped_run_is_resumed(rules, tmp_path, workers, sign):
    """A run that was stopped goes on to the same bytes as a run that was not."""
    src = write_jsonl(tmp_path / "in.jsonl", captions(4_000))
    out = tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"
    summary_path = tmp_path / "out.jsonl.summary.json"
    whole = run(src, tmp_path / "whole.jsonl")

    process = start(rules, src, out, workers)
    wait_for_files(process, summary_path, part)
    stderr = stop(process, sign, workers)
    assert not out.exists()
    if sign == signal.SIGINT:
        assert "goes on from there" in stderr
        assert stderr.count("Traceback") == 1  # the workers are silent

    with open(part, "ab") as file:
        file.write(b'{"id": 99, "capt')  # half a line, as a kill may leave it
    resume_by_the_quick_rule(summary_path)
    summary = run(src, out, workers=workers - 1)
    assert 0 < summary.kept < 4_000
    assert summary.n == 4_000
    assert summary.made == whole.made
    assert summary.refused == whole.refused
    assert summary.sample == whole.sample
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not part.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.summary.json",
        "whole.jsonl",
        "whole.jsonl.summary.json",
    ]


def test_any_number_of_processes_writes_the_same_bytes(rules, tmp_path):
    """One process and two workers write the same file and the same summary."""
    n = 3 * CHUNK + 17
    src = write_jsonl(tmp_path / "in.jsonl", captions(n))
    alone = run(src, tmp_path / "0.jsonl", workers=0, progress=True)
    shared = run(src, tmp_path / "2.jsonl", workers=2, progress=True)
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()
    assert shared.made == alone.made
    assert shared.refused == alone.refused
    assert shared.sample == alone.sample
    assert alone.n == shared.n == n


def test_every_caption_has_its_record(rules, tmp_path):
    """Records are in the order of the captions; a refused one has a reason and no text."""
    n = 3 * CHUNK + 17
    src = write_jsonl(tmp_path / "in.jsonl", captions(n))
    out = tmp_path / "out.jsonl"
    run(src, out)
    rows = read_jsonl(out)
    assert [row["caption"] for row in rows] == captions(n)
    assert [row["id"] for row in rows] == list(range(1, n + 1))
    for row in rows:
        refused = "refuse" in row["caption"]
        assert (row["hard_negative"] is None) == refused
        assert (row["refused"] == "on purpose") == refused
    counts = [len(texts) for texts in read_aligned(out, n, side="hard_negative")]
    assert counts == [int(row["hard_negative"] is not None) for row in rows]


# --- files that changed between two runs ---


@pytest.fixture
def begun(rules, tmp_path):
    """A run over 1,200 captions, `whole`, and one that ended after 700 of them, `out`."""
    files = SimpleNamespace(
        src=write_jsonl(tmp_path / "in.jsonl", captions(1_200)),
        whole=tmp_path / "whole.jsonl",
        out=tmp_path / "out.jsonl",
        part=tmp_path / "out.jsonl.part",
        summary_path=tmp_path / "out.jsonl.summary.json",
    )
    run(files.src, files.whole)
    files.summary = run(files.src, files.out, limit=700)
    files.bytes = files.out.read_bytes()
    return files


def assert_untouched(begun):
    """The output of the run that ended early is as that run left it."""
    assert begun.out.read_bytes() == begun.bytes
    assert not begun.part.exists()


def resume(begun):
    """Complete the run that ended early."""
    summary = run(begun.src, begun.out)
    assert summary.kept == 700
    assert summary.n == 1_200
    assert begun.out.read_bytes() == begun.whole.read_bytes()
    return summary


def test_a_limited_run_writes_the_first_captions(begun):
    """A run with a limit writes the first lines of the whole run; without it, it goes on."""
    assert begun.summary.n == 700
    assert len(read_jsonl(begun.out)) == 700
    assert begun.bytes == b"".join(begun.whole.read_bytes().splitlines(True)[:700])
    assert_untouched(begun)
    resume(begun)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seed=1), "seed was 0 and is 1"),
        (dict(method="slow"), "method was"),
        (dict(kind="hp"), "kind was 'hn' and is 'hp'"),
        (dict(bare=True), "form was"),
        (dict(limit=5), "700 captions already"),
    ],
)
def test_other_settings_are_refused(begun, change, message):
    """A run is not resumed with other settings, and the error names what differs."""
    with pytest.raises(CompvlError, match=message):
        run(begun.src, begun.out, **change)
    assert_untouched(begun)
    resume(begun)


@pytest.mark.parametrize("texts", [captions(1_200)[1:], captions(600)], ids=["shifted", "fewer"])
def test_other_captions_are_refused(begun, tmp_path, texts):
    """A run is not resumed with other captions, or with fewer than it has written."""
    other = write_jsonl(tmp_path / "other.jsonl", texts)
    with pytest.raises(CompvlError, match="it has changed"):
        run(other, begun.out)
    assert_untouched(begun)
    resume(begun)


def test_a_changed_output_is_refused(begun):
    """A run is not resumed when its output was edited."""
    begun.out.write_bytes(begun.bytes.replace(b"near", b"nose", 1))
    with pytest.raises(CompvlError, match="changed or damaged"):
        run(begun.src, begun.out)
    begun.out.write_bytes(begun.bytes)
    resume(begun)


def test_an_output_without_its_summary_is_refused(begun):
    """A run is not resumed without its summary; the error names the option to start over."""
    state = begun.summary_path.read_bytes()
    begun.summary_path.unlink()
    with pytest.raises(CompvlError, match="--restart"):
        run(begun.src, begun.out)
    begun.summary_path.write_bytes(state)
    resume(begun)


def test_a_complete_run_is_returned_or_started_over(begun):
    """A complete run is returned and not written again; without `resume` it starts over."""
    complete = resume(begun)
    before = begun.out.stat()
    again = run(begun.src, begun.out)
    assert again.kept == 1_200
    assert again.n == 1_200
    assert again.made == complete.made
    assert begun.out.stat().st_mtime_ns == before.st_mtime_ns
    assert run(begun.src, begun.out, seed=1, resume=False).kept == 0
    assert begun.out.read_bytes() != begun.whole.read_bytes()


# --- faults ---


@pytest.mark.parametrize("workers", [0, 1])
def test_a_malformed_line_stops_the_run(rules, tmp_path, workers):
    """The error names the line, and the captions before it need not be perturbed again."""
    src = write_jsonl(tmp_path / "in.jsonl", captions(1_300))
    out = tmp_path / "out.jsonl"
    run(src, tmp_path / "whole.jsonl")
    lines = src.read_text().splitlines(True)
    src.write_text("".join(lines[:1_201] + ['{"caption": \n'] + lines[1_202:]))
    with pytest.raises(CompvlError, match=r"in.jsonl:1202 .*--skip-bad"):
        run(src, out, workers=workers)
    assert len(read_jsonl(tmp_path / "out.jsonl.part")) == 1_201  # no caption is lost
    src.write_text("".join(lines))
    assert run(src, out).kept == 1_201
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_malformed_lines_are_skipped_on_request(rules, tmp_path):
    """With `skip_bad` a malformed line becomes a refused record with its reason."""
    src = write_jsonl(tmp_path / "in.jsonl", captions(1_300))
    run(src, tmp_path / "whole.jsonl")
    lines = src.read_text().splitlines(True)
    src.write_text("".join(lines[:5] + ["7\n", '{"image": 3}\n'] + lines[7:]))
    summary = run(src, tmp_path / "skipped.jsonl", skip_bad=True)
    rows = read_jsonl(tmp_path / "skipped.jsonl")
    assert len(rows) == summary.n == 1_300
    assert rows[5]["refused"] == "is neither a caption nor an object with one"
    assert rows[5]["hard_negative"] is None
    assert rows[6]["refused"] == "has no caption"
    assert summary.refused["has no caption"] == 1
    assert rows[7:] == read_jsonl(tmp_path / "whole.jsonl")[7:]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_fault_of_a_rule_names_its_caption(rules, tmp_path, workers):
    """The error names the caption and the cause; whole chunks before it are kept."""
    src = write_jsonl(tmp_path / "in.jsonl", captions(1_300))
    with pytest.raises(RuntimeError, match="on caption 701: '700 dogs") as error:
        run(src, tmp_path / "out.jsonl", "fails", workers=workers)
    cause = error.value.__cause__
    if workers:
        assert "ZeroDivisionError: by a caption" in str(cause) + repr(cause)
    else:
        assert isinstance(cause, ZeroDivisionError)
        assert str(cause) == "by a caption"
    assert len(read_jsonl(tmp_path / "out.jsonl.part")) == CHUNK
    assert not (tmp_path / "out.jsonl.lock").exists()


def test_a_worker_that_dies_ends_the_run(rules, tmp_path):
    """A worker process that ends early is an error, and the run does not wait for it."""
    src = write_jsonl(tmp_path / "in.jsonl", captions(1_300))
    with pytest.raises(CompvlError, match="a worker process ended early"):
        run(src, tmp_path / "dead.jsonl", "dies", workers=1)


@contextmanager
def file_size_limit(size):
    """Let this process write no file of more than `size` bytes."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_loses_no_written_chunk(rules, tmp_path):
    """A run that cannot write says so, and is resumed once there is room."""
    src = write_jsonl(tmp_path / "in.jsonl", captions(3_000))
    whole = tmp_path / "whole.jsonl"
    out = tmp_path / "out.jsonl"
    run(src, whole)
    message = r"cannot be written \(File too large\) after 1,000 captions"
    with (
        file_size_limit(whole.stat().st_size * 2 // 5),
        pytest.raises(CompvlError, match=message),
    ):
        run(src, out)
    assert run(src, out).kept == 1_000
    assert out.read_bytes() == whole.read_bytes()


def test_a_folder_that_is_a_file_cannot_be_written(rules, tmp_path):
    """An output below a file is an error of the user."""
    src = write_jsonl(tmp_path / "in.jsonl", captions(3))
    (tmp_path / "file").touch()
    with pytest.raises(CompvlError, match="cannot be written"):
        run(src, tmp_path / "file" / "out.jsonl")


@pytest.mark.parametrize(
    "method, workers, message",
    [
        ("nowhere:f", 0, "nowhere"),
        ("perturb_rules:nothing", 0, "nothing"),
        ("no-such-method", 0, "Unknown method"),
        ("no-such-method", 1, "Unknown method"),
    ],
)
def test_unknown_methods(rules, tmp_path, method, workers, message):
    """An unknown method is an error before any file is written."""
    src = write_jsonl(tmp_path / "in.jsonl", captions(3))
    dst = tmp_path / "x.jsonl"
    with pytest.raises(CompvlError, match=message):
        perturb_file("hn", method, src, dst, workers=workers, progress=False)
    assert not list(tmp_path.glob("x.jsonl*"))


# --- formats ---


@pytest.fixture
def table(rules, tmp_path):
    """A table of 40 captions."""
    path = tmp_path / "in.csv"
    rows = [[f"n{i}", caption, "a,b"] for i, caption in enumerate(captions(40))]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["id", "title", "url"], *rows])
    return path


@pytest.fixture
def coco(rules, tmp_path):
    """The same 40 captions as a compressed COCO document."""
    annotations = [
        dict(id=100 + i, image_id=1, caption=caption) for i, caption in enumerate(captions(40))
    ]
    images = [dict(id=1, file_name="1.jpg")]
    document = dict(info={}, images=images, annotations=annotations)
    path = tmp_path / "captions.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def test_a_table_keeps_its_columns(table, tmp_path):
    """Tables are written with the columns that were read, and the same texts as records."""
    run(table, tmp_path / "records.jsonl")
    run(table, tmp_path / "out.csv")
    run(table, tmp_path / "out.tsv", limit=3)
    records = read_jsonl(tmp_path / "records.jsonl")
    rows = read_table(tmp_path / "out.csv")
    assert list(rows[0]) == ["id", "title", "url", "hard_negative", "operator", "target", "refused"]
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        assert row["id"] == record["id"]
        assert row["title"] == record["caption"]
        assert row["url"] == "a,b"
        assert (row["hard_negative"] or None) == record["hard_negative"]
        assert (row["refused"] or None) == record["refused"]
    assert read_table(tmp_path / "out.tsv", delimiter="\t") == rows[:3]


def test_coco_captions_are_perturbed_as_those_of_a_table(table, coco, tmp_path):
    """A compressed COCO document gives the texts of the table, under its own ids."""
    run(table, tmp_path / "records.jsonl")
    run(coco, tmp_path / "coco.jsonl", kind="hp")
    records = read_jsonl(tmp_path / "records.jsonl")
    found = read_jsonl(tmp_path / "coco.jsonl")
    assert len(found) == len(records)
    for i, (row, record) in enumerate(zip(found, records, strict=True)):
        assert row["id"] == 100 + i
        assert row["caption"] == record["caption"]
        assert row["hard_positive"] == record["hard_negative"]


def test_bare_lines_are_aligned_as_records_are(coco, tmp_path):
    """Bare lines contain the texts alone, with "None" for a refused caption."""
    records = tmp_path / "coco.jsonl"
    bare = tmp_path / "replace_hp.jsonl"
    run(coco, records, kind="hp")
    run(coco, bare, kind="hp", bare=True)
    expected = [row["hard_positive"] or "None" for row in read_jsonl(records)]
    assert read_jsonl(bare) == expected
    assert read_aligned(bare, 40) == read_aligned(records, 40, side="hard_positive")


def test_files_that_cannot_be_written_or_read(table, coco, tmp_path):
    """An unknown suffix, the input as output, and a damaged archive are errors."""
    records = tmp_path / "records.jsonl"
    run(table, records)
    with pytest.raises(CompvlError, match="suffix of the file to write"):
        run(table, tmp_path / "out.json")
    with pytest.raises(CompvlError, match="is the file that is read"):
        run(records, records)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(coco.read_bytes()[:-40])
    with pytest.raises(CompvlError, match="damaged gzip"):
        run(cut, tmp_path / "cut.jsonl")


@pytest.mark.skipif(not (REAL / "aro").exists(), reason=f"there is no {REAL}/aro")
def test_real_captions(rules, tmp_path):
    """The first 600 captions of a released table are perturbed in their order."""
    src = REAL / "aro" / "coco_val_neg_captions.tsv"
    summary = run(src, tmp_path / "out.jsonl", limit=600)
    titles = [row["title"] for row in read_table(src, delimiter="\t")[:600]]
    assert [row["caption"] for row in read_jsonl(tmp_path / "out.jsonl")] == titles
    assert summary.n == 600


# --- memory ---


def write_large_coco(path):
    """Write a COCO document with 50,000 images and 300,000 captions."""
    images = (
        f'{{"id": {i}, "file_name": "{i:012}.jpg", "url": "http://images/{i:012}.jpg"}}'
        for i in range(50_000)
    )
    annotations = (
        f'{{"image_id": {i // 5}, "id": {i}, "caption": '
        f'"A {i} year old dog on a red mat, next to {i % 97} bowls and a window."}}'
        for i in range(300_000)
    )
    with open(path, "w") as file:
        file.write('{"images": [' + ", ".join(images) + '], "annotations": [')
        file.write(", ".join(annotations) + "]}")


def test_a_large_document_is_read_in_little_memory(tmp_path):
    """39 MB of COCO captions: memory grows by about a tenth of that at most."""
    path = tmp_path / "large.json"
    write_large_coco(path)
    assert path.stat().st_size > 3.8e7
    process = psutil.Process()
    rows = iter(Captions(path))
    next(rows)
    n = 1
    before = process.memory_info().rss
    for row in rows:
        n += 1
        last_id = row.id
    assert n == 300_000
    assert last_id == 299_999
    assert process.memory_info().rss - before < 4e6


def test_a_long_stream_is_perturbed_in_bounded_memory(rules, tmp_path):
    """50,000 captions in one process, without torch: memory hardly grows after 10,000."""
    colours = ("red", "small", "wooden")
    src = write_jsonl(
        tmp_path / "in.jsonl",
        (
            f"A {colours[i % 3]} dog number {i} on a mat next to {i % 89} bowls."
            for i in range(50_000)
        ),
    )
    out = tmp_path / "out.jsonl"
    stdout = subprocess.run(
        [sys.executable, "-c", MEASURED, str(src), str(out), "perturb_rules:quick"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(stdout)
    assert found["n"] == 50_000, found
    assert found["late"] - found["early"] < 60e6, found
    assert found["late"] < 400e6, found


# --- language models ---


class Stub:
    """Both kinds of language model: a client that answers `n` requests, and a masked model."""

    identity = dict(model="stub")
    name = "stub"

    def __init__(self, n=10**6):
        self.n = n
        self.answered = []  # keys of the requests

    def complete(self, requests):
        """Answer each request by its caption, with crimson for red."""
        for request in requests:
            if request is None:
                continue
            if len(self.answered) == self.n:
                raise Unanswered("The stub gives no more answers.")
            self.answered.append(request.key)
            caption = request.prompt.rsplit("Input: ", 1)[1].removesuffix("\nOutput:")
            yield Answer(request.key, caption.replace("red", "crimson"))

    def candidates(self, texts, spans, top_k):
        """Propose the same three words everywhere."""
        return [["chair", "blue", "under"] for _ in texts]


@pytest.fixture
def texts():
    """Captions to rewrite; the last has no red in it, so that its answer is identical."""
    return [caption for caption in captions(300) if "refuse" not in caption] + ["nothing"]


@pytest.fixture
def source(texts, tmp_path):
    """The file of these captions."""
    return write_jsonl(tmp_path / "in.jsonl", texts)


def rewrite(source, dst, client, **options):
    """Write hard positives by a language model."""
    return perturb_file("hp", "lm-replace", source, dst, client=client, progress=False, **options)


def test_a_language_model_that_stops_is_resumed(texts, source, tmp_path):
    """Each caption is requested once, although the first client stops after 100 answers."""
    out = tmp_path / "out.jsonl"
    first = Stub(100)
    second = Stub()
    with pytest.raises(CompvlError, match="gives no more answers"):
        rewrite(source, out, first)
    summary = rewrite(source, out, second)
    assert sorted(first.answered + second.answered) == list(range(len(texts)))
    assert summary.n == len(texts)
    assert summary.total == len(texts) - 1
    assert 0 < summary.kept < summary.n
    assert summary.refused == {"identical": 1}
    assert len(summary.sample) == 2

    rows = read_jsonl(out)
    assert [row["caption"] for row in rows] == texts
    columns = {"id", "caption", "hard_positive", "operator", "target", "steps", "refused"}
    assert set(rows[0]) == columns
    for row in rows[:-1]:
        assert row["hard_positive"] == row["caption"].replace("red", "crimson")
        assert row["steps"][0]["old"] == "red"
    assert rows[-1]["refused"] == "identical"


def test_a_language_model_writes_bare_lines(source, tmp_path):
    """Bare lines contain the texts of the records."""
    rewrite(source, tmp_path / "out.jsonl", Stub())
    rewrite(source, tmp_path / "bare.jsonl", Stub(), bare=True, limit=9)
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert read_jsonl(tmp_path / "bare.jsonl") == [row["hard_positive"] for row in rows[:9]]


def test_a_language_model_that_cannot_be_reached_costs_no_finished_file(source, tmp_path):
    """A restart sets the finished file aside, names it, and removes it when it is done."""
    out = tmp_path / "out.jsonl"
    rewrite(source, out, Stub(), limit=9)
    finished = out.read_text()
    with pytest.raises(CompvlError, match="before is .*out.jsonl.earlier"):
        rewrite(source, out, Stub(0), resume=False)
    earlier = tmp_path / "out.jsonl.earlier"
    assert earlier.read_text() == finished
    rewrite(source, out, Stub(), resume=False)
    assert len(read_jsonl(out)) > 9
    assert not list(tmp_path.glob("*.earlier"))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(bare=True), "form: then 'jsonl', now 'bare'"),
        (dict(key="text"), "key: then 'None', now 'text'"),
        (dict(skip_bad=True), "skip_bad: then 'False', now 'True'"),
    ],
    ids=["form", "key", "skip_bad"],
)
def test_a_run_of_a_language_model_goes_on_only_as_it_began(source, tmp_path, options, message):
    """Lines of another form, or from another column, are not written below those that are there."""
    out = tmp_path / "out.jsonl"
    rewrite(source, out, Stub(), limit=9)
    before = out.read_text()
    with pytest.raises(CompvlError, match=message):
        rewrite(source, out, Stub(), **options)
    assert out.read_text() == before


def test_a_masked_model_proposes_replacements(texts, source, tmp_path):
    """The hard negatives of a masked language model differ from their captions."""
    out = tmp_path / "svlc.jsonl"
    summary = perturb_file(
        "hn", "svlc-lm", source, out, unmasker=Stub(), sound=False, progress=False
    )
    assert summary.n == len(texts)
    for row in read_jsonl(out)[:-1]:
        assert row["operator"] == "replace"
        assert row["hard_negative"] != row["caption"]


@pytest.mark.parametrize(
    "kind, method, options",
    [
        ("hp", "lm-swap", {}),
        ("hn", "svlc-lm", {}),
        ("hp", "swap", dict(client=Stub())),
        ("hn", "rules", dict(unmasker=Stub())),
        ("hn", "lm-swap", dict(client=Stub())),
    ],
    ids=[
        "no client",
        "no masked model",
        "client of a rule",
        "masked model of a rule",
        "hard negatives by a client",
    ],
)
def test_methods_and_models_must_fit(source, tmp_path, kind, method, options):
    """A method without its model, or a model without its method, is an error."""
    with pytest.raises(CompvlError, match="model|hard positives"):
        perturb_file(kind, method, source, tmp_path / "no.jsonl", **options)

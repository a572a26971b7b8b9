"""Reproductions of throw-away notebooks: failures, notebooks that are up to date, interrupts."""

import json
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
from conftest import listen_to_interrupts
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from compvl.app.estimate import TimeLeft
from compvl.app.reproduction import reproduce
from compvl.core import CompvlError, read_json

PARAMETERS = 'profile = "micro"\ndata_root = None\nout = "reproduction"'
WRITE_TABLE = """\
# Write
from pathlib import Path
(Path(out) / 'tables').mkdir(exist_ok=True)
(Path(out) / 'tables/{name}.csv').write_text(profile)"""
COUNT_TABLES = """\
from pathlib import Path
n = len(list(Path(out).glob('tables/01_*.csv')))
"""
FOLDERS = """\
from pathlib import Path
from compvl.core import runs_dir
assert Path.cwd() == Path(out)
print(runs_dir())"""


def write_notebook(folder, name, *sources, parameters=PARAMETERS, reads=False):
    """Write a notebook with these cells; its last cell has the tag `reads` if it reads others."""
    cells = [new_markdown_cell(f"# About {name}")]
    if parameters:
        cells.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells += [new_code_cell(source) for source in sources]
    if reads:
        cells[-1].metadata["tags"] = ["reads"]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    nb = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(nb, folder / f"{name}.ipynb")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("COMPVL_RUNS", raising=False)

    def go(*wanted, profile="smoke", **options):
        return reproduce(list(wanted), profile, out=tmp_path / "out", folder=tmp_path, **options)

    return go


def statuses(summary):
    return [result.status for result in summary.results]


def test_a_failure_is_kept_and_reported_and_the_others_run(tmp_path, run, capsys):
    print_and_fail = ("kept = 'so far'\nprint(kept)", "# Divide\n1/0", "never = 1")
    write_notebook(tmp_path, "01_fails", *print_and_fail)
    write_notebook(tmp_path, "02_dies", "import os\nos._exit(3)")
    write_notebook(tmp_path, "03_works", WRITE_TABLE.format(name="t"))
    summary = run()
    assert statuses(summary) == ["failed", "failed", "done"]
    assert not summary.ok
    assert "(Divide): ZeroDivisionError: division by zero" in summary.results[0].error
    assert "DeadKernelError" in summary.results[1].error
    partial = nbformat.read(tmp_path / "out/notebooks/01_fails.ipynb", 4)
    assert any("so far" in str(cell.get("outputs")) for cell in partial.cells)
    assert "ZeroDivisionError" in capsys.readouterr().err
    page = (tmp_path / "out/index.html").read_text()
    assert "ZeroDivisionError" in page
    assert 'href="tables/t.csv"' in page
    assert 'href="notebooks/03_works.html"' in page
    assert summary.results[2].seconds > 0
    assert summary.results[2].peak_mb > 10


def test_up_to_date_is_skipped_until_something_changes(tmp_path, run, monkeypatch):
    write_notebook(tmp_path, "01_a", WRITE_TABLE.format(name="a"))
    write_notebook(tmp_path, "02_b", WRITE_TABLE.format(name="b"))
    assert statuses(run()) == ["done", "done"]
    assert statuses(run()) == ["up to date", "up to date"]

    write_notebook(tmp_path, "02_b", WRITE_TABLE.format(name="b"), "another = 1")
    assert statuses(run()) == ["up to date", "done"]  # its cells changed

    (tmp_path / "out/tables/a.csv").unlink()
    assert statuses(run()) == ["done", "up to date"]  # what it made is gone

    assert statuses(run("1", profile="micro")) == ["done"]  # its parameters changed
    assert (tmp_path / "out/tables/a.csv").read_text() == "micro"

    monkeypatch.setattr("compvl.app.reproduction.surroundings_digest", lambda: "other code")
    assert statuses(run("2")) == ["done"]  # the package changed
    assert statuses(run("2", force=True)) == ["done"]
    # the page lists notebooks of earlier calls too
    assert 'href="tables/a.csv"' in (tmp_path / "out/index.html").read_text()


def test_what_reads_other_results_runs_again_when_they_change(tmp_path, run):
    write_notebook(tmp_path, "01_a", WRITE_TABLE.format(name="01_a"))
    read_and_write = COUNT_TABLES + WRITE_TABLE.format(name="11_b")
    write_notebook(tmp_path, "11_b", read_and_write, reads=True)
    report = tmp_path / "out/report.html"
    assert statuses(run()) == ["done", "done"]
    assert statuses(run()) == ["up to date", "up to date"]  # what it wrote itself does not count
    (tmp_path / "out/tables/01_a.csv").write_text("another")
    run("1")
    assert "have changed since it ran" in report.read_text()
    assert statuses(run()) == ["up to date", "done"]
    assert "have changed since it ran" not in report.read_text()


def test_time_left_is_estimated_from_the_committed_run(tmp_path, run, monkeypatch, capsys):
    write_notebook(tmp_path, "01_a", "x = 1")
    write_notebook(tmp_path, "02_b", "x = 1")
    run(jobs=1)
    assert "2 of 2 notebooks to run: time left unknown" in capsys.readouterr().err

    def an_hour_for_the_first(profile):
        return {"01_a": 3600.0}

    monkeypatch.setattr("compvl.app.reproduction.known_seconds", an_hour_for_the_first)
    run(force=True, jobs=1)
    left = "about 1 h 0 min left, and 1 notebook of unknown length"
    assert f"2 of 2 notebooks to run: {left}" in capsys.readouterr().err
    run(jobs=1)
    assert "0 of 2 notebooks to run: nothing left" in capsys.readouterr().err


def test_time_left_follows_the_speed_of_this_machine():
    left = TimeLeft(["01", "02", "03"], {"01": 100.0, "02": 200.0, "03": 300.0})
    assert left.seconds() == 600
    left.ended("01", 400.0)  # four times as slow
    assert left.seconds() == 4 * 500
    assert left.seconds("02", 300.0) == 4 * 500 - 300
    assert left.seconds("02", 1100.0) == 5 * 500 - 1100  # and the second is slower than that
    left.ended("02", None)  # failed: it says nothing of the speed
    assert left.seconds() == 4 * 300


def test_only_declared_parameters_are_passed(tmp_path, run):
    out = tmp_path / "out"
    no_parameter = "assert 'profile' not in globals()"
    one_parameter = "assert profile == 'smoke' and 'out' not in globals()"
    expected = ("smoke", str(tmp_path), str(out))
    all_parameters = f"assert (profile, data_root, out) == {expected!r}"
    write_notebook(tmp_path, "01_none", no_parameter, parameters=None)
    write_notebook(tmp_path, "02_one", one_parameter, parameters='profile = "micro"')
    write_notebook(tmp_path, "03_all", all_parameters)
    assert statuses(run(data_root=tmp_path)) == ["done"] * 3
    assert read_json(out / "notebooks/02_one.json")["parameters"] == {"profile": "smoke"}


def test_notebooks_run_in_out_and_runs_go_there(tmp_path, run, monkeypatch):
    write_notebook(tmp_path, "01_where", FOLDERS)
    executed = tmp_path / "out/notebooks/01_where.ipynb"
    monkeypatch.chdir(tmp_path)
    assert run().ok
    assert str(tmp_path / "out/runs") in executed.read_text()
    monkeypatch.setenv("COMPVL_RUNS", str(tmp_path / "mine"))
    assert run(force=True).ok
    assert str(tmp_path / "mine") in executed.read_text()


def test_mistakes_say_what_is_known(tmp_path, run):
    write_notebook(tmp_path, "01_a")
    with pytest.raises(CompvlError, match="01_a"):
        run("02")
    with pytest.raises(CompvlError, match="smoke.*paper"):
        run(profile="tiny")
    with pytest.raises(CompvlError, match="nowhere"):
        run(data_root=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


# a notebook that ends only if another one runs at the same time
MEET = """\
import time
from pathlib import Path
Path(out, '{name}').touch()
for _ in range(600):
    if Path(out, '{other}').exists(): break
    time.sleep(.1)
else: raise TimeoutError
"""
TWO_TABLES = """\
from pathlib import Path
assert len(list(Path(out).glob('tables/*'))) == 2"""


def test_several_at_a_time_keep_their_outputs_apart(tmp_path, run):
    for name, own, other in (("01_a", "01", "02"), ("02_b", "02", "01")):
        source = MEET.format(name=own, other=other) + WRITE_TABLE.format(name=name)
        write_notebook(tmp_path, name, source)
    write_notebook(tmp_path, "03_dies", "import os\nos._exit(3)")
    write_notebook(tmp_path, "11_reads", TWO_TABLES, reads=True)
    summary = run(jobs=3)
    assert [(result.name, result.status, result.outputs) for result in summary.results] == [
        ("01_a", "done", ["tables/01_a.csv"]),
        ("02_b", "done", ["tables/02_b.csv"]),
        ("03_dies", "failed", []),
        ("11_reads", "done", []),
    ]
    assert all(result.peak_mb > 10 for result in summary.results)
    assert all(result.commit for result in summary.results)
    assert statuses(run(jobs=3)) == ["up to date", "up to date", "failed", "up to date"]
    with pytest.raises(CompvlError, match="jobs=0"):
        run(jobs=0)


def test_a_file_in_the_place_of_the_folder_is_reported(tmp_path):
    write_notebook(tmp_path, "01_a", "1")
    (tmp_path / "out").write_text("")
    with pytest.raises(CompvlError, match="out/notebooks cannot be made .*--out"):
        reproduce(["01"], "smoke", out=tmp_path / "out", folder=tmp_path)


WAIT_FOR_THE_FIRST = """\
from pathlib import Path
import os, time
while not Path(out, 'notebooks', '01_a.json').exists(): time.sleep(.1)
Path(out, 'pid').write_text(str(os.getpid()))
time.sleep(120)"""
COMMAND = """\
import sys
from pathlib import Path
from compvl.app import cli, plan
folder, *arguments = sys.argv[1:]
plan.notebooks_dir = lambda: Path(folder)
sys.argv = ['compvl', *arguments]
cli.main()"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupt_writes_the_page_and_leaves_no_kernel(tmp_path, jobs):
    write_notebook(tmp_path, "01_a", "x = 1")
    write_notebook(tmp_path, "02_slow", WAIT_FOR_THE_FIRST)
    write_notebook(tmp_path, "03_slow", "import time\ntime.sleep(120)")
    write_notebook(tmp_path, "04_never", "x = 1")
    out = tmp_path / "out"
    options = ["--profile", "smoke", "--jobs", str(jobs), "--json", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path), "reproduce", *options],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )
    pid = out / "pid"
    for _ in range(600):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    summary = json.loads(printed)
    assert not summary["ok"]
    interrupted = dict.fromkeys(["02_slow", "03_slow", "04_never"], "interrupted")
    by_name = {notebook["name"]: notebook["status"] for notebook in summary["notebooks"]}
    assert by_name == {"01_a": "done"} | interrupted
    assert summary["notebooks"][-1]["error"].startswith("not started")
    assert not (out / "notebooks/04_never.json").exists()
    assert (out / "index.html").read_text().count('"interrupted"') == 3
    assert not psutil.pid_exists(int(pid.read_text()))

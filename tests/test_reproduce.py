"""The runner on throw-away notebooks: failing, skipping, interrupting."""

import json
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from compvl.app.reproduction import reproduce
from compvl.core import CompvlError, read_json

PARAMETERS = 'profile = "micro"\ndata_root = None\nout = "reproduction"'
TABLE = "# Write\nfrom pathlib import Path\n(Path(out)/'tables').mkdir(exist_ok=True)\n(Path(out)/'tables/{name}.csv').write_text(profile)"


def notebook(folder, name, *cells, parameters=PARAMETERS):
    head = [new_code_cell(parameters, metadata={"tags": ["parameters"]})] if parameters else []
    cells = [new_markdown_cell(f"# About {name}"), *head, *(new_code_cell(c) for c in cells)]
    nb = new_notebook(
        cells=cells,
        metadata={
            "kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}
        },
    )
    nbformat.write(nb, folder / f"{name}.ipynb")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("COMPVL_RUNS", raising=False)

    def go(*wanted, profile="smoke", **options):
        return reproduce(list(wanted), profile, out=tmp_path / "out", folder=tmp_path, **options)

    return go


def statuses(summary):
    return [r.status for r in summary.results]


def test_failure_is_kept_told_and_passed_over(tmp_path, run, capsys):
    notebook(tmp_path, "01_fails", "kept = 'so far'\nprint(kept)", "# Divide\n1/0", "never = 1")
    notebook(tmp_path, "02_dies", "import os\nos._exit(3)")
    notebook(tmp_path, "03_works", TABLE.format(name="t"))
    summary = run()
    assert statuses(summary) == ["failed", "failed", "done"] and not summary.ok
    assert "(Divide): ZeroDivisionError: division by zero" in summary.results[0].error
    assert "DeadKernelError" in summary.results[1].error
    partial = nbformat.read(tmp_path / "out/notebooks/01_fails.ipynb", 4)
    assert any("so far" in str(c.get("outputs")) for c in partial.cells)
    assert "ZeroDivisionError" in capsys.readouterr().err
    page = (tmp_path / "out/index.html").read_text()
    assert (
        "ZeroDivisionError" in page
        and 'href="tables/t.csv"' in page
        and 'href="notebooks/03_works.html"' in page
    )
    assert summary.results[2].seconds > 0 and summary.results[2].peak_mb > 10


def test_up_to_date_is_skipped_until_something_changes(tmp_path, run, monkeypatch):
    notebook(tmp_path, "01_a", TABLE.format(name="a"))
    notebook(tmp_path, "02_b", TABLE.format(name="b"))
    assert statuses(run()) == ["done", "done"]
    assert statuses(run()) == ["up to date", "up to date"]

    notebook(tmp_path, "02_b", TABLE.format(name="b"), "another = 1")
    assert statuses(run()) == ["up to date", "done"]  # its cells changed

    (tmp_path / "out/tables/a.csv").unlink()
    assert statuses(run()) == ["done", "up to date"]  # what it made is gone

    assert statuses(run("1", profile="micro")) == ["done"]  # its parameters changed
    assert (tmp_path / "out/tables/a.csv").read_text() == "micro"

    monkeypatch.setattr("compvl.app.reproduction._surroundings", lambda: "other code")
    assert statuses(run("2")) == ["done"]  # the package changed
    assert statuses(run("2", force=True)) == ["done"]
    assert (
        'href="tables/a.csv"' in (tmp_path / "out/index.html").read_text()
    )  # the page lists earlier ones too


def test_what_reads_other_results_runs_again_when_they_change(tmp_path, run):
    notebook(tmp_path, "01_a", TABLE.format(name="01_a"))
    notebook(
        tmp_path,
        "11_b",
        "from pathlib import Path\nn = len(list(Path(out).glob('tables/01_*.csv')))\n"
        + TABLE.format(name="11_b"),
    )
    nb = nbformat.read(tmp_path / "11_b.ipynb", 4)
    nb.cells[2].metadata["tags"] = ["reads"]
    nbformat.write(nb, tmp_path / "11_b.ipynb")
    assert statuses(run()) == ["done", "done"]
    assert statuses(run()) == ["up to date", "up to date"]  # what it wrote itself does not count
    (tmp_path / "out/tables/01_a.csv").write_text("another")
    run("1")
    assert "have changed since it ran" in (tmp_path / "out/report.html").read_text()
    assert statuses(run()) == ["up to date", "done"]
    assert "have changed since it ran" not in (tmp_path / "out/report.html").read_text()


def test_time_left_is_judged_by_the_committed_run(tmp_path, run, monkeypatch, capsys):
    notebook(tmp_path, "01_a", "x = 1")
    notebook(tmp_path, "02_b", "x = 1")
    run(jobs=1)
    assert "2 of 2 notebooks to run: time left unknown" in capsys.readouterr().err
    monkeypatch.setattr("compvl.app.reproduction._known_seconds", lambda profile: {"01_a": 3600.0})
    run(force=True, jobs=1)
    assert (
        "2 of 2 notebooks to run: about 1 h 0 min left, and 1 notebook of unknown length"
        in capsys.readouterr().err
    )
    run(jobs=1)
    assert "0 of 2 notebooks to run: nothing left" in capsys.readouterr().err


def test_time_left_follows_the_speed_of_this_machine():
    from compvl.app.reproduction import _Left

    left = _Left(["01", "02", "03"], {"01": 100.0, "02": 200.0, "03": 300.0})
    assert left.seconds() == 600
    left.ended("01", 400.0)  # four times as slow
    assert left.seconds() == 4 * 500 and left.seconds("02", 300.0) == 4 * 500 - 300
    assert left.seconds("02", 1100.0) == 5 * 500 - 1100  # and the second is slower than that
    left.ended("02", None)  # failed: it says nothing of the speed
    assert left.seconds() == 4 * 300


def test_only_declared_parameters_are_passed(tmp_path, run):
    notebook(tmp_path, "01_none", "assert 'profile' not in globals()", parameters=None)
    notebook(
        tmp_path,
        "02_one",
        "assert profile == 'smoke' and 'out' not in globals()",
        parameters='profile = "micro"',
    )
    notebook(
        tmp_path,
        "03_all",
        f"assert (profile, data_root, out) == ('smoke', {str(tmp_path)!r}, {str(tmp_path / 'out')!r})",
    )
    assert statuses(run(data_root=tmp_path)) == ["done"] * 3
    assert read_json(tmp_path / "out/notebooks/02_one.json")["parameters"] == {"profile": "smoke"}


def test_notebooks_run_in_out_and_runs_go_there(tmp_path, run, monkeypatch):
    notebook(
        tmp_path,
        "01_where",
        "from pathlib import Path\nfrom compvl.core import runs_dir\nassert Path.cwd() == Path(out)\nprint(runs_dir())",
    )
    monkeypatch.chdir(tmp_path)
    assert run().ok
    assert str(tmp_path / "out/runs") in (tmp_path / "out/notebooks/01_where.ipynb").read_text()
    monkeypatch.setenv("COMPVL_RUNS", str(tmp_path / "mine"))
    assert run(force=True).ok
    assert str(tmp_path / "mine") in (tmp_path / "out/notebooks/01_where.ipynb").read_text()


def test_mistakes_say_what_is_known(tmp_path, run):
    notebook(tmp_path, "01_a")
    with pytest.raises(CompvlError, match="01_a"):
        run("02")
    with pytest.raises(CompvlError, match="smoke.*paper"):
        run(profile="tiny")
    with pytest.raises(CompvlError, match="nowhere"):
        run(data_root=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_several_at_a_time_keep_their_outputs_apart(tmp_path, run):
    meet = "import time\nfrom pathlib import Path\nPath(out, '{name}').touch()\nfor _ in range(600):\n    if Path(out, '{other}').exists(): break\n    time.sleep(.1)\nelse: raise TimeoutError\n"
    notebook(
        tmp_path, "01_a", meet.format(name="01", other="02") + TABLE.format(name="01_a")
    )  # each waits for the other
    notebook(tmp_path, "02_b", meet.format(name="02", other="01") + TABLE.format(name="02_b"))
    notebook(tmp_path, "03_dies", "import os\nos._exit(3)")
    notebook(
        tmp_path,
        "11_reads",
        "from pathlib import Path\nassert len(list(Path(out).glob('tables/*'))) == 2",
    )
    nb = nbformat.read(tmp_path / "11_reads.ipynb", 4)
    nb.cells[2].metadata["tags"] = ["reads"]
    nbformat.write(nb, tmp_path / "11_reads.ipynb")
    summary = run(jobs=3)
    assert [(r.name, r.status, r.outputs) for r in summary.results] == [
        ("01_a", "done", ["tables/01_a.csv"]),
        ("02_b", "done", ["tables/02_b.csv"]),
        ("03_dies", "failed", []),
        ("11_reads", "done", []),
    ]
    assert all(r.peak_mb > 10 and r.commit for r in summary.results)
    assert statuses(run(jobs=3)) == ["up to date", "up to date", "failed", "up to date"]
    with pytest.raises(CompvlError, match="jobs=0"):
        run(jobs=0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupt_writes_the_page_and_leaves_no_kernel(tmp_path, jobs):
    import psutil

    notebook(tmp_path, "01_a", "x = 1")
    notebook(
        tmp_path,
        "02_slow",
        "from pathlib import Path\nimport os, time\nwhile not Path(out, 'notebooks', '01_a.json').exists(): time.sleep(.1)\nPath(out, 'pid').write_text(str(os.getpid()))\ntime.sleep(120)",
    )
    notebook(tmp_path, "03_slow", "import time\ntime.sleep(120)")
    notebook(tmp_path, "04_never", "x = 1")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from compvl.app import cli, reproduction\n"
        f"reproduction.notebooks_dir = lambda: Path({str(tmp_path)!r})\n"
        f"sys.argv = ['compvl', 'reproduce', '--profile', 'smoke', '--jobs', '{jobs}', '--json', '--out', {str(tmp_path / 'out')!r}]\ncli.main()"
    )
    # a shell starts its background jobs deaf to SIGINT, and their children inherit that
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pid = tmp_path / "out/pid"
    for _ in range(600):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    said = json.loads(out)
    assert not said["ok"] and {n["name"]: n["status"] for n in said["notebooks"]} == {
        "01_a": "done"
    } | dict.fromkeys(["02_slow", "03_slow", "04_never"], "interrupted")
    assert (
        said["notebooks"][-1]["error"].startswith("not started")
        and not (tmp_path / "out/notebooks/04_never.json").exists()
    )
    assert (tmp_path / "out/index.html").read_text().count('"interrupted"') == 3
    assert not psutil.pid_exists(int(pid.read_text()))

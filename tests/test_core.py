"""What a notebook cannot show: processes, interruption, installation layouts."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from compvl import core
from compvl.core import (
    CompvlError,
    atomic_write,
    config_hash,
    data_dir,
    git_commit,
    notebooks_dir,
    read_json,
    write_json,
)


def write_many(path, value):
    """Write the same file many times, in a process of its own."""
    for _ in range(50):
        write_json(path, [value] * 2000)


def test_concurrent_writers_never_leave_a_mixture(tmp_path):
    """Readers see one writer's file or another's, whole, however writes interleave."""
    path = tmp_path / "shared.json"
    write_json(path, [0] * 2000)
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_many, args=(path, i)) for i in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert len(set(read_json(path))) == 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["shared.json"]


def test_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")
    code = f"""
import os
from compvl.core import atomic_write
with atomic_write({str(path)!r}) as temporary:
    temporary.write_text('new')
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert path.read_text() == "old"


def test_written_files_have_usual_permissions(tmp_path, monkeypatch):
    """Without a change of the umask, which other threads would write their files with."""
    monkeypatch.setattr("os.umask", None)
    with atomic_write(tmp_path / "a.txt") as temporary:
        temporary.write_text("a")
    (tmp_path / "b.txt").write_text("b")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "b.txt").stat().st_mode


@pytest.mark.parametrize(
    "content, message",
    [(b'{"a": 1,\n "b": }', ":2 is not valid JSON"), (b"\xff\xfe{", "not UTF-8")],
)
def test_damaged_json_names_the_place(tmp_path, content, message):
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    with pytest.raises(CompvlError, match=message) as error:
        read_json(path)
    assert str(path) in str(error.value)


def test_config_hash_is_the_same_in_another_process():
    code = "from compvl.core import config_hash; print(config_hash({'b': {2, 1}, 'a': 'é'}))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == config_hash({"a": "é", "b": {1, 2}})


def test_data_comes_from_checkout_then_package(tmp_path, monkeypatch):
    package = tmp_path / "compvl"
    (package / "_data/paper").mkdir(parents=True)
    (package / "_notebooks").mkdir()
    monkeypatch.setattr(core, "_PACKAGE", package)
    monkeypatch.delenv("COMPVL_DATA", raising=False)
    assert (data_dir(), notebooks_dir()) == (package / "_data", package / "_notebooks")
    (tmp_path / "data/paper").mkdir(parents=True)
    assert data_dir() == tmp_path / "data"
    monkeypatch.setenv("COMPVL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(CompvlError, match="COMPVL_DATA"):
        data_dir()


def test_commit_marks_changes_and_ignores_other_repositories(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run([*command, *arguments], check=True, capture_output=True)

    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    package = tmp_path / "compvl"
    package.mkdir()
    monkeypatch.setattr(core, "_PACKAGE", package)
    assert git_commit() == "unknown"
    (package / "x.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    clean = git_commit()
    assert len(clean) == 40
    (package / "x.py").write_text("2")
    assert git_commit() == clean + "+dirty"
    monkeypatch.setattr(core, "_PACKAGE", package / "site-packages" / "compvl")
    assert git_commit() == "unknown"


IMPORT_WITHOUT_LIBRARIES = """
import importlib.abc, sys

ABSENT = (
    'nbdev fastcore execnb papermill nbformat nbconvert nbclient IPython ipykernel spacy torch'
).split()


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ABSENT:
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, Absent())
import compvl
import compvl.core
import compvl.app.reproduction
from compvl.app.cli import app

try:
    app(['--help'])
except SystemExit as error:
    assert not error.code
try:
    compvl.core.require('papermill', 'notebooks')
except compvl.core.CompvlError as error:
    assert 'compvl[notebooks]' in str(error)
else:
    raise AssertionError
"""


def test_package_imports_without_development_libraries():
    """`import compvl` and the commands' help need no notebook library, spaCy or torch."""
    command = [sys.executable, "-c", IMPORT_WITHOUT_LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

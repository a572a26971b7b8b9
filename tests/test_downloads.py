"""Downloads that break, archives that are not safe, and what `compvl data` says about them."""

import hashlib
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import listen_to_interrupts
from filelock import FileLock
from typer.testing import CliRunner

from compvl import downloads
from compvl.app.cli import app
from compvl.core import CompvlError
from compvl.downloads import (
    DATASETS,
    DamagedArchive,
    Dataset,
    Fetched,
    File,
    archives,
    dataset,
    download,
    fetch,
    file_status,
    inventory,
    status,
    unpack,
)

BODY = bytes(i * i % 251 for i in range(400_000))
SHA = hashlib.sha256(BODY).hexdigest()
BLOCK = 16384


class Web(ThreadingHTTPServer):
    """A local server whose faults are set by a test."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {}
        self.ranges = True  # whether requests for a range are honoured
        self.trusting = False  # whether `If-Range` is ignored
        self.version = {"ETag": '"1"'}  # headers
        self.cuts = []  # bytes after which each answer in turn breaks off
        self.answers = []  # (status, headers) in place of the first answers
        self.length = True  # whether the length is sent
        self.rate = None  # bytes a second
        self.type = "application/octet-stream"
        self.log = []  # (path, Range, status, bytes to send)

    def handle_error(self, request, client_address):
        pass

    def requested_ranges(self):
        """The `Range` header of each request."""
        return [requested for _, requested, _, _ in self.log]


class Answer(BaseHTTPRequestHandler):
    """The answer to one request."""

    def log_message(self, *arguments):
        pass

    def resumes(self):
        """Whether the request is for a range, and the server honours it."""
        if not self.server.ranges or self.headers.get("Range") is None:
            return False
        known = (None, *self.server.version.values())
        return self.server.trusting or self.headers.get("If-Range") in known

    def answer(self):
        """(status, headers, body)."""
        body = self.server.files.get(self.path)
        if self.server.answers:
            code, headers = self.server.answers.pop(0)
        else:
            code, headers = (404 if body is None else 200), {}
        if code != 200:
            return code, headers, b""
        if not self.resumes():
            return code, headers, body
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        if start >= len(body):
            return 416, {"Content-Range": f"bytes */{len(body)}"}, b""
        content_range = f"bytes {start}-{len(body) - 1}/{len(body)}"
        return 206, {"Content-Range": content_range}, body[start:]

    def do_GET(self):
        code, headers, body = self.answer()
        sent = body[: self.server.cuts.pop(0)] if self.server.cuts else body
        self.server.log.append([self.path, self.headers.get("Range"), code, len(sent)])
        self.send_response(code)
        headers = {"Content-Type": self.server.type, **self.server.version, **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        if self.server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for start in range(0, len(sent), BLOCK):
            self.wfile.write(sent[start : start + BLOCK])
            if self.server.rate:
                self.wfile.flush()
                time.sleep(BLOCK / self.server.rate)


@pytest.fixture
def web(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Web()
    server.files["/f.bin"] = BODY
    options = dict(poll_interval=0.02)
    threading.Thread(target=server.serve_forever, kwargs=options, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@contextmanager
def registered(name, title, files, licence="", homepage="", steps=""):
    """A data set that is registered within the block."""
    yield dataset(Dataset(name, title, tuple(files), licence, homepage, steps))
    del DATASETS[name]


@pytest.fixture
def pets(web):
    """A data set of one file, one archive and one file without a link."""
    web.files["/photos.zip"] = zipped({f"photos/{i}.jpg": bytes([i]) * 5000 for i in range(4)})
    files = [
        File("pets/f.bin", web.url + "/f.bin", size=len(BODY), sha256=SHA),
        File("pets/photos/", web.url + "/photos.zip", unpack="pets", count=4),
        File("pets/secret.csv"),
    ]
    texts = ("CC0", "https://example.org/pets", "Ask the authors.")
    with registered("pets", "Cats and dogs", files, *texts) as pets:
        yield pets


PETS = ["pets/f.bin"] + [f"pets/photos/{i}.jpg" for i in range(4)]


def zipped(files):
    """The bytes of a zip archive of {name: content}."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def get(web, path, **options):
    """Download `/f.bin` without long waits."""
    options = {"wait": 0.01, "timeout": 5, **options}
    return download(web.url + "/f.bin", path, progress=False, **options)


def tree(folder):
    """Files and links under a folder."""
    paths = [path for path in Path(folder).rglob("*") if not path.is_dir() or path.is_symlink()]
    return sorted(str(path.relative_to(folder)) for path in paths)


def interrupt(*arguments, **options):
    """Stands in for a function during which a person presses Ctrl-C."""
    raise KeyboardInterrupt


def fill_disk(*arguments):
    """Stands in for a function that writes to a full disk."""
    raise OSError(28, "No space left on device")


def free_space(monkeypatch, free):
    """Let the disk have `free` bytes left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


# --- one file ---

DATE = "Mon, 01 Jan 2024 00:00:00 GMT"


@pytest.mark.parametrize(
    "version",
    [{"ETag": '"1"'}, {"Last-Modified": DATE}, {"ETag": 'W/"1"', "Last-Modified": DATE}],
)
def test_a_broken_connection_goes_on_where_it_stopped(web, tmp_path, version):
    web.version = version
    web.cuts = [100_000, 150_000]
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY
    assert tree(tmp_path) == ["f.bin"]
    assert web.requested_ranges() == [None, "bytes=100000-", "bytes=250000-"]
    assert sum(sent for *_, sent in web.log) == len(BODY)


def test_without_ranges_it_starts_over(web, tmp_path):
    web.ranges = False
    web.cuts = [100_000]
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY
    assert [code for _, _, code, _ in web.log] == [200, 200]


def test_progress_earns_new_tries(web, tmp_path):
    web.cuts = [50_000] * 7
    assert get(web, tmp_path / "f.bin", retries=1).read_bytes() == BODY
    assert len(web.log) == 8


def test_a_server_that_always_breaks_off_ends_it(web, tmp_path):
    web.ranges = False
    web.cuts = [100_000] * 10
    with pytest.raises(CompvlError, match="connection broke.*what is here is kept"):
        get(web, tmp_path / "f.bin", retries=3)
    assert len(web.log) == 4
    assert tree(tmp_path) == ["f.bin.part", "f.bin.part.json"]


# a trusting server ignores If-Range and sends the rest of another file
@pytest.mark.parametrize("trusting", [False, True])
def test_a_file_that_changes_meanwhile_is_fetched_anew(web, tmp_path, trusting):
    web.cuts = [100_000] * 2
    with pytest.raises(CompvlError):
        get(web, tmp_path / "f.bin", retries=0)
    web.files["/f.bin"] = BODY[::-1]
    web.version = {"ETag": '"2"'}
    web.trusting = trusting
    web.cuts = []
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY[::-1]


@pytest.mark.parametrize("options, requested", [({}, None), (dict(sha256=SHA), "bytes=100000-")])
def test_without_a_version_only_a_checksum_lets_it_resume(web, tmp_path, options, requested):
    web.version = {}
    web.cuts = [100_000]
    assert get(web, tmp_path / "f.bin", **options).read_bytes() == BODY
    assert web.requested_ranges()[1] == requested


def test_pieces_that_do_not_fit_together_are_fetched_in_one(web, tmp_path):
    web.version = {}
    web.cuts = [100_000]
    web.files["/f.bin"] = BODY[::-1]
    with pytest.raises(CompvlError):
        get(web, tmp_path / "f.bin", sha256=SHA, retries=0)
    web.files["/f.bin"] = BODY
    assert get(web, tmp_path / "f.bin", sha256=SHA).read_bytes() == BODY
    requests = [(requested, code) for _, requested, code, _ in web.log]
    assert requests == [(None, 200), ("bytes=100000-", 206), (None, 200)]
    web.cuts = [100_000]
    web.log = []
    with pytest.raises(CompvlError, match="thrown away"):
        get(web, tmp_path / "g.bin", sha256="0" * 64)
    assert len(web.log) == 3  # once more in one piece, and no more


def test_busy_servers_are_asked_again_when_they_say(web, tmp_path):
    web.answers = [(503, {"Retry-After": "1"}), (429, {}), (500, {})]
    start = time.monotonic()
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY
    assert len(web.log) == 4
    assert 1 <= time.monotonic() - start < 30
    web.answers = [(503, {"Retry-After": "7200"})]
    with pytest.raises(CompvlError, match="503.*7200 s"):
        get(web, tmp_path / "g.bin")
    web.answers = [(502, {})] * 9
    web.log = []
    with pytest.raises(CompvlError, match="502.*Try again later"):
        get(web, tmp_path / "g.bin", retries=2)
    assert len(web.log) == 3
    assert tree(tmp_path) == ["f.bin"]


@pytest.mark.parametrize(
    "code, says",
    [(404, "not there any more"), (401, "asks for a login"), (403, "does not let you in")],
)
def test_a_refusal_is_final(web, tmp_path, code, says):
    web.answers = [(code, {})] * 3
    with pytest.raises(CompvlError, match=f"{code}.*{says}.*by hand.*f.bin"):
        get(web, tmp_path / "f.bin")
    assert len(web.log) == 1
    assert not tree(tmp_path)


def test_no_server_and_no_such_host(tmp_path, web):
    url = web.url
    web.shutdown()
    web.server_close()
    with pytest.raises(CompvlError, match="cannot be downloaded.*refused"):
        download(url + "/f", tmp_path / "f", retries=1, wait=0.01, progress=False)
    start = time.monotonic()
    with pytest.raises(CompvlError, match="cannot be downloaded"):
        download("http://no-such-host.invalid/f", tmp_path / "f", wait=30, progress=False)
    assert time.monotonic() - start < 20


def test_a_silent_server_times_out(web, tmp_path):
    web.rate = BLOCK / 3
    with pytest.raises(CompvlError, match="timed out"):
        get(web, tmp_path / "f.bin", timeout=0.3, retries=0)


def test_wrong_checksum_or_size_leaves_nothing(web, tmp_path):
    md5 = hashlib.md5(BODY).hexdigest()
    with pytest.raises(CompvlError, match=f"sha256 {SHA}, {'0' * 64} expected"):
        get(web, tmp_path / "f.bin", sha256="0" * 64)
    with pytest.raises(CompvlError, match=f"md5 {md5}"):
        get(web, tmp_path / "f.bin", md5="0" * 32)
    with pytest.raises(CompvlError, match="offers 400,000 bytes, 399,999 expected"):
        get(web, tmp_path / "f.bin", size=399_999)
    assert not tree(tmp_path)
    assert get(web, tmp_path / "f.bin", md5=md5.upper(), size=len(BODY)).exists()


def test_an_empty_answer_is_no_file(web, tmp_path):
    web.files["/f.bin"] = b""
    with pytest.raises(CompvlError, match="is empty"):
        get(web, tmp_path / "f.bin")
    assert not tree(tmp_path)


def test_an_unknown_length(web, tmp_path):
    web.length = False
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY
    web.cuts = [100_000]  # looks like the end of the file, unless its size is known
    assert get(web, tmp_path / "g.bin", size=len(BODY)).read_bytes() == BODY
    assert web.requested_ranges()[-1] == "bytes=100000-"
    web.cuts = [100_000]
    with pytest.raises(CompvlError, match="thrown away"):
        get(web, tmp_path / "h.bin", sha256=SHA)
    assert not (tmp_path / "h.bin").exists()


def test_a_web_page_is_no_file(web, tmp_path):
    web.type = "text/html; charset=utf-8"
    with pytest.raises(CompvlError, match="web page"):
        get(web, tmp_path / "f.bin")
    assert not tree(tmp_path)


def test_a_part_that_is_whole_already_and_one_that_is_too_long(web, tmp_path):
    get(web, tmp_path / "f.bin")
    memo = dict(url=web.url + "/f.bin", etag='"1"', modified="", total=len(BODY))
    for body, total, requests in ((BODY, len(BODY), 0), (BODY + b"x", None, 2)):
        (tmp_path / "g.bin.part").write_bytes(body)
        (tmp_path / "g.bin.part.json").write_text(json.dumps(memo | dict(total=total)))
        web.log = []
        assert get(web, tmp_path / "g.bin").read_bytes() == BODY
        assert len(web.log) == requests
    (tmp_path / "h.bin.part").write_bytes(b"of another link")
    (tmp_path / "h.bin.part.json").write_text(json.dumps(memo | dict(url="http://elsewhere/h")))
    assert get(web, tmp_path / "h.bin").read_bytes() == BODY


def test_redirects_lead_to_the_web_only(web, tmp_path):
    web.answers = [(302, {"Location": "/f.bin"})]
    web.cuts = [0, 100_000]
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY
    web.answers = [(302, {"Location": Path(__file__).as_uri()})]
    with pytest.raises(CompvlError):
        get(web, tmp_path / "g.bin")
    assert tree(tmp_path) == ["f.bin"]


def test_the_proxy_of_the_environment_is_used(web, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", web.url)
    monkeypatch.setenv("no_proxy", "")
    web.files["http://data.invalid/f.bin"] = BODY
    got = download("http://data.invalid/f.bin", tmp_path / "f.bin", progress=False)
    assert got.read_bytes() == BODY


def test_a_full_disk(web, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        free_space(patch, 1000)
        with pytest.raises(CompvlError, match="f.bin needs 400 kB.*1.0 kB left"):
            get(web, tmp_path / "f.bin")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill_disk)
        with pytest.raises(CompvlError, match="No space left.*kept"):
            get(web, tmp_path / "f.bin")
    web.log = []
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY
    assert not web.log
    (tmp_path / "file").write_text("")
    with pytest.raises(CompvlError, match="Cannot write"):
        get(web, tmp_path / "file/f.bin")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_a_part_that_is_resumed(web, tmp_path, sign):
    web.rate = 200_000
    target = tmp_path / "f.bin"
    call = f"download({web.url + '/f.bin'!r}, {str(target)!r})"
    command = [sys.executable, "-c", f"from compvl.downloads import download; {call}"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=listen_to_interrupts)
    part = tmp_path / "f.bin.part"
    for _ in range(1000):
        if part.exists() and part.stat().st_size > 100_000:
            break
        time.sleep(0.02)
    child.send_signal(sign)
    child.communicate(timeout=20)
    assert child.returncode != 0
    assert not target.exists()
    have = part.stat().st_size
    assert 0 < have < len(BODY)
    web.rate = None
    web.log = []
    assert get(web, target, sha256=SHA).read_bytes() == BODY
    assert tree(tmp_path) == ["f.bin"]
    assert web.log == [["/f.bin", f"bytes={have}-", 206, len(BODY) - have]]


# --- archives ---

FILE = tarfile.REGTYPE
LINK = tarfile.SYMTYPE
HARD = tarfile.LNKTYPE
DIR = tarfile.DIRTYPE


def add_file(archive, name, content):
    """Add a file to a tar archive."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def tarred(path, *entries, mode="w:gz"):
    """A tar of (name, type, link target) entries; files contain `abc`."""
    with tarfile.open(path, mode) as archive:
        for name, kind, target in entries:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = target
            member.mode = 0o4777
            member.size = 3 if kind == FILE else 0
            archive.addfile(member, io.BytesIO(b"abc"))
    return path


UNSAFE_TARS = [
    [("../evil", FILE, "")],
    [("a/../../evil", FILE, "")],
    [("a/../evil", FILE, "")],
    [("/tmp/evil", FILE, "")],
    [("C:/evil", FILE, "")],
    [("c:evil", FILE, "")],
    [("..\\evil", FILE, "")],
    [("\\evil", FILE, "")],
    [("..", DIR, "")],
    [("out", LINK, "/etc")],
    [("out", LINK, "..")],
    [("a/out", LINK, "../../x")],
    [("out", LINK, "C:\\x")],
    [("hard", HARD, "/etc/passwd")],
    [("a/hard", HARD, "../evil")],
    [("here", LINK, "."), ("here/x", FILE, "")],
    [("here", LINK, "a"), ("HERE/x", FILE, "")],
    [("a/here", LINK, ".."), ("out", LINK, "a/here/../evil")],
    [("out", LINK, "")],
    [("dev", tarfile.CHRTYPE, "")],
    [("dev", tarfile.BLKTYPE, "")],
    [("pipe", tarfile.FIFOTYPE, "")],
]


@pytest.mark.parametrize("entries", UNSAFE_TARS, ids=str)
@pytest.mark.parametrize("python_helps", [True, False])
def test_a_tar_entry_that_leaves_the_folder_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, entries, python_helps
):
    if not python_helps:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    archive = tarred(tmp_path / "x.tar.gz", ("fine.txt", FILE, ""), *entries)
    with pytest.raises(CompvlError, match="x.tar.gz: the entry .*Nothing was unpacked") as error:
        unpack(archive, tmp_path / "deep/into", progress=False)
    assert repr(entries[-1][0]) in str(error.value) or len(entries) == 2
    assert tree(tmp_path) == ["x.tar.gz"]
    assert not Path("/tmp/evil").exists()


def zip_entry(name, content=b"abc", mode=stat.S_IFREG | 0o644):
    """(info, content) of a zip's entry with a Unix mode."""
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return info, content


UNSAFE_ZIPS = [
    zip_entry("../evil"),
    zip_entry("/tmp/evil"),
    zip_entry("a/../../evil"),
    zip_entry("C:\\evil"),
    zip_entry("..\\evil"),
    zip_entry("out", b"/etc", stat.S_IFLNK | 0o777),
    zip_entry("a/out", b"../../x", stat.S_IFLNK | 0o777),
    zip_entry("pipe", b"", stat.S_IFIFO | 0o644),
]


@pytest.mark.parametrize("entry", UNSAFE_ZIPS, ids=lambda entry: entry[0].filename)
def test_a_zip_entry_that_leaves_the_folder_is_refused_before_anything_is_written(tmp_path, entry):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("fine.txt", "abc")
        archive.writestr(*entry)
    with pytest.raises(CompvlError, match="x.zip: the entry .*Nothing was unpacked") as error:
        unpack(tmp_path / "x.zip", tmp_path / "into", progress=False)
    assert repr(entry[0].filename) in str(error.value)
    assert tree(tmp_path) == ["x.zip"]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_good_tars(tmp_path, mode):
    entries = [
        ("./", DIR, ""),
        ("./v1/", DIR, ""),
        ("v1/a.txt", FILE, ""),
        ("v1/b", HARD, "v1/a.txt"),
        ("deep/latest", LINK, "../v1"),
        ("latest", LINK, "deep/latest"),
    ]
    archive = tarred(tmp_path / "x", *entries, mode=mode)
    into = tmp_path / "into"
    (into / "v1").mkdir(parents=True)
    (into / "v1/a.txt").write_text("old")
    (into / "v1/mine").write_text("mine")
    unpack(archive, into, expect=["v1/a.txt"], progress=False)
    assert tree(into) == ["deep/latest", "latest", "v1/a.txt", "v1/b", "v1/mine"]
    assert (into / "latest/a.txt").read_text() == "abc"
    assert not (into / "v1/a.txt").stat().st_mode & stat.S_ISUID


def test_zips_with_links_and_with_backslashes(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a\\b.txt", "abc")
        archive.writestr(*zip_entry("l", b"a", stat.S_IFLNK | 0o777))
    unpack(tmp_path / "x.zip", tmp_path / "into", progress=False)
    assert (tmp_path / "into/l/b.txt").read_text() == "abc"


NOISE = hashlib.shake_256(b"x").digest(100_000)


def damaged_zip(kind):
    """A zip with one flipped byte, half of a zip, or one with a password."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/x", NOISE)
        if kind == "zip, locked":
            archive.infolist()[0].flag_bits |= 1
    whole = bytearray(out.getvalue())
    if kind == "zip, half":
        return whole[:50_000]
    if kind == "zip, flipped":
        whole[5000] ^= 1
    return whole


def half_tar(mode):
    """The first half of a tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        add_file(archive, "a/x", NOISE)
    return out.getvalue()[:50_000]


DAMAGE = {
    "zip, flipped": damaged_zip("zip, flipped"),
    "zip, half": damaged_zip("zip, half"),
    "zip, locked": damaged_zip("zip, locked"),
    "tar, half": half_tar("w"),
    "tar.gz, half": half_tar("w:gz"),
    "tar.bz2, half": half_tar("w:bz2"),
    "tar.xz, half": half_tar("w:xz"),
    "nothing": b"",
    "page": b"<html>Please log in</html>",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_archives_are_named_and_leave_nothing(tmp_path, kind):
    (tmp_path / "photos.zip").write_bytes(DAMAGE[kind])
    message = "photos.zip is damaged or no archive .*download it again"
    with pytest.raises(DamagedArchive, match=message):
        unpack(tmp_path / "photos.zip", tmp_path / "into", progress=False)
    assert tree(tmp_path) == ["photos.zip"]


def test_bombs_and_a_full_disk(tmp_path, monkeypatch):
    (tmp_path / "x.zip").write_bytes(zipped({f"{i}": bytes(10_000_000) for i in range(3)}))
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        add_file(archive, "x", bytes(30_000_000))
    with monkeypatch.context() as patch:
        free_space(patch, 20_000_000)
        for name in ("x.zip", "x.tar.gz"):
            message = f"{name} unpacks to at least 30.0 MB and the disk has 20.0 MB"
            with pytest.raises(CompvlError, match=message):
                unpack(tmp_path / name, tmp_path / "into", progress=False)
    monkeypatch.setattr(shutil, "copyfileobj", fill_disk)
    with pytest.raises(CompvlError, match="the disk is full"):
        unpack(tmp_path / "x.zip", tmp_path / "into", progress=False)
    assert tree(tmp_path) == ["x.tar.gz", "x.zip"]


def test_an_archive_without_what_is_expected(tmp_path):
    (tmp_path / "x.zip").write_bytes(zipped({"other/a": b"", "readme": b""}))
    with pytest.raises(CompvlError, match="x.zip holds no photos, but other, readme"):
        unpack(tmp_path / "x.zip", tmp_path / "into", expect=["photos"], progress=False)
    assert tree(tmp_path) == ["x.zip"]


# --- data sets ---


def fetch_pets(root):
    """Fetch the data set `pets` silently."""
    return fetch("pets", root, progress=False)


def test_fetch_takes_what_is_absent_or_damaged_and_nothing_else(web, pets, tmp_path):
    expected = Fetched(["pets/f.bin", "pets/photos/"], [], ["pets/secret.csv"])
    assert fetch_pets(tmp_path) == expected
    assert tree(tmp_path) == PETS
    assert not (tmp_path / "downloads").exists()
    web.log = []
    (tmp_path / "downloads/pets").mkdir(parents=True)
    (tmp_path / "downloads/pets/photos.zip").write_bytes(b"left over")
    assert fetch_pets(tmp_path).fetched == []
    assert not web.log
    assert not (tmp_path / "downloads").exists()
    (tmp_path / "pets/f.bin").write_bytes(BODY[::-1])
    assert fetch_pets(tmp_path).fetched == ["pets/f.bin"]
    assert (tmp_path / "pets/f.bin").read_bytes() == BODY
    assert len(web.log) == 1
    (tmp_path / "pets/photos/2.jpg").unlink()
    assert fetch_pets(tmp_path).fetched == ["pets/photos/"]
    assert len(tree(tmp_path)) == 5


def test_one_archive_for_several_files_is_fetched_once(web, tmp_path):
    web.files["/ann.zip"] = zipped({"annotations/a.json": b"{}", "annotations/b.json": b"[]"})
    size = len(web.files["/ann.zip"])
    options = dict(url=web.url + "/ann.zip", size=size, unpack="coco")
    files = [File(f"coco/annotations/{name}.json", **options) for name in "ab"]
    with registered("ann", "", files):
        assert status(tmp_path, ["ann"])["size"][0] == size
        fetch("ann", tmp_path, progress=False)
        assert len(web.log) == 1
        assert status(tmp_path, ["ann"]).state[0] == "present"


def test_one_file_that_cannot_be_downloaded_does_not_keep_the_others(web, tmp_path):
    paths = ["/0", "/1", "/f.bin", "/3", "/f.bin", "/5"]
    files = [File(f"many/{i}", web.url + path) for i, path in enumerate(paths)]
    message = "/0 answers 404.*\n.*/1 answers 404.*\n.*/3 answers 404"
    with registered("many", "Many files", files):
        with pytest.raises(CompvlError, match=message):
            fetch("many", tmp_path, progress=False)
        assert tree(tmp_path) == ["many/2"]
        # after the third error, nothing more is tried
        assert [path for path, *_ in web.log] == ["/0", "/1", "/f.bin", "/3"]


def test_a_damaged_archive_is_removed_and_fetched_again(web, pets, tmp_path):
    whole = web.files["/photos.zip"]
    web.files["/photos.zip"] = whole[:300]
    with pytest.raises(DamagedArchive, match="photos.zip"):
        fetch_pets(tmp_path)
    assert tree(tmp_path) == ["pets/f.bin"]
    web.files["/photos.zip"] = whole
    fetch_pets(tmp_path)
    assert len(tree(tmp_path)) == 5


def test_an_interrupted_unpacking_is_seen_and_done_again_without_a_download(
    web, pets, tmp_path, monkeypatch
):
    merge = archives._merge
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch_pets(tmp_path)
    assert "not unpacked yet" in status(tmp_path, ["pets"]).problem[0]
    assert not (tmp_path / "pets/photos").exists()
    (tmp_path / "pets/photos").mkdir()  # so that entries take their places one by one

    def merge_one(source, into):
        if source.name == "photos":
            os.replace(source / "0.jpg", into / "0.jpg")
            raise KeyboardInterrupt
        merge(source, into)

    with monkeypatch.context() as patch:
        patch.setattr(archives, "_merge", merge_one)
        with pytest.raises(KeyboardInterrupt):
            fetch_pets(tmp_path)
    web.log = []
    assert "interrupted" in file_status("pets", tmp_path).problem[1]
    fetch_pets(tmp_path)
    assert not web.log
    assert tree(tmp_path) == PETS
    assert status(tmp_path, ["pets"]).found[0] == 2


def test_space_is_checked_before_the_first_byte(web, tmp_path, monkeypatch):
    file = File("big/photos/", web.url + "/p.zip", size=3_000_000_000, unpack="big")
    free_space(monkeypatch, 5_000_000_000)  # enough for the archive, not for its content
    with registered("big", "Big pictures", [file]):
        with pytest.raises(CompvlError, match="Big pictures needs 6.0 GB.*5.0 GB left"):
            fetch("big", tmp_path / "new", progress=False)
        assert not web.log
        assert not (tmp_path / "new").exists()


def test_two_processes_do_not_fetch_the_same(web, pets, tmp_path):
    lock = tmp_path / "downloads/pets/lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        with pytest.raises(CompvlError, match="Another process is fetching pets"):
            fetch_pets(tmp_path)
        assert lock.exists()
    assert fetch_pets(tmp_path).fetched
    assert not (tmp_path / "downloads").exists()


def test_status_reports_absent_incomplete_and_present_without_the_network(
    pets, tmp_path, monkeypatch
):
    monkeypatch.setattr(socket, "socket", None)

    def row():
        return status(tmp_path, ["pets"]).iloc[0]

    assert (row().state, row().found, row().needed) == ("absent", 0, 3)
    assert "compvl data fetch pets" in row()["get"]
    assert "Ask the authors" in row()["get"]
    file = tmp_path / "pets/f.bin"
    photos = tmp_path / "pets/photos"
    photos.mkdir(parents=True)
    assert row().state == "absent"  # an empty folder is nothing
    part = tmp_path / "pets/f.bin.part"
    part.write_bytes(bytes(1234))
    assert row().state == "incomplete"
    assert "interrupted after 1.2 kB" in row().problem
    part.unlink()
    for i in range(3):
        (photos / f"{i}.jpg").write_bytes(b"x")
    assert "pets/photos/ holds 3 of 4 files" in row().problem
    assert row().bytes == 3
    file.write_bytes(BODY[:-1])
    assert "has 399,999 bytes, 400,000 expected" in row().problem
    file.write_bytes(BODY[::-1])
    assert "sha256" in row().problem
    monkeypatch.setattr(inventory, "SMALL_FILE", 1000)
    assert file_status("pets", tmp_path).state[0] == "present"
    assert file_status("pets", tmp_path, verify=True).state[0] == "incomplete"
    file.write_bytes(BODY)
    (tmp_path / "pets/secret.csv").write_text("x")
    (photos / "3.jpg").write_text("x")
    assert (row().state, row().found, row()["get"]) == ("present", 3, "")


# --- commands ---


@pytest.fixture
def compvl(monkeypatch):
    """Run a `compvl data` command in this process: (exit status, stdout, stderr)."""
    monkeypatch.delenv("COMPVL_DATA_ROOT", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, **environment):
        command = ["data", *map(str, arguments)]
        result = CliRunner(env=environment).invoke(app, command)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def assert_all_in(parts, text):
    """Each part must be in the text."""
    for part in parts:
        assert part in text


def test_status_command(pets, tmp_path, compvl):
    code, out, _ = compvl("status", "pets", "--data-root", tmp_path)
    assert code == 0
    assert_all_in(["absent", "0 of 3", "CC0", "fetch, by hand"], out)
    assert_all_in(["compvl data fetch pets --data-root", "Ask the authors."], out)
    out = compvl("status", "pets", "--json", COMPVL_DATA_ROOT=str(tmp_path))[1]
    (row,) = json.loads(out)
    assert (row["state"], row["found"], row["needed"], row["size"]) == ("absent", 0, 3, None)
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets/f.bin").write_bytes(b"half")
    out = compvl("status", "pets", "--data-root", tmp_path)[1]
    assert "pets: pets/f.bin has 4 bytes, 400,000 expected." in out


def test_status_command_says_what_is_not_known(tmp_path, compvl):
    """Sizes, revisions, and what is inferred of a checkpoint."""
    from compvl.models.releases import ZOO

    out = compvl("status", "colorswap", "bivlc", "crepe-swap", "--data-root", tmp_path)[1]
    title = "What each is, what is confirmed, and what is not:"
    table, notes = out.split(title)
    assert "537 MB" in table
    assert table.count("size not known") >= 2
    lines = {}
    for line in notes.strip().splitlines():
        name, _, text = line.strip().partition(": ")
        lines[name] = text
    assert "not pinned" in lines["colorswap"]
    unknown = "size not known: colorswap/data/train.json, colorswap/data/test.json"
    assert unknown in lines["colorswap"]
    assert "size not known" not in lines["bivlc"]
    assert "size not known: checkpoints/crepe-swap/" in lines["crepe-swap"]
    assert lines["crepe-swap, confirmed"] == ZOO["crepe-swap"].confirmed
    assert lines["crepe-swap, not confirmed"].startswith(ZOO["crepe-swap"].note)
    assert "never opened" in lines["crepe-swap, not confirmed"]


def test_status_command_says_of_every_checkpoint_what_is_confirmed(tmp_path, compvl):
    from compvl.models.releases import ZOO

    out = compvl("status", "--data-root", tmp_path)[1]
    for entry in ZOO.values():
        if entry.dataset:
            assert f"  {entry.dataset}, confirmed: {entry.confirmed}" in out
            assert f"  {entry.dataset}, not confirmed: {entry.note}" in out


def test_every_data_set_says_what_it_is_and_how_to_get_it(tmp_path, compvl):
    """A title, a licence or that none is known, a page, and a link to each file or steps."""
    rows = json.loads(compvl("status", "--data-root", tmp_path, "--json")[1])
    for row in rows:
        assert row["title"] and row["licence"] and row["confirmed"], row
        assert row["homepage"].startswith(("https://", "http://")), row
        assert row["get"], row
    assert {"spec", "imagenet", "read-clip"} < {row["name"] for row in rows}
    (spec,) = [row for row in rows if row["name"] == "spec"]
    assert spec["size"] == 1_560_000_000 and spec["get"].startswith("compvl data fetch spec")
    assert "about 1.6 GB" in compvl("status", "spec", "--data-root", tmp_path)[1]


def test_fetch_command_says_where_a_size_is_not_known(tmp_path, compvl):
    for name, size in dict(whatsup="size not known", negbench="10.7 MB").items():
        out = compvl("fetch", name, "--data-root", tmp_path, "--dry-run")[1]
        (line,) = [line for line in out.splitlines() if "by hand: " in line]
        assert line.endswith(f"({size})")


def test_status_command_lists_every_kind(tmp_path, compvl):
    code, out, err = compvl("status", "--data-root", tmp_path / "none")
    assert code == 0
    assert_all_in([" Annotations ", " Images ", " Checkpoints "], out)
    assert "no folder" in err


def test_benchmarks_and_groups_are_names_too(tmp_path, compvl):
    def names(*arguments):
        out = compvl("status", *arguments, "--data-root", tmp_path, "--json")[1]
        return {row["name"] for row in json.loads(out)}

    assert names("sugarcrepe-add-obj") == {"sugarcrepe", "coco-val2017"}
    assert names("sugarcrepe") == {"sugarcrepe", "coco-val2017"}
    assert names("swap") == {"aro", "aro-images"}
    assert names("all") > names("compositional")
    out = compvl("status", "vtab-color", "--data-root", tmp_path)[1]
    assert out.startswith("No files are needed")
    code, out, _ = compvl("fetch", "sugarcrepe", "--data-root", tmp_path, "--dry-run")
    assert code == 0
    assert_all_in(["1.7 MB", "need these as well: coco-val2017"], out)
    assert "816 MB" not in out
    assert not list(tmp_path.iterdir())
    with pytest.raises(CompvlError, match="did you mean winoground"):
        compvl("status", "winogrand", "--data-root", tmp_path)
    with pytest.raises(CompvlError, match="COMPVL_DATA_ROOT"):
        compvl("status")


def test_fetch_command(web, pets, tmp_path, compvl, monkeypatch):
    command = ["fetch", "pets", "--data-root", tmp_path]
    code, out, _ = compvl(*command, "--dry-run")
    assert code == 0
    assert_all_in(["CC0", "2 of 3 files, of unknown size"], out)
    assert not web.log
    code, out, err = compvl(*command, "--json")
    assert code == 0
    fetched = ["pets/f.bin", "pets/photos/"]
    expected = dict(fetched=fetched, present=[], by_hand=["pets/secret.csv"], error="")
    assert json.loads(out)["pets"] == expected
    assert "Ask the authors" in err
    code, out, _ = compvl(*command)
    assert code == 1  # nothing could be done
    assert_all_in(["to download: nothing", "by hand: pets/secret.csv"], out)
    (tmp_path / "pets/secret.csv").write_text("x")
    assert compvl(*command)[0] == 0
    (tmp_path / "pets/f.bin").unlink()
    web.files["/f.bin"] = BODY[::-1]
    code, out, err = compvl(*command, "--json")
    assert code == 1
    assert "compvl: What http" in err
    assert "thrown away" in json.loads(out)["pets"]["error"]
    monkeypatch.setattr(downloads, "fetch", interrupt)
    code, _, err = compvl(*command)
    assert code == 130
    assert "Interrupted; `compvl data fetch pets" in err


def test_cache_command(tmp_path, compvl):
    for part in ("embeddings", "images", "mine"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "x").write_bytes(bytes(1500))
    cache = dict(COMPVL_CACHE=str(tmp_path))
    code, out, _ = compvl("cache", **cache)
    assert code == 0
    assert_all_in(["1.5 kB", "embeddings"], out)
    out = compvl("cache", "--clear", "embeddings", "--json", **cache)[1]
    sizes = {row["part"]: row["bytes"] for row in json.loads(out)}
    assert sizes["embeddings"] == 0
    assert sizes["images"] == 1500
    assert compvl("cache", "--clear", "all", "--cache", tmp_path)[0] == 0
    assert tree(tmp_path) == ["mine/x"]  # what it did not make stays
    with pytest.raises(CompvlError, match="embeddings"):
        compvl("cache", "--clear", "everything", "--cache", tmp_path)

"Downloads that are cut, killed, changed, refused; archives that lie; what `compvl data` says of it all."

import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from compvl import downloads
from compvl.core import CompvlError
from compvl.downloads import (
    DATASETS,
    DamagedArchive,
    Dataset,
    Fetched,
    File,
    dataset,
    download,
    fetch,
    file_status,
    status,
    unpack,
)

BODY = bytes(i * i % 251 for i in range(400_000))
SHA = hashlib.sha256(BODY).hexdigest()


class Web(ThreadingHTTPServer):
    """A server whose faults are set by a test: `files`; `ranges` honoured or not; `version` headers; `cuts`: bytes after which each answer in turn
    breaks off; `answers`: (status, headers) in place of the first ones; `length` told or not; `rate` in bytes a second. `log`: (path, Range, status, bytes to send)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        (
            self.files,
            self.ranges,
            self.trusting,
            self.version,
            self.cuts,
            self.answers,
            self.length,
            self.rate,
            self.type,
            self.log,
        ) = {}, True, False, {"ETag": '"1"'}, [], [], True, None, "application/octet-stream", []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass


class Answer(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        web, asked = self.server, self.headers.get("Range")
        code, headers = web.answers.pop(0) if web.answers else (200, {})
        body, start = web.files.get(self.path), 0
        if code == 200 and body is None:
            code = 404
        elif (
            code == 200
            and asked
            and web.ranges
            and (web.trusting or self.headers.get("If-Range") in (None, *web.version.values()))
        ):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            code = 206 if start < len(body) else 416
            headers = {
                "Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"
                if code == 206
                else f"bytes */{len(body)}"
            }
        sent = body[start:] if code in (200, 206) else b""
        told, sent = len(sent), sent[: web.cuts.pop(0)] if web.cuts else sent
        web.log.append([self.path, asked, code, len(sent)])
        self.send_response(code)
        for k, v in {"Content-Type": web.type, **web.version, **headers}.items():
            self.send_header(k, v)
        if web.length:
            self.send_header("Content-Length", str(told))
        self.end_headers()
        for i in range(0, len(sent), 16384):
            self.wfile.write(sent[i : i + 16384])
            if web.rate:
                self.wfile.flush()
                time.sleep(16384 / web.rate)


@pytest.fixture
def web(monkeypatch):
    for k in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(k, raising=False)
    server = Web()
    server.files["/f.bin"] = BODY
    threading.Thread(
        target=server.serve_forever, kwargs=dict(poll_interval=0.02), daemon=True
    ).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def pets(web):
    "A data set of one file, one archive and one file without a link."
    web.files["/photos.zip"] = zipped({f"photos/{i}.jpg": bytes([i]) * 5000 for i in range(4)})
    yield dataset(
        Dataset(
            "pets",
            "Cats and dogs",
            (
                File("pets/f.bin", web.url + "/f.bin", size=len(BODY), sha256=SHA),
                File("pets/photos/", web.url + "/photos.zip", unpack="pets", count=4),
                File("pets/secret.csv"),
            ),
            "CC0",
            "https://example.org/pets",
            "Ask the authors.",
        )
    )
    del DATASETS["pets"]


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files.items():
            z.writestr(name, data)
    return out.getvalue()


def get(web, path, **options):
    return download(
        web.url + "/f.bin", path, progress=False, **{"wait": 0.01, "timeout": 5, **options}
    )


def tree(folder):
    return sorted(
        str(p.relative_to(folder))
        for p in Path(folder).rglob("*")
        if not p.is_dir() or p.is_symlink()
    )


# --- one file ---


@pytest.mark.parametrize(
    "version",
    [
        {"ETag": '"1"'},
        {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"},
        {"ETag": 'W/"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"},
    ],
)
def test_a_broken_connection_goes_on_where_it_stopped(web, tmp_path, version):
    web.version, web.cuts = version, [100_000, 150_000]
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY and tree(tmp_path) == ["f.bin"]
    assert [r for _, r, _, _ in web.log] == [None, "bytes=100000-", "bytes=250000-"] and sum(
        n for *_, n in web.log
    ) == len(BODY)


def test_without_ranges_it_starts_over(web, tmp_path):
    web.ranges, web.cuts = False, [100_000]
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY and [c for _, _, c, _ in web.log] == [
        200,
        200,
    ]


def test_progress_earns_new_tries(web, tmp_path):
    web.cuts = [50_000] * 7
    assert get(web, tmp_path / "f.bin", retries=1).read_bytes() == BODY and len(web.log) == 8


def test_a_server_that_always_breaks_off_ends_it(web, tmp_path):
    web.ranges, web.cuts = False, [100_000] * 10
    with pytest.raises(CompvlError, match="connection broke.*what is here is kept"):
        get(web, tmp_path / "f.bin", retries=3)
    assert len(web.log) == 4 and tree(tmp_path) == ["f.bin.part", "f.bin.part.json"]


@pytest.mark.parametrize(
    "trusting", [False, True]
)  # a trusting server ignores If-Range and sends the rest of another file
def test_a_file_that_changes_meanwhile_is_fetched_anew(web, tmp_path, trusting):
    web.cuts = [100_000] * 2
    with pytest.raises(CompvlError):
        get(web, tmp_path / "f.bin", retries=0)
    web.files["/f.bin"], web.version, web.trusting, web.cuts = (
        BODY[::-1],
        {"ETag": '"2"'},
        trusting,
        [],
    )
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY[::-1]


def test_without_a_version_only_a_checksum_lets_it_resume(web, tmp_path):
    for options, asked in (({}, None), (dict(sha256=SHA), "bytes=100000-")):
        web.version, web.cuts, web.log = {}, [100_000], []
        assert (
            get(web, tmp_path / f"{asked}", **options).read_bytes() == BODY
            and web.log[1][1] == asked
        )


def test_pieces_that_do_not_fit_together_are_fetched_in_one(web, tmp_path):
    web.version, web.cuts, web.files["/f.bin"] = {}, [100_000], BODY[::-1]
    with pytest.raises(CompvlError):
        get(web, tmp_path / "f.bin", sha256=SHA, retries=0)
    web.files["/f.bin"] = BODY
    assert get(web, tmp_path / "f.bin", sha256=SHA).read_bytes() == BODY
    assert [(r, c) for _, r, c, _ in web.log] == [(None, 200), ("bytes=100000-", 206), (None, 200)]
    web.cuts, web.log = [100_000], []
    with pytest.raises(CompvlError, match="thrown away"):
        get(web, tmp_path / "g.bin", sha256="0" * 64)
    assert len(web.log) == 3  # once more in one piece, and no more


def test_busy_servers_are_asked_again_when_they_say(web, tmp_path):
    web.answers = [(503, {"Retry-After": "1"}), (429, {}), (500, {})]
    start = time.monotonic()
    assert (
        get(web, tmp_path / "f.bin").read_bytes() == BODY
        and len(web.log) == 4
        and 1 <= time.monotonic() - start < 30
    )
    web.answers = [(503, {"Retry-After": "7200"})]
    with pytest.raises(CompvlError, match="503.*7200 s"):
        get(web, tmp_path / "g.bin")
    web.answers, web.log = [(502, {})] * 9, []
    with pytest.raises(CompvlError, match="502.*Try again later"):
        get(web, tmp_path / "g.bin", retries=2)
    assert len(web.log) == 3 and tree(tmp_path) == ["f.bin"]


@pytest.mark.parametrize(
    "code, says",
    [(404, "not there any more"), (401, "asks for a login"), (403, "does not let you in")],
)
def test_a_refusal_is_final(web, tmp_path, code, says):
    web.answers = [(code, {})] * 3
    with pytest.raises(CompvlError, match=f"{code}.*{says}.*by hand.*f.bin"):
        get(web, tmp_path / "f.bin")
    assert len(web.log) == 1 and not tree(tmp_path)


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
    web.rate = 16384 / 3
    with pytest.raises(CompvlError, match="timed out"):
        get(web, tmp_path / "f.bin", timeout=0.3, retries=0)


def test_wrong_checksum_or_size_leaves_nothing(web, tmp_path):
    with pytest.raises(CompvlError, match=f"sha256 {SHA}, {'0' * 64} expected"):
        get(web, tmp_path / "f.bin", sha256="0" * 64)
    with pytest.raises(CompvlError, match=f"md5 {hashlib.md5(BODY).hexdigest()}"):
        get(web, tmp_path / "f.bin", md5="0" * 32)
    with pytest.raises(CompvlError, match="offers 400,000 bytes, 399,999 expected"):
        get(web, tmp_path / "f.bin", size=399_999)
    assert not tree(tmp_path)
    assert get(
        web, tmp_path / "f.bin", md5=hashlib.md5(BODY).hexdigest().upper(), size=len(BODY)
    ).exists()


def test_an_empty_answer_is_no_file(web, tmp_path):
    web.files["/f.bin"] = b""
    with pytest.raises(CompvlError, match="is empty"):
        get(web, tmp_path / "f.bin")
    assert not tree(tmp_path)


def test_an_untold_length(web, tmp_path):
    web.length = False
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY
    web.cuts = [100_000]  # looks like the end of the file, unless its size is known
    assert (
        get(web, tmp_path / "g.bin", size=len(BODY)).read_bytes() == BODY
        and web.log[-1][1] == "bytes=100000-"
    )
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
        assert get(web, tmp_path / "g.bin").read_bytes() == BODY and len(web.log) == requests
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
    assert (
        download("http://data.invalid/f.bin", tmp_path / "f.bin", progress=False).read_bytes()
        == BODY
    )


def test_a_full_disk(web, tmp_path, monkeypatch):
    usage, fsync = shutil.disk_usage, os.fsync
    monkeypatch.setattr(shutil, "disk_usage", lambda p: SimpleNamespace(free=1000))
    with pytest.raises(CompvlError, match="f.bin needs 400 kB.*1.0 kB left"):
        get(web, tmp_path / "f.bin")
    monkeypatch.setattr(shutil, "disk_usage", usage)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CompvlError, match="No space left.*kept"):
        get(web, tmp_path / "f.bin")
    monkeypatch.setattr(os, "fsync", fsync)
    web.log = []
    assert get(web, tmp_path / "f.bin").read_bytes() == BODY and not web.log
    (tmp_path / "file").write_text("")
    with pytest.raises(CompvlError, match="Cannot write"):
        get(web, tmp_path / "file/f.bin")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_a_part_that_is_resumed(web, tmp_path, sign):
    web.rate, target = 200_000, tmp_path / "f.bin"
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from compvl.downloads import download; download({web.url + '/f.bin'!r}, {str(target)!r})",
        ],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # a shell starts its background jobs deaf to it
    part = tmp_path / "f.bin.part"
    for _ in range(1000):
        if part.exists() and part.stat().st_size > 100_000:
            break
        time.sleep(0.02)
    child.send_signal(sign)
    child.communicate(timeout=20)
    assert (
        child.returncode != 0
        and not target.exists()
        and 0 < (have := part.stat().st_size) < len(BODY)
    )
    web.rate, web.log = None, []
    assert get(web, target, sha256=SHA).read_bytes() == BODY and tree(tmp_path) == ["f.bin"]
    assert web.log == [["/f.bin", f"bytes={have}-", 206, len(BODY) - have]]


# --- archives ---


def tarred(path, *entries, mode="w:gz"):
    "A tar of (name, type, link target) entries; files hold `abc`."
    with tarfile.open(path, mode) as t:
        for name, kind, target in entries:
            m = tarfile.TarInfo(name)
            m.type, m.linkname, m.mode = kind, target, 0o4777
            m.size = 3 if kind == tarfile.REGTYPE else 0
            t.addfile(m, io.BytesIO(b"abc"))
    return path


FILE, LINK, HARD, DIR = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    "entries",
    [
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
    ],
    ids=str,
)
@pytest.mark.parametrize("python_helps", [True, False])
def test_a_tar_entry_that_leaves_the_folder_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, entries, python_helps
):
    if not python_helps:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    archive, into = (
        tarred(tmp_path / "x.tar.gz", ("fine.txt", FILE, ""), *entries),
        tmp_path / "deep/into",
    )
    with pytest.raises(CompvlError, match="x.tar.gz: the entry .*Nothing was unpacked") as e:
        unpack(archive, into, progress=False)
    assert repr(entries[-1][0]) in str(e.value) or len(entries) == 2
    assert tree(tmp_path) == ["x.tar.gz"] and not Path("/tmp/evil").exists()


def zip_entry(name, data=b"abc", mode=stat.S_IFREG | 0o644):
    i = zipfile.ZipInfo(name)
    i.create_system, i.external_attr = 3, mode << 16
    return i, data


@pytest.mark.parametrize(
    "entry",
    [
        zip_entry("../evil"),
        zip_entry("/tmp/evil"),
        zip_entry("a/../../evil"),
        zip_entry("C:\\evil"),
        zip_entry("..\\evil"),
        zip_entry("out", b"/etc", stat.S_IFLNK | 0o777),
        zip_entry("a/out", b"../../x", stat.S_IFLNK | 0o777),
        zip_entry("pipe", b"", stat.S_IFIFO | 0o644),
    ],
    ids=lambda e: e[0].filename,
)
def test_a_zip_entry_that_leaves_the_folder_is_refused_before_anything_is_written(tmp_path, entry):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as z:
        z.writestr("fine.txt", "abc")
        z.writestr(*entry)
    with pytest.raises(CompvlError, match="x.zip: the entry .*Nothing was unpacked") as e:
        unpack(tmp_path / "x.zip", tmp_path / "into", progress=False)
    assert repr(entry[0].filename) in str(e.value) and tree(tmp_path) == ["x.zip"]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_good_tars(tmp_path, mode):
    archive = tarred(
        tmp_path / "x",
        ("./", DIR, ""),
        ("./v1/", DIR, ""),
        ("v1/a.txt", FILE, ""),
        ("v1/b", HARD, "v1/a.txt"),
        ("deep/latest", LINK, "../v1"),
        ("latest", LINK, "deep/latest"),
        mode=mode,
    )
    (tmp_path / "into/v1").mkdir(parents=True)
    (tmp_path / "into/v1/a.txt").write_text("old")
    (tmp_path / "into/v1/mine").write_text("mine")
    unpack(archive, tmp_path / "into", expect=["v1/a.txt"], progress=False)
    assert tree(tmp_path / "into") == ["deep/latest", "latest", "v1/a.txt", "v1/b", "v1/mine"]
    assert (tmp_path / "into/latest/a.txt").read_text() == "abc" and not (
        tmp_path / "into/v1/a.txt"
    ).stat().st_mode & stat.S_ISUID


def test_zips_with_links_and_with_backslashes(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as z:
        z.writestr("a\\b.txt", "abc")
        z.writestr(*zip_entry("l", b"a", stat.S_IFLNK | 0o777))
    unpack(tmp_path / "x.zip", tmp_path / "into", progress=False)
    assert (tmp_path / "into/l/b.txt").read_text() == "abc"


def damage(kind):
    noise, out = hashlib.shake_256(b"x").digest(100_000), io.BytesIO()
    if kind in ("nothing", "page"):
        return b"" if kind == "nothing" else b"<html>Please log in</html>"
    if kind.startswith("zip"):
        with zipfile.ZipFile(out, "w") as z:
            z.writestr("a/x", noise)
            if kind == "zip, locked":
                z.infolist()[0].flag_bits |= 1
        whole = out.getvalue()
        return (
            whole[:50_000]
            if kind == "zip, half"
            else whole[:5000] + bytes([whole[5000] ^ (kind == "zip, flipped")]) + whole[5001:]
        )
    with tarfile.open(
        fileobj=out, mode=kind.split(",")[0].replace("tar.", "w:").replace("tar", "w")
    ) as t:
        m = tarfile.TarInfo("a/x")
        m.size = len(noise)
        t.addfile(m, io.BytesIO(noise))
    return out.getvalue()[:50_000]


@pytest.mark.parametrize(
    "kind",
    [
        "zip, flipped",
        "zip, half",
        "zip, locked",
        "tar, half",
        "tar.gz, half",
        "tar.bz2, half",
        "tar.xz, half",
        "nothing",
        "page",
    ],
)
def test_damaged_archives_are_named_and_leave_nothing(tmp_path, kind):
    (tmp_path / "photos.zip").write_bytes(damage(kind))
    with pytest.raises(
        DamagedArchive, match="photos.zip is damaged or no archive .*download it again"
    ):
        unpack(tmp_path / "photos.zip", tmp_path / "into", progress=False)
    assert tree(tmp_path) == ["photos.zip"]


def test_bombs_and_a_full_disk(tmp_path, monkeypatch):
    (tmp_path / "x.zip").write_bytes(zipped({f"{i}": bytes(10_000_000) for i in range(3)}))
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as t:
        m = tarfile.TarInfo("x")
        m.size = 30_000_000
        t.addfile(m, io.BytesIO(bytes(m.size)))
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda p: SimpleNamespace(free=20_000_000))
    for name in ("x.zip", "x.tar.gz"):
        with pytest.raises(
            CompvlError, match=f"{name} unpacks to at least 30.0 MB and the disk has 20.0 MB"
        ):
            unpack(tmp_path / name, tmp_path / "into", progress=False)
    monkeypatch.setattr(shutil, "disk_usage", usage)

    def full(*a):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(CompvlError, match="the disk is full"):
        unpack(tmp_path / "x.zip", tmp_path / "into", progress=False)
    assert tree(tmp_path) == ["x.tar.gz", "x.zip"]


def test_an_archive_without_what_is_expected(tmp_path):
    (tmp_path / "x.zip").write_bytes(zipped({"other/a": b"", "readme": b""}))
    with pytest.raises(CompvlError, match="x.zip holds no photos, but other, readme"):
        unpack(tmp_path / "x.zip", tmp_path / "into", expect=["photos"], progress=False)
    assert tree(tmp_path) == ["x.zip"]


# --- data sets ---


def test_fetch_takes_what_is_absent_or_spoilt_and_nothing_else(web, pets, tmp_path):
    assert fetch("pets", tmp_path, progress=False) == Fetched(
        ["pets/f.bin", "pets/photos/"], [], ["pets/secret.csv"]
    )
    assert (
        tree(tmp_path) == ["pets/f.bin"] + [f"pets/photos/{i}.jpg" for i in range(4)]
        and not (tmp_path / "downloads").exists()
    )
    web.log = []
    (tmp_path / "downloads/pets").mkdir(parents=True)
    (tmp_path / "downloads/pets/photos.zip").write_bytes(b"left over")
    assert (
        fetch("pets", tmp_path, progress=False).fetched == []
        and not web.log
        and not (tmp_path / "downloads").exists()
    )
    (tmp_path / "pets/f.bin").write_bytes(BODY[::-1])
    assert (
        fetch("pets", tmp_path, progress=False).fetched == ["pets/f.bin"]
        and (tmp_path / "pets/f.bin").read_bytes() == BODY
        and len(web.log) == 1
    )
    (tmp_path / "pets/photos/2.jpg").unlink()
    assert (
        fetch("pets", tmp_path, progress=False).fetched == ["pets/photos/"]
        and len(tree(tmp_path)) == 5
    )


def test_one_archive_for_several_files_is_fetched_once(web, tmp_path):
    web.files["/ann.zip"] = zipped({"annotations/a.json": b"{}", "annotations/b.json": b"[]"})
    d = dataset(
        Dataset(
            "ann",
            "",
            tuple(
                File(
                    f"coco/annotations/{x}.json",
                    web.url + "/ann.zip",
                    size=len(web.files["/ann.zip"]),
                    unpack="coco",
                )
                for x in "ab"
            ),
            "",
            "",
        )
    )
    try:
        assert status(tmp_path, ["ann"])["size"][0] == len(web.files["/ann.zip"])
        fetch("ann", tmp_path, progress=False)
        assert len(web.log) == 1 and status(tmp_path, ["ann"]).state[0] == "present"
    finally:
        del DATASETS[d.name]


def test_one_file_that_cannot_be_had_does_not_keep_the_others(web, tmp_path):
    d = dataset(
        Dataset(
            "many",
            "Many files",
            tuple(
                File(f"many/{i}", web.url + ("/f.bin" if i in (2, 4) else f"/{i}"))
                for i in range(6)
            ),
            "",
            "",
        )
    )
    try:
        with pytest.raises(
            CompvlError, match="/0 answers 404.*\n.*/1 answers 404.*\n.*/3 answers 404"
        ):
            fetch("many", tmp_path, progress=False)
        assert tree(tmp_path) == ["many/2"] and [p for p, *_ in web.log] == [
            "/0",
            "/1",
            "/f.bin",
            "/3",
        ]  # after the third, nothing more is tried
    finally:
        del DATASETS[d.name]


def test_a_damaged_archive_is_removed_and_fetched_again(web, pets, tmp_path):
    whole, web.files["/photos.zip"] = web.files["/photos.zip"], web.files["/photos.zip"][:300]
    with pytest.raises(DamagedArchive, match="photos.zip"):
        fetch("pets", tmp_path, progress=False)
    assert tree(tmp_path) == ["pets/f.bin"]
    web.files["/photos.zip"] = whole
    fetch("pets", tmp_path, progress=False)
    assert len(tree(tmp_path)) == 5


def test_an_interrupted_unpacking_is_seen_and_done_again_without_a_download(
    web, pets, tmp_path, monkeypatch
):
    replace, merge = os.replace, downloads._merge

    def stop(*a):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(shutil, "copyfileobj", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch("pets", tmp_path, progress=False)
    assert (
        "not unpacked yet" in status(tmp_path, ["pets"]).problem[0]
        and not (tmp_path / "pets/photos").exists()
    )
    (tmp_path / "pets/photos").mkdir()  # so that entries take their places one by one

    def half(source, into):
        if source.name == "photos":
            replace(source / "0.jpg", into / "0.jpg")
            raise KeyboardInterrupt
        merge(source, into)

    with monkeypatch.context() as m:
        m.setattr(downloads, "_merge", half)
        with pytest.raises(KeyboardInterrupt):
            fetch("pets", tmp_path, progress=False)
    web.log = []
    assert "interrupted" in file_status("pets", tmp_path).problem[1]
    fetch("pets", tmp_path, progress=False)
    assert (
        not web.log
        and tree(tmp_path) == ["pets/f.bin"] + [f"pets/photos/{i}.jpg" for i in range(4)]
        and status(tmp_path, ["pets"]).found[0] == 2
    )


def test_space_is_looked_at_before_the_first_byte(web, tmp_path, monkeypatch):
    d = dataset(
        Dataset(
            "big",
            "Big pictures",
            (File("big/photos/", web.url + "/p.zip", size=3_000_000_000, unpack="big"),),
            "",
            "",
        )
    )
    try:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda p: SimpleNamespace(free=5_000_000_000)
        )  # enough for the archive, not for what is in it
        with pytest.raises(CompvlError, match="Big pictures needs 6.0 GB.*5.0 GB left"):
            fetch("big", tmp_path / "new", progress=False)
        assert not web.log and not (tmp_path / "new").exists()
    finally:
        del DATASETS[d.name]


def test_two_processes_do_not_fetch_the_same(web, pets, tmp_path):
    (tmp_path / "downloads/pets").mkdir(parents=True)
    with FileLock(tmp_path / "downloads/pets/lock"):
        with pytest.raises(CompvlError, match="Another process is fetching pets"):
            fetch("pets", tmp_path, progress=False)
        assert (tmp_path / "downloads/pets/lock").exists()
    assert fetch("pets", tmp_path, progress=False).fetched and not (tmp_path / "downloads").exists()


def test_status_tells_absent_incomplete_and_present_without_the_network(
    pets, tmp_path, monkeypatch
):
    import socket

    monkeypatch.setattr(socket, "socket", None)

    def row():
        return status(tmp_path, ["pets"]).iloc[0]

    assert (
        (row().state, row().found, row().needed) == ("absent", 0, 3)
        and "compvl data fetch pets" in row()["get"]
        and "Ask the authors" in row()["get"]
    )
    (tmp_path / "pets/photos").mkdir(parents=True)
    assert row().state == "absent"  # an empty folder is nothing
    (tmp_path / "pets/f.bin.part").write_bytes(bytes(1234))
    assert row().state == "incomplete" and "interrupted after 1.2 kB" in row().problem
    (tmp_path / "pets/f.bin.part").unlink()
    for i in range(3):
        (tmp_path / f"pets/photos/{i}.jpg").write_bytes(b"x")
    assert "pets/photos/ holds 3 of 4 files" in row().problem and row().bytes == 3
    (tmp_path / "pets/f.bin").write_bytes(BODY[:-1])
    assert "has 399,999 bytes, 400,000 expected" in row().problem
    (tmp_path / "pets/f.bin").write_bytes(BODY[::-1])
    assert "sha256" in row().problem
    monkeypatch.setattr(downloads, "_SMALL", 1000)
    assert (
        file_status("pets", tmp_path).state[0] == "present"
        and file_status("pets", tmp_path, verify=True).state[0] == "incomplete"
    )
    (tmp_path / "pets/f.bin").write_bytes(BODY)
    (tmp_path / "pets/secret.csv").write_text("x")
    (tmp_path / "pets/photos/3.jpg").write_text("x")
    assert (row().state, row().found, row()["get"]) == ("present", 3, "")


# --- commands ---


@pytest.fixture
def compvl(monkeypatch):
    "Run a `compvl data` command in this process: (exit status, stdout, stderr)."
    from typer.testing import CliRunner

    from compvl.app.cli import app

    monkeypatch.delenv("COMPVL_DATA_ROOT", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args, **env):
        r = CliRunner(env=env).invoke(app, ["data", *map(str, args)])
        if r.exception and not isinstance(r.exception, SystemExit):
            raise r.exception
        return r.exit_code, r.stdout, r.stderr

    return run


def test_status_command(pets, tmp_path, compvl):
    code, out, err = compvl("status", "pets", "--data-root", tmp_path)
    assert (
        code == 0
        and "absent" in out
        and "0 of 3" in out
        and "CC0" in out
        and "fetch, by hand" in out
        and "compvl data fetch pets --data-root" in out
        and "Ask the authors." in out
    )
    (row,) = json.loads(compvl("status", "pets", "--json", COMPVL_DATA_ROOT=str(tmp_path))[1])
    assert (row["state"], row["found"], row["needed"], row["size"]) == ("absent", 0, 3, None)
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets/f.bin").write_bytes(b"half")
    assert (
        "pets: pets/f.bin has 4 bytes, 400,000 expected."
        in compvl("status", "pets", "--data-root", tmp_path)[1]
    )
    code, out, err = compvl("status", "--data-root", tmp_path / "none")
    assert (
        code == 0
        and all(f" {title} " in out for title in ("Annotations", "Images", "Checkpoints"))
        and "no folder" in err
    )


def test_benchmarks_and_groups_are_names_too(tmp_path, compvl):
    def names(*args):
        return {
            r["name"]
            for r in json.loads(compvl("status", *args, "--data-root", tmp_path, "--json")[1])
        }

    assert (
        names("sugarcrepe-add-obj") == names("sugarcrepe") == {"sugarcrepe", "coco-val2017"}
        and names("swap") == {"aro", "aro-images"}
        and names("all") > names("compositional")
    )
    assert compvl("status", "vtab-color", "--data-root", tmp_path)[1].startswith(
        "No files are needed"
    )
    code, out, err = compvl("fetch", "sugarcrepe", "--data-root", tmp_path, "--dry-run")
    assert (
        code == 0
        and "1.7 MB" in out
        and "need these as well: coco-val2017" in out
        and "816 MB" not in out
        and not list(tmp_path.iterdir())
    )
    with pytest.raises(CompvlError, match="did you mean winoground"):
        compvl("status", "winogrand", "--data-root", tmp_path)
    with pytest.raises(CompvlError, match="COMPVL_DATA_ROOT"):
        compvl("status")


def test_fetch_command(web, pets, tmp_path, compvl, monkeypatch):
    code, out, err = compvl("fetch", "pets", "--data-root", tmp_path, "--dry-run")
    assert code == 0 and "CC0" in out and "2 of 3 files, of unknown size" in out and not web.log
    code, out, err = compvl("fetch", "pets", "--data-root", tmp_path, "--json")
    assert (
        code == 0
        and json.loads(out)["pets"]
        == dict(
            fetched=["pets/f.bin", "pets/photos/"],
            present=[],
            by_hand=["pets/secret.csv"],
            error="",
        )
        and "Ask the authors" in err
    )
    code, out, err = compvl("fetch", "pets", "--data-root", tmp_path)
    assert (
        code == 1 and "to download: nothing" in out and "by hand: pets/secret.csv" in out
    )  # nothing could be done
    (tmp_path / "pets/secret.csv").write_text("x")
    assert compvl("fetch", "pets", "--data-root", tmp_path)[0] == 0
    (tmp_path / "pets/f.bin").unlink()
    web.files["/f.bin"] = BODY[::-1]
    code, out, err = compvl("fetch", "pets", "--data-root", tmp_path, "--json")
    assert (
        code == 1
        and "compvl: What http" in err
        and "thrown away" in json.loads(out)["pets"]["error"]
    )

    def stop(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(downloads, "fetch", stop)
    code, out, err = compvl("fetch", "pets", "--data-root", tmp_path)
    assert code == 130 and "Interrupted; `compvl data fetch pets" in err


def test_cache_command(tmp_path, compvl):
    for part in ("embeddings", "images", "mine"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "x").write_bytes(bytes(1500))
    code, out, err = compvl("cache", COMPVL_CACHE=str(tmp_path))
    assert code == 0 and "1.5 kB" in out and "embeddings" in out
    rows = {
        r["part"]: r["bytes"]
        for r in json.loads(
            compvl("cache", "--clear", "embeddings", "--json", COMPVL_CACHE=str(tmp_path))[1]
        )
    }
    assert rows["embeddings"] == 0 and rows["images"] == 1500
    assert compvl("cache", "--clear", "all", "--cache", tmp_path)[0] == 0 and tree(tmp_path) == [
        "mine/x"
    ]  # what it did not make stays
    with pytest.raises(CompvlError, match="embeddings"):
        compvl("cache", "--clear", "everything", "--cache", tmp_path)

"""report.html: whole in itself, and without overflow, missing pictures or errors in a browser."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from compvl.app.reproduction import reproduce

FIGURE = """
import matplotlib; matplotlib.use("agg")
import matplotlib.pyplot as plt
from compvl.plotting import save_figure
fig, ax = plt.subplots(figsize=(11, 2)); ax.plot([1, 3, 2])
save_figure(fig, out, "{name}_line")
"""
WIDE = """
import numpy as np, pandas as pd
pd.DataFrame(np.arange(60.).reshape(2, 30), columns=[f"a_long_name_of_a_column_{i}" for i in range(30)])
"""
TABLE = """
from types import SimpleNamespace as Row
import pandas as pd
from compvl.paper.columns import COMPOSITION
from compvl.paper.tables import beside
rows = [Row(key="clip", label="CLIP", group="pretrained"), Row(key="x", label="CLIP-FT", group="finetuned")]
beside(pd.DataFrame([dict(method="clip", benchmark=c.benchmark, group=c.group, metric=c.metric, value=50., lo=40., hi=60.) for c in COMPOSITION]), rows, COMPOSITION, "A table", "cae_table1")
"""
PROSE = "# {name}\n\nA `very_long_piece_of_code_without_a_single_break_in_it_that_is_wider_than_a_phone = 1` and a [link](other.ipynb).\n\n    preformatted text that is quite a bit wider than the screen of any phone that is sold today, and goes on\n\n![gone](gone.png)"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for name, cells in {
        "01_a": [FIGURE.format(name="01_a"), WIDE, "print('<script>alert(1)</script>')"],
        "02_b": ["1/0"],
        "11_claims": [TABLE, FIGURE.format(name="11_claims")],
    }.items():
        head = new_code_cell(
            'profile = "micro"\nout = "reproduction"', metadata={"tags": ["parameters"]}
        )
        nb = new_notebook(
            cells=[
                new_markdown_cell(PROSE.format(name=f"About {name}")),
                head,
                *map(new_code_cell, cells),
            ],
            metadata={
                "kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}
            },
        )
        nbformat.write(nb, folder / f"{name}.ipynb")
    reproduce(profile="smoke", out=folder / "out", folder=folder)
    return folder / "out/report.html"


class Page(HTMLParser):
    """Tags with their attributes, and the classes of what each table stands in."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.around, self.tables = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "table":
            self.tables.append(" ".join(self.around))
        if tag == "div":
            self.around.append(attrs.get("class") or "")

    def handle_endtag(self, tag):
        if tag == "div" and self.around:
            self.around.pop()


def test_it_holds_all_that_it_shows(report):
    text = report.read_text()
    page = Page(text)
    tags = [t for t, _ in page.tags]
    assert not {"script", "iframe", "object", "embed", "video", "audio", "form"} & set(tags)
    pictures = [a for t, a in page.tags if t == "img"]
    assert len(pictures) == 2 and all(
        re.match(r"data:image/(png|jpeg|svg\+xml);base64,", a["src"]) and a["alt"] for a in pictures
    )
    assert [a["href"] for t, a in page.tags if t == "link"] == ["data:,"] and not re.search(
        r"@import|url\(", text
    )
    assert all(re.match("https?:|#", a["href"]) for t, a in page.tags if t == "a")
    assert len(page.tables) >= 4 and all("scroll" in classes.split() for classes in page.tables)
    assert (
        "&lt;script&gt;alert(1)" in text
        and ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
        in page.tags
    )


def test_it_tells_all_of_it(report):
    text = report.read_text()
    assert (
        text.index('id="11_claims"')
        < text.index('id="01_a"')
        < text.index('id="02_b"')
        < text.index('id="environment"')
    )
    assert (
        "ZeroDivisionError" in text
        and 'class="failed">failed' in text
        and "CAE" not in text.split("<section")[0]
    )
    assert len(report.read_bytes()) < 15e6 and not list(report.parent.glob("*.tmp*"))
    assert 'href="report.html"' in (report.parent / "index.html").read_text()


PROBE = """<!doctype html><title>probe</title><body><script>
const found = {}, errors = [], widths = [1280, 375, 360];
async function look(width) {
  const f = document.createElement('iframe'); f.style.cssText = `width:${width}px;height:800px;border:0`; f.src = 'report.html';
  await new Promise(done => { f.onload = done; document.body.append(f); });
  const w = f.contentWindow, d = w.document; w.addEventListener('error', e => errors.push(String(e.message)));
  await Promise.all([...d.images].filter(i => !i.complete).map(i => new Promise(done => { i.onload = i.onerror = done; })));
  const e = d.scrollingElement;
  found[width] = {overflow: e.scrollWidth - e.clientWidth, broken: [...d.images].filter(i => !(i.naturalWidth > 0)).length, images: d.images.length,
    scrolling: [...d.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth).length};
}
window.addEventListener('error', e => errors.push(String(e.message)));
(async () => { for (const w of widths) await look(w); const p = document.createElement('pre'); p.id = 'found'; p.textContent = JSON.stringify({found, errors}); document.body.append(p); })();
</script>"""


def browser():
    return next(
        (
            p
            for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
            if (p := shutil.which(name))
        ),
        None,
    )


@pytest.mark.skipif(
    browser() is None,
    reason="no chromium on this machine: the report is looked at in a browser only where there is one",
)
def test_in_a_browser(report, tmp_path):
    (tmp_path / "report.html").write_bytes(report.read_bytes())
    (tmp_path / "probe.html").write_text(PROBE)
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [
                browser(),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--enable-logging=stderr",
                "--window-size=1400,900",
                "--virtual-time-budget=20000",
                "--dump-dom",
                f"http://127.0.0.1:{server.server_address[1]}/probe.html",
            ],
            capture_output=True,
            text=True,
            timeout=240,
        )
        server.shutdown()
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert told, done.stderr[-2000:]
    seen = json.loads(told[1])
    assert seen["errors"] == [] and not re.search(r"CONSOLE.*(?:rror|ailed)", done.stderr)
    for width, page in seen["found"].items():
        assert page["overflow"] <= 0 and page["broken"] == 0 and page["images"] == 2, (width, page)
    assert seen["found"]["360"]["scrolling"] >= 1  # the wide tables do, each in its box
    assert set(asked) <= {"/probe.html", "/report.html", "/favicon.ico"}

"""report.html contains all it shows, and has no overflow, missing pictures or errors in a browser.

The browser part runs only where there is a chromium.
"""

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
names = [f"a_long_name_of_a_column_{i}" for i in range(30)]
pd.DataFrame(np.arange(60.).reshape(2, 30), columns=names)
"""
TABLE = """
from types import SimpleNamespace as Row
import pandas as pd
from compvl.paper.columns import COMPOSITION
from compvl.paper.tables import beside
rows = [
    Row(key="clip", label="CLIP", group="pretrained"),
    Row(key="x", label="CLIP-FT", group="finetuned"),
]
figures = [
    dict(method="clip", benchmark=c.benchmark, group=c.group, metric=c.metric,
         value=50., lo=40., hi=60.)
    for c in COMPOSITION
]
beside(pd.DataFrame(figures), rows, COMPOSITION, "A table", "cae_table1")
"""
PROSE = """\
# {name}

A `very_long_piece_of_code_without_a_single_break_in_it_that_is_wider_than_a_phone = 1` and a \
[link](other.ipynb).

    preformatted text that is quite a bit wider than the screen of any phone that is sold today, \
and goes on

![gone](gone.png)"""
PARAMETERS = 'profile = "micro"\nout = "reproduction"'
NOTEBOOKS = {
    "01_a": [FIGURE.format(name="01_a"), WIDE, "print('<script>alert(1)</script>')"],
    "02_b": ["1/0"],
    "11_claims": [TABLE, FIGURE.format(name="11_claims")],
}


def write_notebook(path, *sources):
    """Write a notebook with prose, a cell of parameters and these cells."""
    prose = new_markdown_cell(PROSE.format(name=f"About {path.stem}"))
    head = new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    cells = [prose, head, *map(new_code_cell, sources)]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for name, sources in NOTEBOOKS.items():
        write_notebook(folder / f"{name}.ipynb", *sources)
    reproduce(profile="smoke", out=folder / "out", folder=folder)
    return folder / "out/report.html"


class Page(HTMLParser):
    """Tags with their attributes, and of each table the classes of the boxes around it."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.boxes = []
        self.tables = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "table":
            self.tables.append(" ".join(self.boxes).split())
        if tag == "div":
            self.boxes.append(attrs.get("class") or "")

    def handle_endtag(self, tag):
        if tag == "div" and self.boxes:
            self.boxes.pop()

    def attributes(self, wanted):
        """The attributes of all tags of this name."""
        return [attrs for tag, attrs in self.tags if tag == wanted]


def test_it_contains_all_that_it_shows(report):
    text = report.read_text()
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not {"script", "iframe", "object", "embed", "video", "audio", "form"} & tags
    pictures = page.attributes("img")
    assert len(pictures) == 2
    inlined = r"data:image/(png|jpeg|svg\+xml);base64,"
    assert all(re.match(inlined, picture["src"]) for picture in pictures)
    assert all(picture["alt"] for picture in pictures)
    assert [link["href"] for link in page.attributes("link")] == ["data:,"]
    assert not re.search(r"@import|url\(", text)
    assert all(re.match("https?:|#", link["href"]) for link in page.attributes("a"))
    assert len(page.tables) >= 4
    assert all("scroll" in classes for classes in page.tables)
    assert "&lt;script&gt;alert(1)" in text
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert viewport in page.attributes("meta")


def test_it_contains_every_notebook(report):
    text = report.read_text()
    order = ("11_claims", "01_a", "02_b", "environment")
    places = [text.index(f'id="{name}"') for name in order]
    assert places == sorted(places)
    assert "ZeroDivisionError" in text
    assert 'class="failed">failed' in text
    assert "CAE" not in text.split("<section")[0]
    assert len(report.read_bytes()) < 15e6
    assert not list(report.parent.glob("*.tmp*"))
    assert 'href="report.html"' in (report.parent / "index.html").read_text()


PROBE = """<!doctype html><title>probe</title><body><script>
const found = {}, errors = [], widths = [1280, 375, 360];
async function look(width) {
  const f = document.createElement('iframe');
  f.style.cssText = `width:${width}px;height:800px;border:0`;
  f.src = 'report.html';
  await new Promise(done => { f.onload = done; document.body.append(f); });
  const w = f.contentWindow, d = w.document;
  w.addEventListener('error', e => errors.push(String(e.message)));
  const loading = [...d.images].filter(i => !i.complete);
  await Promise.all(loading.map(i => new Promise(done => { i.onload = i.onerror = done; })));
  const e = d.scrollingElement;
  found[width] = {
    overflow: e.scrollWidth - e.clientWidth,
    broken: [...d.images].filter(i => !(i.naturalWidth > 0)).length,
    images: d.images.length,
    scrolling: [...d.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth).length
  };
}
window.addEventListener('error', e => errors.push(String(e.message)));
(async () => {
  for (const w of widths) await look(w);
  const p = document.createElement('pre');
  p.id = 'found';
  p.textContent = JSON.stringify({found, errors});
  document.body.append(p);
})();
</script>"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --enable-logging=stderr --window-size=1400,900
--virtual-time-budget=20000 --dump-dom""".split()


def browser():
    """The path of a browser; None where there is none."""
    paths = (shutil.which(name) for name in BROWSERS)
    return next((path for path in paths if path), None)


@pytest.fixture
def server(tmp_path):
    """Serves a folder: its address, and the list of the paths that were requested."""
    requested = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            requested.append(self.path)

    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}", requested
        running.shutdown()


@pytest.mark.skipif(
    browser() is None,
    reason="no chromium here: the report is shown in a browser only where there is one",
)
def test_in_a_browser(report, tmp_path, server):
    address, requested = server
    (tmp_path / "report.html").write_bytes(report.read_bytes())
    (tmp_path / "probe.html").write_text(PROBE)
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [browser(), *OPTIONS, profile, f"{address}/probe.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    probed = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert probed, done.stderr[-2000:]
    seen = json.loads(probed[1])
    assert seen["errors"] == []
    assert not re.search(r"CONSOLE.*(?:rror|ailed)", done.stderr)
    for width, page in seen["found"].items():
        assert page["overflow"] <= 0, (width, page)
        assert page["broken"] == 0, (width, page)
        assert page["images"] == 2, (width, page)
    assert seen["found"]["360"]["scrolling"] >= 1  # the wide tables do, each in its box
    assert set(requested) <= {"/probe.html", "/report.html", "/favicon.ico"}

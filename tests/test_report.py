"""Report pages contain all they show: no overflow, missing pictures or errors in a browser.

There are two: that of a reproduction, and that of an evaluation (`compvl evaluate --report`). The
browser parts run only where there is a chromium.
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from PIL import Image

from compvl.app import cli
from compvl.app.card import card_html
from compvl.app.checkpoints import Checkpoint
from compvl.app.evaluations import evaluate_checkpoints
from compvl.app.reproduction import reproduce
from compvl.benchmarks.items import Benchmark, Triplet
from compvl.benchmarks.loading import CountWarning, load_benchmarks
from compvl.train.config import TrainConfig
from compvl.train.loop import train

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
    inlined = r"data:image/(png|jpeg);base64,"
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
const found = {}, errors = [], widths = [1280, 390, 375, 360];
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


in_a_browser = pytest.mark.skipif(
    browser() is None,
    reason="no chromium here: the report is shown in a browser only where there is one",
)


def look_at(page, folder, server):
    """What a browser sees of a page at each width of the probe. Fails for errors of scripts."""
    address, requested = server
    (folder / "report.html").write_bytes(page.read_bytes())
    (folder / "probe.html").write_text(PROBE)
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser(), *OPTIONS, profile, f"{address}/probe.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    probed = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert probed, done.stderr[-2000:]
    seen = json.loads(probed[1])
    assert seen["errors"] == []
    assert not re.search(r"CONSOLE.*(?:rror|ailed)", done.stderr)
    assert set(requested) <= {"/probe.html", "/report.html", "/favicon.ico"}
    return seen["found"]


@in_a_browser
def test_in_a_browser(report, tmp_path, server):
    seen = look_at(report, tmp_path, server)
    for width, page in seen.items():
        assert page["overflow"] <= 0, (width, page)
        assert page["broken"] == 0, (width, page)
        assert page["images"] == 2, (width, page)
    assert seen["360"]["scrolling"] >= 1  # the wide tables do, each in its box


# The report on models of one's own.


class Tables(HTMLParser):
    """The rows of a page's tables by section: the texts of their cells. Every tag is closed."""

    VOID = {"meta", "link", "img", "br", "input"}

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.section = ""
        self.rows = {}
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"]
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[self.section][-1][-1] += data

    def by_benchmark(self, section):
        """{(benchmark, label of the row): cells of the row}."""
        found = {}
        for cells in self.rows[section]:
            if len(cells) == 1:
                benchmark = cells[0]
            elif cells[0] != "benchmark":
                found[benchmark, cells[0]] = cells[1:]
        return found


def write_report(folder, models, *more):
    """Evaluate models as a person would: `card.html` and `card.csv` in a folder."""
    options = ["--benchmark", "triplets,coco-retrieval", "--n", "20", "--no-cache", *more]
    files = ["--report", f"{folder}/card.html", "--csv", f"{folder}/card.csv"]
    named = []
    for model in models:
        named += ["--model", model]
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["compvl", "evaluate", *named, *options, *files, "--device", "cpu"]
        patch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    """The folder of a report on two models, `card.html`, and of its figures, `card.csv`."""
    folder = tmp_path_factory.mktemp("card")
    write_report(folder, ["micro-clip", "micro-clip:random"])
    return folder


@pytest.fixture(scope="module")
def finetuned_card(tmp_path_factory):
    """The same of micro-CLIP's base and of two models that were finetuned from it, HN and HP+HN.

    They are trained for a few steps: the page does not depend on how well."""
    folder = tmp_path_factory.mktemp("finetuned")
    models = ["micro-clip"]
    for method in ("hn", "hp+hn"):
        config = TrainConfig(method=method, n_train=64, steps=4, batch_size=16, warmup=1)
        models.append(f"micro-clip:{train(config, runs=folder / 'runs', progress=False).folder}")
    write_report(folder, models)
    return folder


def test_card_contains_all_that_it_shows(card):
    text = (card / "card.html").read_text()
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not {"script", "iframe", "object", "embed", "video", "audio", "form", "a"} & tags
    pictures = page.attributes("img")
    assert len(pictures) > 10
    assert all(re.match("data:image/(png|jpeg);base64,", each["src"]) for each in pictures)
    assert all(picture["alt"] for picture in pictures)
    assert [link["href"] for link in page.attributes("link")] == ["data:,"]
    assert not re.search(r"@import|url\(", text)
    assert all("scroll" in classes for classes in page.tables)
    headed = [table for table in text.split("<table")[1:] if "<th" in table.split("</table>")[0]]
    assert len(headed) == len(page.tables)
    assert len(text) < 2e6
    assert "--benchmark triplets,coco-retrieval --n 20" in text
    sections = "models standing figures differences brittleness failures attribution retrieval"
    assert all(f'<section id="{name}">' in text for name in sections.split())
    assert "not comparable with the published ones" in text


def test_card_has_the_figures_of_the_csv(card):
    """Each figure of a whole benchmark, and each of a group, with interval and count."""
    tables = Tables((card / "card.html").read_text())
    shown = tables.by_benchmark("figures") | tables.by_benchmark("groups")
    titles = {"orig_acc": "original accuracy", "aug_acc": "augmented accuracy"}
    csv = pd.read_csv(card / "card.csv")
    hidden = ("coverage", "cut", "ties", "mean_c", "mean_n", "mean_p")
    rows = csv[~csv.metric.isin(hidden) & ~csv.metric.str.startswith("text_only")]
    compared = 0
    for row in rows.itertuples():
        metric = titles.get(row.metric, row.metric.replace("_", " "))
        group = {"all": "", "macro": "macro average: "}.get(row.group, f"{row.group}: ")
        cells = shown[row.benchmark, group + metric]
        model = ["micro-clip", "micro-clip:random"].index(row.model)
        value = f"{row.value:.1f} [{row.lo:.1f}, {row.hi:.1f}]"
        assert re.fullmatch(re.escape(value) + r"( \d+ tied)?", cells[model]), (row, cells)
        assert cells[2] == f"{row.n:.0f}"
        compared += 1
    assert compared > 60
    assert {cells[3] for cells in tables.by_benchmark("groups").values()} == {"100.0"}


def test_card_has_the_differences_of_the_csv(card):
    shown = Tables((card / "card.html").read_text()).by_benchmark("differences")
    csv = pd.read_csv(card / "card_differences.csv")
    rows = csv[(csv.benchmark == "swap") & (csv.metric == "brittleness") & (csv.group == "all")]
    row = rows.iloc[0]
    cell = f"{row['diff']:+.1f} [{row.lo:+.1f}, {row.hi:+.1f}]"
    assert shown["swap", "brittleness"] == [cell]


def test_card_of_a_base_and_two_finetuned_models(finetuned_card):
    """They stand among the rows of HP's Table 1 and among the methods since 2024."""
    text = (finetuned_card / "card.html").read_text()
    standing = text.split('<section id="standing">')[1].split("</section>")[0]
    pictures = Page(standing).attributes("img")
    assert len(pictures) == 4  # REPLACE and SWAP, of Table 1 and since 2024
    models = list(dict.fromkeys(pd.read_csv(finetuned_card / "card.csv").model))
    assert len(models) == 3
    for picture in pictures:
        assert all(f"{model}: accuracy " in picture["alt"] for model in models)
    table_1, since_2024 = pictures[0]["alt"], pictures[2]["alt"]
    assert "NegCLIP" in table_1 and "FSC-CLIP" not in table_1
    for row in ("CLIP ViT-B/32", "Our HN", "Our HP+HN", "FSC-CLIP", "CE-CLIP", "Sigmoid, HP+HN"):
        assert row in since_2024, row
    assert "NegCLIP" not in since_2024
    cells = Tables(text).by_benchmark("differences")["swap", "brittleness"]
    assert len(cells) == 2  # of both from the base
    for place in (("swap", "brittleness"), ("coco-retrieval", "image to text recall@1")):
        shown = Tables(text).by_benchmark("change")[place]
        assert [cell.partition(" → ")[2].partition(".")[0].isdigit() for cell in shown] == [
            True
        ] * 2


def test_card_of_a_listed_run_alone(finetuned_card, tmp_path):
    """Its base is evaluated for the change in composition and retrieval; the file is shown."""
    run = next((finetuned_card / "runs").glob("hn-*"))
    listed = tmp_path / "models.yaml"
    listed.write_text(f"# <mine>\n- {{name: micro-clip, weights: {run}, label: mine}}\n")
    write_report(tmp_path, [], "--models", str(listed))
    text = (tmp_path / "card.html").read_text()
    assert f"--models {listed}" in text
    assert f"# &lt;mine&gt;\n- {{name: micro-clip, weights: {run}, label: mine}}" in text
    assert "mine from micro-clip:base" in text
    assert set(pd.read_csv(tmp_path / "card.csv").model) == {"mine"}
    shown = Tables(text).by_benchmark("change")
    both = Tables((finetuned_card / "card.html").read_text()).by_benchmark("change")
    for place in (("replace", "macro average: augmented accuracy"), ("swap", "brittleness")):
        assert shown[place] == both[place][:1]
    recalls = [place for place in shown if place[0] == "coco-retrieval"]
    assert len(recalls) == 6 and all(shown[place] == both[place][:1] for place in recalls)


def check_card_in_a_browser(page, folder, server):
    """No width of the probe makes the page wider than the screen, or a picture break."""
    seen = look_at(page, folder, server)
    assert {"1280", "390"} <= set(seen)
    for width, found in seen.items():
        assert found["overflow"] <= 0, (width, found)
        assert found["broken"] == 0, (width, found)
        assert found["images"] > 10, (width, found)


@in_a_browser
def test_card_in_a_browser(card, tmp_path, server):
    check_card_in_a_browser(card / "card.html", tmp_path, server)


@in_a_browser
def test_card_of_finetuned_models_in_a_browser(finetuned_card, tmp_path, server):
    check_card_in_a_browser(finetuned_card / "card.html", tmp_path, server)


def photographs(folder, missing):
    """REPLACE and SWAP on six small photographs, of which the last ones are missing."""
    rng = np.random.default_rng(0)
    for k in range(6 - missing):
        pixels = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{k}.jpg")
    benchmarks = []
    for name in ("replace-relations", "replace-attributes", "swap"):
        items = []
        for k in range(12):
            texts = (f"a cat number {k}", f"a dog number {k}", f"one cat number {k}")
            items.append(Triplet(f"{name}-{k}", str(folder / f"{k % 6}.jpg"), *texts, ""))
        benchmarks.append(Benchmark(name, "triplet", items, "a test"))
    return benchmarks


def page_of(checkpoints, benchmarks, **options):
    """The report of an evaluation, without differences."""
    evaluations, failures = evaluate_checkpoints(
        checkpoints, benchmarks, device="cpu", explain=True, **options
    )
    return card_html(evaluations, benchmarks, pd.DataFrame(), failures, "compvl evaluate")


def test_card_of_photographs_with_missing_images(tmp_path):
    """The models stand among published rows; coverage is what it is."""
    benchmarks = photographs(tmp_path, missing=2)
    page = page_of([Checkpoint("micro-clip")], benchmarks, skip_damaged=True)
    shown = Tables(page).by_benchmark("figures")
    assert shown["swap", "brittleness"][1:] == ["8", "66.7", "0"]
    assert "Grey and hollow: the published rows of Table 1" in page
    assert "not comparable" not in page


def test_card_and_terminal_say_how_many_of_the_published_items(tmp_path, monkeypatch, capsys):
    """SugarCrepe's file of 245 exchanged objects, cut off after the second."""
    (tmp_path / "sugarcrepe").mkdir()
    (tmp_path / "val2017").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "val2017/1.jpg")
    texts = dict(caption="a cat on a dog", negative_caption="a dog on a cat")
    entries = {key: dict(filename="1.jpg", **texts) for key in "01"}
    (tmp_path / "sugarcrepe/swap_obj.json").write_text(json.dumps(entries))
    card = tmp_path / "card.html"
    options = ["--benchmark", "sugarcrepe-swap-obj", "--root", tmp_path, "--report", card]
    arguments = ["compvl", "evaluate", *options, "--no-cache", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    with pytest.warns(CountWarning, match="2 items were read"), pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert "SugarCrepe (sugarcrepe-swap-obj: 2 of published 245 items)" in card.read_text()
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if "coverage" in line and "│" in line]
    assert len(rows) == 1
    assert {"published", "0.8163", "2"} <= set(rows[0].replace("│", " ").split())
    assert "Coverage: in part sugarcrepe-swap-obj" in printed


def test_card_of_a_joint_scorer_without_triplets():
    """What cannot be shown is said in a sentence."""
    benchmarks = load_benchmarks(["winoground", "svo-probes"], n=10)
    page = page_of([Checkpoint("micro-xvlm"), Checkpoint("micro-clip", "no-such.pt")], benchmarks)
    Tables(page)
    for sentence in (
        "Neither REPLACE (both parts) nor SWAP was evaluated.",
        "No benchmark of triplets was evaluated",
        "No retrieval benchmark was evaluated.",
        "micro-clip:no-such.pt: ",
        "pairs a second",
    ):
        assert sentence in page
    page = page_of([Checkpoint("micro-xvlm")], load_benchmarks("swap", n=5))
    assert "micro-xvlm scores image and caption jointly" in page

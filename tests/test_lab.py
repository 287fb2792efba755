"""The lab: timing that takes turns, figures and explorers that everyone can read, checks that cannot be fooled."""

import importlib
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from decimal import Decimal
from fractions import Fraction
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from conftest import draw
from hypothesis import given
from hypothesis import strategies as st

import minillm.naive
from minillm import lab
from minillm.config import ModelConfig
from minillm.lab import checks, source, style, svg, tables, timing
from minillm.lab.answers import work_out

explore = importlib.import_module("minillm.lab.explore")  # lab.explore itself is the function
ALT = "Time per token grows with the length of the sequence"
VOID = {"meta", "input", "br", "img", "link", "hr"}


class Strict(HTMLParser):
    """Parses HTML and fails on an element that is closed out of order or left open; collects ids and tags."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.ids, self.tags = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


@pytest.fixture
def shown(monkeypatch):
    """What the lab displayed, in order."""
    things = []
    monkeypatch.setattr(style, "display", things.append)
    return things


def sample(height: float = 1.0, **size):
    """A figure with all that can go wrong in a page: clip paths, hatches, formulas, log axes, markers, a picture."""
    with matplotlib.rc_context(style.RC):
        return drawn_sample(height, **size)


def drawn_sample(height: float, **size):
    fig, axes = style.subplots(columns=2, **size)
    axes[0].plot([1, 2, 3], [1, height, 9], "o-", color=style.color("compute"), label="$n^2$ and < & >")
    axes[0].bar([1, 2], [3, 4], hatch="//", color=style.color("weights"), edgecolor="black")
    axes[0].legend()
    axes[0].set(xlabel="tokens", ylabel="time (ms)", title=r"$\frac{a}{b}$ of $2^{10}$")
    axes[1].scatter([1, 20, 3000], [1e-6, 1, 1e6], color=style.request_color(1), rasterized=True)
    axes[1].set(xscale="log", yscale="log")
    return fig


# Colours


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.2."""
    values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast of WCAG 2.2, from 1 to 21."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_colour_can_be_read_on_its_page(theme):
    """Labels wear the colour of their line, so every concept needs the contrast of text. B7."""
    page = list(style.PAGES.values())[theme]
    assert contrast("#000000", "#ffffff") == 21
    for name, *values in style.TOKENS.values():
        floor = {"line": 3, "grid": 1, "paper": 1}.get(name, 4.5)
        assert contrast(values[theme], page) >= floor, (name, values[theme])


def test_concepts_that_meet_in_a_figure_differ_for_the_colour_blind():
    """OKLab distance under simulated protanopia and deuteranopia (Machado et al., 2009, severity 1)."""
    identity = np.eye(3)
    protan = np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    )
    deutan = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]])
    to_lms = np.array([[0.41222, 0.53633, 0.05145], [0.2119, 0.6807, 0.1074], [0.0883, 0.28172, 0.62998]])
    to_lab = np.array([[0.21045, 0.79362, -0.00407], [1.978, -2.42859, 0.45059], [0.0259, 0.78277, -0.80868]])

    def lab_of(color, vision):
        values = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
        return to_lab @ np.cbrt(to_lms @ np.clip(vision @ linear, 0, 1))

    groups = [("weights", "kv_cache", "activations"), ("compute", "bandwidth", "overhead"), ("prefill", "decode")]
    for vision, theme in product((identity, protan, deutan), (0, 1)):
        for group in groups:
            for a, b in combinations(group, 2):
                pair = (style.PALETTE[a][theme], style.PALETTE[b][theme])
                assert np.linalg.norm(lab_of(pair[0], vision) - lab_of(pair[1], vision)) > 0.09, (a, b, theme)


def test_a_concept_without_a_colour_is_refused():
    with pytest.raises(ValueError, match="latency.*weights"):
        style.color("latency")


# Figures


@pytest.mark.parametrize("alt", ["", None, "a line", "Figure: time against length, growing", "plot of time per token"])
def test_a_figure_without_a_useful_alt_text_is_refused(alt, shown):
    with pytest.raises(ValueError, match="alt text"):
        style.show(sample(), alt=alt)
    with pytest.raises(ValueError, match="alt text"), style.figure(alt=alt):
        pytest.fail("drew a figure that cannot be shown")
    assert not shown


def test_a_figure_is_one_accessible_element(shown):
    with style.figure(alt=ALT + ' "fast" & <slow>', caption="Slow < fast", columns=2) as (fig, axes):
        axes[0].plot([1, 2], [3, 4])
    (picture,) = shown
    page = Strict(picture.html)
    images = [attributes for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert [image["aria-label"] for image in images] == [ALT + ' "fast" & <slow>']
    assert "<figcaption" in picture.html and "Slow &lt; fast" in picture.html
    assert picture._repr_mimebundle_()["text/plain"].startswith("[Time per token")


def test_a_failing_cell_shows_no_figure(shown):
    with pytest.raises(KeyError), style.figure(alt=ALT) as (_, ax):
        ax.plot([1, 2], {}["missing"])
    assert not shown


def test_ids_are_unique_in_a_page_and_references_resolve():
    """Equal figures on one page must not clip each other."""
    pictures = [style.Picture(sample(), ALT), style.Picture(sample(), ALT), style.Picture(sample(2), ALT + " twice")]
    text = "".join(p.html for p in pictures)
    page = Strict(text)
    assert len(page.ids) > 6 and len(set(page.ids)) == len(page.ids)
    assert set(svg.REFERENCE.findall(text)) == set(page.ids)


def test_the_svg_follows_the_theme_and_the_font_of_the_page():
    """No colour is fixed, no font is named, text is text. B7."""
    text = style.Picture(sample(), ALT).svg
    ElementTree.fromstring(text)
    assert not re.findall(r"(?<!,)#[0-9a-f]{6}\b", text), "a colour outside a CSS variable"
    assert "currentColor" in text and "var(--mini-compute,#9f0506)" in text
    words = re.sub(r"<[^>]*>", "", text).replace("\u00a0", " ")
    assert "n2 and &lt; &amp; &gt;" in words, "a formula keeps its words apart"
    assert "DejaVu" not in text and ">time (ms)</text>" in text and "n^2" not in text
    for name in re.findall(r"var\((--[\w-]+)", text):
        assert style.CSS.count(f"{name}:") == 3, f"{name} needs a light, a dark and a printed value"


def test_the_svg_is_deterministic_and_small():
    one, two = (svg.to_svg(sample(), prefix="p-", colors=style.VARIABLES) for _ in range(2))
    assert one == two
    assert not re.search(r'\bd="[^"]*\d\.\d{3}', one)
    assert len(svg.to_svg(style.subplots()[0], prefix="p-", colors=style.VARIABLES)) < 9000


def test_a_heavy_figure_is_refused_with_the_remedy():
    """B6."""
    fig, ax = style.subplots()
    points = torch.rand(9000, 2, generator=torch.Generator().manual_seed(3))
    ax.scatter(points[:, 0], points[:, 1])
    with pytest.raises(ValueError, match="rasterized"):
        style.Picture(fig, ALT)


def test_flat_groups_keep_what_has_an_attribute():
    assert svg.flatten_groups('<g><g a="1"><g><p/></g></g><g/></g>'.replace("<g/>", "")) == '<g a="1"><p/></g>'


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(1, 1000, ["1", "10", "100", "1,000"]), (1e-9, 1e-6, ["10⁻⁹", "10⁻⁸", "10⁻⁷", "10⁻⁶"]), (1, 9, ["1", "2", "5"])],
)
def test_log_axes_are_labelled_in_plain_text(low, high, labels):
    fig, ax = style.subplots()
    ax.plot([low, high], [1, 2])
    ax.set_xscale("log")
    text = style.Picture(fig, ALT).svg
    assert all(f">{label}</text>" in text for label in labels)


# Timing


def test_compare_takes_turns(monkeypatch):
    """A B A B, warm-up left out, with a clock that only the functions move."""
    now, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def work(name, durations):
        def run():
            calls.append(name)
            now[0] += durations[calls.count(name) - 1]

        return run

    slow, fast = [50, 4, 6, 8], [70, 2, 2, 8]
    result = timing.compare({"slow": work("slow", slow), "fast": work("fast", fast)}, repeats=3, warmup=1)
    assert calls == ["slow", "fast"] * 4
    assert result["slow"].seconds == (4, 6, 8) and result["fast"].seconds == (2, 2, 8)
    ratio = result.speedup("fast")
    assert ratio.median == 2 and (ratio.low, ratio.high) == (1.5, 2.5)
    assert result.speedup("slow").median == 1
    assert "2.00× (1.50 to 2.50)" in str(result)
    Strict(result._repr_mimebundle_()["text/html"])
    with pytest.raises(ValueError, match="'quick'.*slow, fast"):
        result.speedup("quick")


def test_measure_gives_the_median_and_the_quartiles(monkeypatch):
    now, durations = [0.0], iter([99, 5, 1, 2, 4, 3])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def work():
        now[0] += next(durations)

    result = timing.measure(work, repeats=5, warmup=1, label="step")
    assert result.seconds == (5, 1, 2, 4, 3)
    assert (result.low, result.median, result.high) == (2, 3, 4)
    assert str(result) == "step: 3.00 s (middle half of 5 runs: 2.00 s to 4.00 s)"


def test_on_a_gpu_the_gpu_keeps_the_time(monkeypatch):
    """CUDA events report milliseconds, and are read only after the work is done."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            log.append("read")
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("idle"))
    assert timing.time_once(lambda: log.append("work"), "cuda") == 0.25
    assert log == ["idle", "record", "work", "record", "wait", "read"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.2345e-3, "1.23 ms"),
        (45.67e-6, "45.7 µs"),
        (0.9996e-3, "1.00 ms"),
        (0.1234, "123 ms"),
        (3e-9, "3.00 ns"),
        (99.97, "100 s"),
        (1234.5, "1,234 s"),
        (math.nan, "nan s"),
    ],
)
def test_seconds_read_well(seconds, text):
    assert timing.format_seconds(seconds) == text


def test_timing_refuses_counts_that_measure_nothing():
    with pytest.raises(ValueError, match="repeats"):
        timing.measure(int, repeats=0)
    with pytest.raises(ValueError, match="warmup"):
        timing.measure(int, warmup=-1)
    with pytest.raises(ValueError, match="two functions"):
        timing.compare({"alone": int})


# Source


def test_source_is_the_file_itself():
    whole = source.Source(minillm.naive)
    assert whole.path == "minillm/naive.py" and whole.line == 1
    assert whole.code == Path(minillm.naive.__file__).read_text(encoding="utf-8")
    part = source.Source(minillm.naive.NoCache)
    assert part.code.startswith("class NoCache:") and whole.code.splitlines()[part.line - 1] == "class NoCache:"
    assert str(Path.cwd()) not in part.html
    shown = re.sub(r"<[^>]*>", "", part.html.split("<pre>")[1].split("</pre>")[0])
    assert len(shown.split()) == len(part.code.split())
    Strict(part.html)


@torch.no_grad()
def decorated(x):
    return x


def test_source_sees_through_decorators_and_properties():
    assert "def decorated(x)" in source.Source(decorated).code
    prop = source.Source(ModelConfig.q_dim)
    assert prop.code.startswith("@property") and prop.path == "minillm/config.py"
    method = source.Source(ModelConfig.num_parameters)
    assert method.code.startswith("def num_parameters") and "\n    attention = " in method.code


def test_shown_docstrings_fit_the_page_and_the_code_stays():
    for file in sorted(Path(minillm.__file__).parent.glob("*.py")):
        code = file.read_text(encoding="utf-8")
        shown = source.refill(code)
        assert shown.split() == code.split(), file.name
        docstrings = re.findall(r'"""(.*?)"""', shown, flags=re.DOTALL)
        plain = [text for text in docstrings if not re.search(r"\n(- |    \[)", text)]  # no list and no layout in it
        assert max(len(line) for text in plain for line in text.splitlines()) <= source.COLUMNS, file.name
        bodies = [re.sub(r'""".*?"""', "", text, flags=re.DOTALL) for text in (code, shown)]
        assert bodies[0] == bodies[1], file.name
    part = "key=lambda node: -node.line)"
    assert source.refill(part) == part


@pytest.mark.parametrize("thing", [len, 3, torch.Tensor.add])
def test_source_refuses_what_has_none(thing):
    with pytest.raises(ValueError, match="no source"):
        source.Source(thing)


# Tables


def test_predicted_beside_measured_beside_recorded_beside_the_paper(tmp_path, monkeypatch):
    record = {
        "device": "H200",
        "date": "2026-01-02",
        "command": "run",
        "values": {"step": {"value": 2.5, "unit": "ms"}},
    }
    record["values"]["step"] |= {"low": 2.4, "high": 2.75}
    (tmp_path / "h200.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "measurements_folder", lambda: tmp_path)
    result = tables.predicted_vs_measured(
        [
            tables.Row("step <b>", 20.0, timing.Timing((0.02, 0.03, 0.05)), "ms", "step", 29, "Pope 2022, 64 TPU v4"),
            ("weights", 0.5, 0.25, "GB", "weights"),
            ("tokens", 7, None),
        ],
        caption="One step",
    )
    text = str(result).splitlines()
    assert "recorded: H200 (2026-01-02)" in text[0] and text[0].rstrip().endswith("paper")
    assert "30.0\u00a0ms (25.0 to 40.0)" in text[2] and "1.50×" in text[2] and "2.50\u00a0ms (2.40 to 2.75)" in text[2]
    assert "29\u00a0ms (Pope 2022, 64 TPU v4)" in text[2]
    assert "0.500×" in text[3] and tables.NOT_RECORDED in text[3]
    assert tables.NOT_MEASURED in text[4] and tables.NOT_RECORDED not in text[4]
    page = Strict(result.html)
    scopes = [attributes.get("scope") for tag, attributes in page.tags if tag == "th"]
    assert scopes == ["col"] * 6 + ["row"] * 3 and "step &lt;b&gt;" in result.html


def test_without_records_the_table_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "measurements_folder", lambda: None)
    result = tables.predicted_vs_measured([("step", 2.0, 3.0, "ms", "step")])
    assert "recorded elsewhere" in str(result) and "not recorded yet" in str(result)
    assert "recorded" not in str(tables.predicted_vs_measured([("step", 2.0, 3.0, "ms")]))
    assert tables.recorded("step") == []


def test_tables_refuse_what_would_mislead(tmp_path):
    with pytest.raises(ValueError, match="citation"):
        tables.Row("step", 1.0, 2.0, "ms", paper=3.0)
    with pytest.raises(ValueError, match="unit of time"):
        tables.Row("step", 1.0, timing.Timing((1.0,)), "GB")
    with pytest.raises(ValueError, match="2 cells under 3"):
        tables.table([(1, 2)], ["a", "b", "c"])
    (tmp_path / "bad.json").write_text('{"device": "x"}')
    with pytest.raises(ValueError, match=r"bad\.json lacks date"):
        tables.recorded("x", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("5", "bad.json lacks device"),
        ('{"device": "x", "date": "y", "command": "z", "values": null}', 'bad.json: "values" must hold'),
        ('{"device": "x", "date": "y", "command": "z", "values": {"k": 5}}', 'bad.json: "values" must hold'),
        ('{"device": "x", "date": "y", "command": "z", "values": {"k": {}}}', 'bad.json: "values" must hold'),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path, content, message):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        tables.recorded("k", tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2048, "2,048"),
        (0.0, "0"),
        (999.96, "1,000"),
        (0.01234, "0.0123"),
        (9.996, "10.0"),
        (1e-7, "1.00e-07"),
    ],
)
def test_numbers_read_well(value, text):
    assert tables.format_number(value) == text


# Set-up


def test_setup_says_in_one_line_where_it_runs(capsys, monkeypatch):
    monkeypatch.setattr(style, "use", lambda: None)
    monkeypatch.setattr(lab, "smollm2_installed", lambda: False)
    here = lab.setup()
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and f"torch {torch.__version__}" in line and here.model_name in line
    if here.device == "cpu":
        assert here.dtype == torch.float32 and "threads" in line
        assert here.model_name == "smollm2" and "random weights" in line and here.random_weights
        monkeypatch.setattr(lab.ModelConfig, "preset", lambda name: ModelConfig(99, 8, 1, 2, 1, 4, 12, 32))
        assert here.load().config.dim == 8
    assert lab.setup("tiny").model_name == "tiny"


def test_the_engine_never_imports_the_lab():
    code = "import sys, minillm.model, minillm.naive, minillm.config; print('minillm.lab' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


# Explorers


@pytest.fixture
def building(monkeypatch):
    """As while the book is built."""
    monkeypatch.setenv(explore.BUILDING, "1")


def make():
    return lab.explore(draw, batch=lab.slider([1, 2, 5], unit="requests", default=2), device=["GPU <1>", "CPU"])


def test_explorer_holds_every_frame_in_the_order_of_its_controls(building):
    """Each frame, put together from the shared pieces, is the figure that the function draws. B5, B6."""
    explorer = make()
    page = explorer.html
    parsed = Strict(page)
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    frames = ["".join(data["parts"][i] for i in row) for row in data["frames"]]
    assert len(frames) == len(set(frames)) == explorer.count == 6
    for frame, at in zip(frames, product(range(3), range(2)), strict=True):
        assert frame == explorer.picture(at).svg
        label = ElementTree.fromstring(frame).get("aria-label")
        assert label == draw(*(c.values[i] for c, i in zip(explorer.controls.values(), at, strict=True)))[1]
    assert frames[data["first"]] == explorer.first.svg and data["first"] == 2
    kinds = [tag for tag, attributes in parsed.tags if tag in ("input", "select")]
    assert kinds == ["input", "select"] and "<noscript>" in page
    assert len(page) < len("".join(frames)) + 12_000
    assert not re.search(r"https?://|src=|url\((?!#)", page), "a page needs nothing from elsewhere"


def test_explorer_is_deterministic(building, monkeypatch):
    pages = []
    for _ in range(2):
        monkeypatch.setattr(style.Picture, "count", iter(range(9)))
        pages.append(make().html)
    assert pages[0] == pages[1]


def test_explorer_draws_one_frame_where_no_book_is_built(monkeypatch):
    monkeypatch.delenv(explore.BUILDING, raising=False)
    calls = []
    explorer = lab.explore(lambda n: calls.append(n) or draw(n, "CPU"), n=[1, 2, 3])
    bundle = explorer._repr_mimebundle_()
    assert calls == [1] and "application/vnd.jupyter.widget-view+json" in bundle
    assert "<input" not in bundle["text/html"] and "<svg" in bundle["text/html"]


def test_widget_redraws_and_reports_an_error():
    def fragile(n):
        if n == 3:
            raise RuntimeError("three <is> too many")
        return draw(n, "CPU")

    box = lab.explore(fragile, n=lab.slider([1, 2, 3], label="batch size"), caption="A caption").widget()
    (slider,), picture = box.children[0].children, box.children[1]
    before = picture.value
    slider.value = 1
    assert "rises to 2 milliseconds" in picture.value and picture.value != before
    slider.value = 2
    assert "RuntimeError: three &lt;is&gt; too many" in picture.value
    assert slider.description == "batch size"


def test_explorer_refuses_what_it_cannot_show(building):
    with pytest.raises(ValueError, match="201 frames"):
        lab.explore(draw, batch=range(201))
    with pytest.raises(ValueError, match=r"frame \{'batch': 1\}: alt text"):
        lab.explore(lambda batch: (style.subplots()[0], "short"), batch=[1, 2])
    later = lab.explore(lambda batch: (style.subplots()[0], ALT if batch == 1 else "Plot"), batch=[1, 2])
    with pytest.raises(ValueError, match=r"frame \{'batch': 2\}: alt text"):
        _ = later.html
    with pytest.raises(ValueError, match="must return"):
        lab.explore(lambda batch: None, batch=[1, 2])
    with pytest.raises(ValueError, match="at least two"):
        lab.slider([1])
    with pytest.raises(ValueError, match="default 3"):
        lab.slider([1, 2], default=3)
    with pytest.raises(ValueError, match="read the same"):
        lab.slider([1.0001, 1.0002])
    with pytest.raises(ValueError, match="control"):
        lab.explore(draw)
    with pytest.raises(ValueError, match="a function that draws a figure, got 7"):
        lab.explore(7, batch=[1, 2])


@pytest.mark.parametrize("given", [None, 5, "ab", {1, 2}, (n for n in range(3))], ids=repr)
def test_what_cannot_be_a_control_is_named(given):
    """A set has no order, and a generator can be gone through only once."""
    for make_control in (lab.slider, lab.choice, lambda values: lab.explore(draw, batch=values)):
        with pytest.raises(ValueError, match=re.escape(f"got {given!r}")):
            make_control(given)


def test_a_control_may_be_an_array_or_a_range():
    assert lab.slider(np.array([1, 2, 4])).values == (1, 2, 4) and lab.choice(range(2)).labels == ("0", "1")
    assert explore.as_control("n", {"few": 1, "many": 9}).kind == "slider"
    assert explore.as_control("n", [True, False]).kind == "choice"


@pytest.mark.parametrize("given", [None, 5, "rows", {"a": 1}])
def test_what_cannot_be_rows_is_named(given):
    for call in (
        lambda: lab.table(given, ["a"]),
        lambda: lab.table([given], ["a"]),
        lambda: lab.table([["x"]], given),
        lambda: lab.predicted_vs_measured(given),
        lambda: lab.predicted_vs_measured([given]),
    ):
        with pytest.raises(ValueError, match=re.escape(f"got {given!r}")):
            call()
    with pytest.raises(ValueError, match=r"a number or a text, got \[1\]"):
        lab.table([[[1]]], ["a"])
    with pytest.raises(ValueError, match=r"3 to 7 fields.* got \('x', 1\)"):
        lab.predicted_vs_measured([("x", 1)])


def test_rows_may_come_from_a_generator():
    made = lab.table(((n, n * n) for n in range(3)), ["n", "n²"])
    assert [[text for text, _ in row] for row in made.rows] == [["0", "0"], ["1", "1"], ["2", "4"]]


def test_explorer_refuses_a_heavy_page(building, monkeypatch):
    monkeypatch.setattr(explore, "LARGEST_HTML", 12_000)
    with pytest.raises(ValueError, match=r"6 frames take \d\d,\d\d\d bytes"):
        _ = make().html


@given(st.lists(st.lists(st.sampled_from(["<a>", "</b>", "text<c/>", '<d x="1"/>', "<e>"]), min_size=1), min_size=1))
def test_shared_pieces_give_back_every_frame(frames):
    frames = ["".join(frame) for frame in frames]
    parts, rows = explore.share(frames)
    assert ["".join(parts[i] for i in row) for row in rows] == frames
    assert len(set(parts)) == len(parts)


def page_of(body: str, theme: str) -> str:
    return (
        f'<!doctype html><html lang="en" data-theme="{theme}"><meta charset="utf-8"><title>x</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>body{{margin:16px;background:{style.PAGES[theme]};"
        f"color:{'#222832' if theme == 'light' else '#ced6dd'}}}</style><body>{body}</body></html>"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_explorer_moves_by_keyboard_from_a_file_without_network(theme, browser, building, tmp_path):
    """B5, B7, B8: Tab reaches the controls, the arrow keys change picture and label, in both themes, on a phone."""
    file = tmp_path / "page.html"
    wide = style.Picture(sample(width=8), ALT).html + lab.table([["x" * 60] * 3], ["a", "b", "c"]).html
    file.write_text(page_of(make().html + make().html + wide, theme), encoding="utf-8")
    context = browser.new_context(viewport={"width": 390, "height": 700}, offline=True)
    context.set_default_timeout(120_000)  # a busy machine is no failure
    page, trouble = context.new_page(), []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: trouble.append(request.url) if request.url != file.as_uri() else None)
    page.goto(file.as_uri())
    label = "document.querySelectorAll('.minillm-explorer svg')[{}].getAttribute('aria-label')"
    assert page.evaluate(label.format(0)) == "A line that rises to 2 milliseconds on GPU <1>"
    before = page.locator(".minillm-explorer svg").first.screenshot()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(label.format(0)) == "A line that rises to 5 milliseconds on GPU <1>"
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "5 requests"
    assert page.locator(".minillm-explorer svg").first.screenshot() != before
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(label.format(0)) == "A line that rises to 5 milliseconds on CPU"
    assert page.evaluate(label.format(1)) == "A line that rises to 2 milliseconds on GPU <1>", "one moves, not both"
    assert page.locator(".minillm-live").first.text_content() == "A line that rises to 5 milliseconds on CPU"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert ids and len(set(ids)) == len(ids)
    lowest = page.evaluate(
        """() => [...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill.match(/[\\d.]+/g))"""
    )
    for red, green, blue, *_ in lowest:
        color = "#" + "".join(f"{int(v):02x}" for v in (red, green, blue))
        assert contrast(color, style.PAGES[theme]) >= 4.5, color
    page.emulate_media(media="print")
    assert not page.locator(".minillm-controls").first.is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('svg text')).fill") == "rgb(0, 0, 0)"
    assert not trouble
    context.close()


def test_without_script_the_first_frame_stands(browser, building, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page_of(make().html, "light"), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False, offline=True)
    context.set_default_timeout(120_000)  # a busy machine is no failure
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator("svg").is_visible() and page.locator("noscript p").is_visible()
    assert not page.locator(".minillm-controls").is_visible()
    context.close()


# Exercise checks


def softmax(x, dim):
    """The reference of the tests below."""
    return torch.softmax(x, dim)


def softmax_cases(draw):
    yield draw.tensor(2, 3), 0
    for _ in range(5):
        yield draw.tensor(draw.randint(1, 5), draw.randint(2, 7), 3), draw.randrange(3)


def overwrites(x, dim):
    x.zero_()
    return softmax(x, dim)


WRONG = {
    "wrong dimension": (lambda x, dim: softmax(x, -1), r"off in \d+ of \d+ places"),
    "a row short": (lambda x, dim: softmax(x, dim)[1:], r"shape \[2, 3\], got \[1, 3\]"),
    "wrong dtype": (lambda x, dim: softmax(x, dim).double(), "dtype float32, got float64"),
    "NaN": (lambda x, dim: softmax(x, dim) / (x * 0), "has NaN in|places"),
    "a list": (lambda x, dim: softmax(x, dim).tolist(), r"should be a tensor, got \[\["),
    "one for all": (lambda x, dim: torch.full_like(x, 0.5), "places"),
    "its input's sum": (lambda x, dim: x, "places"),
    "overwrites its input": (overwrites, "places"),
    "raises": (lambda x, dim: x[99], r"raised IndexError: .*\n  at line \d+: "),
    "slightly off": (lambda x, dim: softmax(x, dim) * 1.001, "places"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_fails_with_its_input(kind):
    """B3."""
    answer, message = WRONG[kind]
    with pytest.raises(checks.CheckFailed, match=message) as caught:
        checks.check(softmax, answer, softmax_cases, name="softmax")
    text = str(caught.value)
    assert text.startswith("softmax: ") and "on the input x = a float32 tensor of shape [" in text and "dim = " in text
    assert caught.value._render_traceback_() == text.splitlines() and len(text) < 600


def test_a_right_answer_passes_with_one_line(capsys):
    checks.check(
        softmax, lambda x, dim: x.sub_(x.amax(dim, True)).exp() / x.exp().sum(dim, True), softmax_cases, name="mine"
    )
    assert capsys.readouterr().out == "✓ mine: right on 6 random inputs\n"


def test_inputs_are_fresh_each_time():
    seen = []
    for _ in range(2):
        checks.check(softmax, lambda x, dim: seen.append(x.sum().item()) or softmax(x, dim), softmax_cases)
    assert len(set(seen)) == 12


def unwritten(x, dim):
    raise NotImplementedError


@pytest.mark.parametrize("answer", [None, ..., lambda x, dim: None, lambda x, dim: ..., unwritten])
def test_an_unanswered_exercise_says_so(answer):
    with pytest.raises(checks.NotAnswered, match="not answered yet: task 3"):
        checks.check(softmax, answer, softmax_cases, name="task 3")


def test_a_check_without_cases_is_a_mistake():
    with pytest.raises(ValueError, match="at least one case"):
        checks.check(softmax, softmax, [])


@pytest.mark.parametrize(
    ("expected", "answer", "message"),
    [
        ([1, 2, 3], [1, 2], "should have 3 items, got 2"),
        ([1, 2, 3], [1, 5, 3], r"the result\[1\] should be 2, got 5"),
        ([1, 2], "12", "should be a list"),
        ({"a": 1.0}, {"b": 1.0}, r"keys \['a'\], got \['b'\]"),
        ({"a": [1.0]}, {"a": [math.nan]}, r"\['a'\]\[0\] is NaN"),
        (True, 1, "should be True, got 1"),
        (3, 3.001, "should be 3"),
        (2.0, "2.0", "should be a number, got '2.0'"),
        ("stop", "length", "should be 'stop'"),
        (None, 3, "should be None"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"most at \[1\]: should be 2, got 3"),
        (torch.tensor(2.0), torch.tensor(math.inf), r"most at \[\]: should be 2, got inf"),
    ],
)
def test_differences_are_named(expected, answer, message):
    assert re.search(message, checks.difference(expected, answer))


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ([1, 2], (1, 2)),
        (2.0, torch.tensor(2.0)),
        (3, 3.0),
        (0.0, 1e-9),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        ({}, {}),
    ],
)
def test_harmless_differences_pass(expected, answer):
    assert checks.difference(expected, answer) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (24.576, "too small by a factor of 1,000:"),
        (24.0, "too small by a factor of 1,024:"),
        (24_576 * 8, "too large by a factor of 8: bits or bytes"),
        (12_288, "too small by a factor of 2"),
        (24_576 * 1.024, "too large by a factor of 1.024"),
        (-24_576, "its sign is wrong"),
        (24_576 * 30, "too large by more than a factor of 10"),
        (24_576 * 1.3, "it is too large$"),
        (math.nan, "nan is not a finite number"),
        ("24576", "expected a number in bytes, got '24576'"),
        (True, "expected a number"),
        (0, "is not right$"),
    ],
)
def test_a_wrong_number_names_the_slip_but_not_the_answer(answer, message):
    with pytest.raises(checks.CheckFailed, match=message) as caught:
        checks.number(answer, 24_576, unit="bytes")
    assert "24576" in str(answer) or "24,576" not in str(caught.value).replace("-24,576", "")


def test_a_right_number_passes(capsys):
    checks.number(torch.tensor(24_600), 24_576, unit="bytes", name="KV per token")
    assert capsys.readouterr().out == "✓ KV per token: 24,600 bytes\n"
    with pytest.raises(checks.NotAnswered, match="not answered yet"):
        checks.number(..., 24_576)


@pytest.mark.parametrize("form", [Fraction, Decimal, np.array, np.float32, torch.tensor, np.atleast_1d])
def test_a_number_may_come_in_any_form(form, capsys):
    """Python 3.11 cannot format a fraction, and an array of one value is a number as well."""
    checks.number(form(20.97), 20.97)
    work_out("x", form(20.97), 20.97, {3.0: "three"})
    assert capsys.readouterr().out == "✓ your number: 20.97\n✓ x: 20.97\n"
    with pytest.raises(checks.CheckFailed, match=r"21\.5 is not right; it is too large"):
        checks.number(form(21.5), 20.97)
    with pytest.raises(checks.CheckFailed, match=r"x: 3 is not right; three"):
        work_out("x", form(3), 20.97, {3.0: "three"})
    assert checks.difference(0.5, form(0.5)) is None
    assert checks.difference(0.5, form(0.75)) == "the result should be 0.5, got 0.75"


@pytest.mark.parametrize("answer", [np.array([1.0, 2.0]), np.bool_(True), 1j, torch.tensor(True), Decimal("NaN")])
def test_what_is_no_number_is_still_refused(answer):
    with pytest.raises(checks.CheckFailed, match="expected a number|not a finite number"):
        checks.number(answer, 1.0)


def test_the_input_of_a_failure_is_long_enough_to_be_tried_again():
    long = list(range(100, 200))
    with pytest.raises(checks.CheckFailed) as failed:
        checks.check(lambda values: sum(values), lambda values: 0, [(long,)], name="total")
    assert str(long) in str(failed.value)
    assert len(checks.describe(long)) < 100 and len(checks.describe(long, most=300)) < 350


def test_a_conclusion_is_checked(capsys):
    options = {"memory": "then a larger batch would slow every step", "compute": "the arithmetic units idle"}
    checks.choice("memory", "memory", options)
    assert "✓" in capsys.readouterr().out
    with pytest.raises(checks.CheckFailed, match="arithmetic units idle"):
        checks.choice("compute", "memory", options)
    with pytest.raises(checks.CheckFailed, match="'disk' is not one of 'memory', 'compute'"):
        checks.choice("disk", "memory", options)
    with pytest.raises(checks.NotAnswered):
        checks.choice(None, "memory", options)

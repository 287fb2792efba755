"""The book in a real browser: the built pages from disk without a network, and a chapter in JupyterLab.

Each check is a function that returns the faults it finds, as text. The first tests show every check a page
with the fault it is for; then the checks meet the built pages (`make html` first; else that part is skipped).
The browser is an installed Chromium, driven by Playwright (`browser` in conftest.py).
"""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import draw

from minillm import lab
from minillm.lab import notebooks, source, style

HTML = notebooks.ROOT / "_build" / "html"
PAGES = sorted(HTML.glob("book/*.html")) if notebooks.is_current() else []
CHAPTER = notebooks.ROOT / "book" / "02_memory_bound.ipynb"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
THEMES = ("light", "dark")
PATIENCE = 120_000  # milliseconds; a busy machine is no failure


@contextmanager
def opened(browser, page: Path, theme: str, **options):
    """A tab that shows the file `page` offline, and the list of what went wrong while loading and since."""
    context = browser.new_context(viewport=PHONE, offline=True, color_scheme=theme, **options)
    context.set_default_timeout(PATIENCE)
    context.add_init_script(f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')")
    tab = context.new_page()
    trouble = watch(tab, ("file:", "data:"))
    try:
        tab.goto(page.as_uri(), wait_until="load")
        if options.get("java_script_enabled", True) and tab.locator("span.math, div.math").count():
            tab.wait_for_function("document.querySelectorAll('.math mjx-container').length > 0")
        yield tab, trouble
    finally:
        context.close()


def watch(tab, allowed: tuple[str, ...]) -> list[str]:
    """A list that fills with the tab's errors, failed requests, and requests that do not start as `allowed`."""
    trouble: list[str] = []
    tab.on("console", lambda m: trouble.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: trouble.append(f"page error: {error}"))
    tab.on("requestfailed", lambda request: trouble.append(f"failed: {request.url}"))
    tab.on("request", lambda r: None if r.url.startswith(allowed) else trouble.append(f"elsewhere: {r.url}"))
    return trouble


# The checks


# Contrast of WCAG 2.2 of all text on the page, 4.5 and 3 for large text. Behind the text of a figure lies what
# the browser paints there, a bar or the page; behind other text lie the backgrounds of the elements around it.
CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true}), known = {};
  const rgba = text => known[text] ??= (() => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = '#0000'; canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  })();
  const over = ([r, g, b, a], under) => [r, g, b].map((v, i) => v * a + under[i] * (1 - a)).concat(1);
  const pile = layers => layers.reduceRight((under, layer) => over(layer, under), [255, 255, 255, 1]);
  const fade = ([r, g, b, a], by) => [r, g, b, a * by];
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const chain = element => element ? [element, ...chain(element.parentElement)] : [];
  const opacity = element => chain(element).reduce((all, e) => all * getComputedStyle(e).opacity, 1);
  const fill = (element, css) => fade(rgba(css.fill), css.fillOpacity * opacity(element));

  const layer = element => {
    const css = getComputedStyle(element);
    if (element instanceof SVGGeometryElement) return fill(element, css);
    const boxed = element instanceof HTMLElement || element instanceof SVGSVGElement;
    return boxed ? rgba(css.backgroundColor) : [0, 0, 0, 0];
  };
  const painted = (element, x, y) => {
    const stack = document.elementsFromPoint(x, y), at = stack.findIndex(e => element.contains(e) || e === element);
    return stack.length ? pile(stack.slice(at + 1).filter(e => !e.closest('text')).map(layer)) : null;
  };
  const around = element => pile(chain(element).map(e => rgba(getComputedStyle(e).backgroundColor)));
  const unseen = element => !element.checkVisibility({opacityProperty: true, visibilityProperty: true}) ||
    chain(element).some(e => { const box = e.getBoundingClientRect(); return box.width <= 1 && box.height <= 1; });

  document.querySelectorAll('details').forEach(element => element.open = true);
  const faults = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const judge = (element, text, ink, paper, least) => {
    const found = paper ? ratio(over(ink, paper), paper) : 0;
    if (found < least) faults.push(`${found.toFixed(2)} for "${text.slice(0, 30)}" in ` +
      `<${element.tagName.toLowerCase()} class="${element.getAttribute('class') ?? ''}">, ${ink} on ${paper}`);
  };
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
    if (!text || element.closest('script, style, noscript, title, :disabled') || unseen(element)) continue;
    const css = getComputedStyle(element), size = parseFloat(css.fontSize);
    if (element.closest('svg')) {
      element.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
      const box = element.getBoundingClientRect(), upright = box.height > box.width && text.length > 1;
      for (const part of [0.1, 0.5, 0.9]) {
        const x = box.x + box.width * (upright ? 0.5 : part), y = box.y + box.height * (upright ? part : 0.5);
        judge(element, text, fill(element, css), painted(element, x, y), 4.5);
      }
    } else {
      const large = size >= 24 || (size >= 18.66 && css.fontWeight >= 700);
      judge(element, text, fade(rgba(css.color), opacity(element)), around(element), large ? 3 : 4.5);
    }
  }
  return [...new Set(faults)];
}"""

# Pictures without a name for who cannot see them; a name that is a file's is none. An icon in a control that has
# words of its own needs no more.
SILENT = """() => [...document.querySelectorAll('img, svg, canvas, [role=img]')].filter(element => {
  if (element.closest('[aria-hidden=true]') || element.parentElement.closest('svg, [role=img]')) return false;
  const name = element.getAttribute('aria-label') ?? element.getAttribute('alt') ??
    element.querySelector(':scope > title')?.textContent;
  const control = element.closest('a, button, summary');
  const decoration = element.getAttribute('alt') === '' && element.tagName === 'IMG' ||
    control && (control.textContent.trim() || control.getAttribute('aria-label') || control.title);
  return !decoration && (!name?.trim() || /\\.(svg|png|jpe?g|webp)$/.test(name));
}).map(element => element.outerHTML.slice(0, 120))"""

# What stands out of the screen and cannot be scrolled to within a box of its own.
SIDEWAYS = """() => {
  const width = document.documentElement.clientWidth, faults = [];
  if (document.documentElement.scrollWidth > width)
    faults.push(`the page is ${document.documentElement.scrollWidth} px wide on a screen of ${width} px`);
  const scrolls = e => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) ? true : scrolls(e.parentElement));
  for (const element of (document.querySelector('.bd-article') ?? document.body).querySelectorAll('*')) {
    const box = element.getBoundingClientRect();
    const hidden = box.width <= 1 || !element.checkVisibility() || element.closest('mjx-assistive-mml');
    if (!hidden && box.right > width + 1 && !scrolls(element.parentElement))
      faults.push(`cut off at the right: ${element.outerHTML.slice(0, 120)}`);
  }
  return faults;
}"""

# Elements of the article that paint a bright area: the page is dark, so none should.
WHITE_BOXES = """() => [...document.querySelectorAll('.bd-article *')].filter(element => {
  const box = element.getBoundingClientRect(), [r, g, b, a = 1] =
    (getComputedStyle(element).backgroundColor.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  return box.width > 40 && box.height > 14 && a > 0.5 && Math.min(r, g, b) > 180;
}).map(element => element.outerHTML.slice(0, 120))"""

EXPLORER = ".minillm-explorer"
CONTROLS = f"{EXPLORER} :is(input, select)"
FOCUS = "element => { element.tabIndex = -1; element.focus(); element.removeAttribute('tabindex'); }"
CONTROL = """(figure, index) => {
  const control = figure.querySelectorAll('input, select')[index], range = control.type === 'range';
  return {
    focused: control === document.activeElement, name: control.labels[0]?.textContent.trim(),
    last: range ? Number(control.max) : control.length - 1, value: Number(control.value),
  };
}"""
FRAME = """figure => {
  const svg = figure.querySelector('.minillm-scroll > svg'), values = [...figure.querySelectorAll('input, select')];
  return {label: svg.getAttribute('aria-label'), picture: svg.innerHTML, values: values.map(control => control.value),
    texts: values.map(control => control.getAttribute('aria-valuetext') ?? control.value)};
}"""


def explorer_faults(tab) -> list[str]:
    """Tab to each control of each explorer, and take it with the arrow keys through all its values and back.

    Each move must change the picture, its label and the control's spoken value; at the same values the frame
    must be the same again, so that the way back ends at the first picture.
    """
    faults: list[str] = []
    for figure in tab.locator(EXPLORER).all():
        figure.evaluate(FOCUS)
        known = [figure.evaluate(FRAME)]
        for index in range(figure.locator("input, select").count()):
            tab.keyboard.press("Tab")
            control = figure.evaluate(CONTROL, index)
            if not control["focused"]:
                faults.append(f"{control['name']}: not reached with Tab")
                break
            to_end, to_start = control["last"] - control["value"], control["last"]
            keys = ["ArrowRight"] * to_end + ["ArrowLeft"] * to_start + ["ArrowRight"] * control["value"]
            for before, now in moves(tab, figure, keys, known[0]):
                for part in ("label", "picture", "texts", "values"):
                    if now[part] == before[part]:
                        faults.append(f"{control['name']}: {part} stayed the same at {now['values']}")
                same = next((frame for frame in known if frame["values"] == now["values"]), None)
                if same is None:
                    known.append(now)
                elif same != now:
                    faults.append(f"{control['name']}: another frame on coming back to {now['values']}")
            if figure.evaluate(FRAME) != known[0]:
                faults.append(f"{control['name']}: the way back does not end at the first picture")
    return list(dict.fromkeys(faults))


def moves(tab, figure, keys, before):
    """Press the keys; yield the frames before and after each."""
    for key in keys:
        tab.keyboard.press(key)
        now = figure.evaluate(FRAME)
        yield before, now
        before = now


FOLDED = "details > summary"
BODY_SHOWS = """summary => [...summary.parentElement.children].some(
  e => e !== summary && e.checkVisibility() && e.getBoundingClientRect().height > 0)"""


def folded_faults(tab) -> list[str]:
    """Tab to each folded answer, open it with Enter, close it with Space."""
    faults = []
    for summary in tab.locator(FOLDED).filter(visible=True).all():
        text = summary.text_content().strip()[:40]
        summary.locator("..").evaluate(FOCUS)
        tab.keyboard.press("Tab")
        if not summary.evaluate("summary => summary === document.activeElement"):
            faults.append(f"{text}: not reached with Tab")
            continue
        shows = [summary.evaluate(BODY_SHOWS)]
        for key in ("Enter", "Space"):
            tab.keyboard.press(key)
            shows.append(summary.evaluate(BODY_SHOWS))
        if shows != [False, True, False]:
            faults.append(f"{text}: shown {shows} at first, after Enter, after Space")
    return faults


# Each check can fail


@pytest.fixture(scope="module")
def good():
    """What a chapter is made of, as the lab writes it into a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(notebooks.BUILDING, "1")
        explorer = lab.explore(draw, batch=lab.slider([1, 2, 5], default=2), device=["GPU", "CPU"]).html
    wide = style.Picture(style.subplots(8, 2)[0], "An empty pair of axes, wider than a phone").html
    table = lab.table([["x" * 60] * 3], ["a", "b", "c"]).html
    return explorer + wide + table + source.Source(draw).html + FOLD


FOLD = "<details class='sd-dropdown'><summary>How much?</summary><p>Twice as much.</p></details>"
SLIDER = (
    "<figure class='minillm-explorer'><label>batch<input type='range' min='0' max='2' value='1' {attributes}></label>"
    "<div class='minillm-scroll'><svg role='img' aria-label='at 1'><text y='20'>1</text></svg></div></figure>"
    "<script>const slider = document.querySelector('input'), svg = document.querySelector('svg');"
    "let count = 0; slider.oninput = () => {{"
    "count += 1; slider.setAttribute('aria-valuetext', slider.value); {move} }}</script>"
)
LABEL, PICTURE = "svg.setAttribute('aria-label', 'at ' + slider.value);", "svg.firstChild.textContent = slider.value;"
MOVES = LABEL + PICTURE


def slider(attributes="aria-valuetext='1'", move=MOVES) -> str:
    return SLIDER.format(attributes=attributes, move=move)


def written(folder: Path, body: str, theme: str = "light") -> Path:
    """A page with this body, in the book's colours."""
    ink = {"light": "#222832", "dark": "#ced6dd"}[theme]
    look = f"body{{margin:16px;background:{style.PAGES[theme]};color:{ink}}}"
    file = folder / "page.html"
    file.write_text(
        f'<!doctype html><html lang="en" data-theme="{theme}"><meta charset="utf-8"><title>x</title><link rel="icon" '
        f'href="data:,"><meta name="viewport" content="width=device-width"><style>{look}</style>'
        f"<body><article class='bd-article'>{body}</article></body></html>",
        encoding="utf-8",
    )
    return file


@pytest.mark.parametrize("theme", THEMES)
def test_the_checks_pass_a_page_of_the_lab(browser, good, theme, tmp_path):
    with opened(browser, written(tmp_path, good, theme), theme) as (tab, trouble):
        for check in (SIDEWAYS, CONTRAST, SILENT, *([WHITE_BOXES] if theme == "dark" else [])):
            assert not tab.evaluate(check)
        assert not tab.evaluate("document.querySelectorAll('details').forEach(element => element.open = false)")
        assert not explorer_faults(tab) and not folded_faults(tab) and not trouble


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<script>console.error('oh')</script>", "console: oh"),
        ("<script>undefinedName()</script>", "page error: .*undefinedName"),
        ("<script src='missing.js'></script>", "failed: file:.*missing.js"),
        ("<img alt='A picture' src='https://example.org/a.png'>", "elsewhere: https://example.org/a.png"),
        ("<script>fetch('http://127.0.0.1:9/').catch(() => 0)</script>", "elsewhere: http://127.0.0.1:9/"),
    ],
)
def test_trouble_is_noticed(browser, body, message, tmp_path):
    with opened(browser, written(tmp_path, body), "light") as (_, trouble):
        assert re.search(message, "\n".join(trouble))


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        ("<p style='color:#767676'>4.54 to 1</p><p style='color:#777'>4.48 to 1</p>", ["4.48"]),
        ("<h1 style='color:#777;font-size:24px'>large</h1>", []),
        ("<pre style='background:#222'><span style='color:#555'>x = 1</span></pre>", ["2.13"]),
        ("<p style='opacity:.5;color:#000'>faded</p>", ["3.98"]),
        ("<details><summary>more</summary><p style='color:#eee'>folded</p></details>", ["1.16"]),
        ("<svg width='90' height='30'><text x='9' y='20' fill='#777'>axis</text></svg>", ["4.48"]),
        ("<svg width='90' height='30'><text x='9' y='20'>axis</text></svg>", []),
        (
            "<svg width='90' height='30'><path d='M0 0H90V30H0Z' fill='#111'/>"
            "<text x='9' y='20' fill='currentColor'>bar</text></svg>",
            ["1.2"],
        ),
        (
            "<svg width='30' height='90'><path d='M0 0H30V90H0Z' fill='#111' fill-opacity='.1'/>"
            "<text x='-60' y='20' fill='#767676' transform='rotate(-90)'>upright</text></svg>",
            ["3."],
        ),
        ("<div style='height:3000px'></div><svg><text y='20' fill='#eee'>below</text></svg>", ["1.16"]),
        ("<span style='position:absolute;width:1px;height:1px;overflow:hidden;color:#eee'>for readers</span>", []),
    ],
)
def test_faint_text_is_noticed(browser, body, faults, tmp_path):
    """Ratios from the definition in WCAG 2.2; #767676 and #777777 on white are its well-known border."""
    with opened(browser, written(tmp_path, body), "light") as (tab, _):
        found = tab.evaluate(CONTRAST)
        assert len(found) == len(faults), found
        assert all(text.startswith(ratio) for text, ratio in zip(found, faults, strict=True)), found


@pytest.mark.parametrize(
    ("check", "body"),
    [
        (SIDEWAYS, "<p style='width:600px'>wide</p>"),
        (SIDEWAYS, "<div style='overflow:hidden'><table style='width:600px'><tr><td>cut</td></tr></table></div>"),
        (WHITE_BOXES, "<div style='background:#fff;height:40px'></div>"),
        (SILENT, "<img src='data:,'>"),
        (SILENT, "<img src='data:,' alt='../_images/a.svg'>"),
        (SILENT, "<svg><path d='M0 0'/></svg>"),
        (SILENT, "<svg aria-label=' '><title>hidden by an empty label</title></svg>"),
        (SILENT, "<canvas></canvas>"),
        (SILENT, "<button><svg></svg></button>"),
    ],
)
def test_what_a_page_must_not_have_is_noticed(browser, check, body, tmp_path):
    harmless = (
        "<div style='overflow-x:auto'><p style='width:600px'>wide</p></div><img src='data:,' alt='Time grows'>"
        "<svg aria-label='Time grows'><g/></svg><svg><title>Time</title></svg><b aria-hidden='true'><svg></svg></b>"
        "<button style='background:none'><svg></svg>Show</button><img src='data:,' alt=''>"
    )
    with opened(browser, written(tmp_path, harmless, "dark"), "dark") as (tab, _):
        assert not tab.evaluate(check)
        tab.evaluate("body => document.querySelector('article').insertAdjacentHTML('beforeend', body)", body)
        assert tab.evaluate(check)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (slider(), None),
        (slider(move=""), "batch: (label|picture) stayed the same"),
        (slider(move=LABEL), "batch: picture stayed the same"),
        (slider(move=PICTURE), "batch: label stayed the same"),
        (slider(move=MOVES.replace("slider.value", "count")), "batch: another frame on coming back"),
        (slider(attributes="tabindex='-1'"), "batch: not reached with Tab"),
        (slider(attributes="disabled"), "batch: not reached with Tab"),
        (slider(attributes="onkeydown='return false'"), "batch: values stayed the same"),
        (slider(attributes="aria-valuetext='1'", move=MOVES + "slider.removeAttribute('aria-valuetext')"), None),
    ],
)
def test_a_dead_explorer_is_noticed(browser, body, message, tmp_path):
    with opened(browser, written(tmp_path, body), "light") as (tab, _):
        faults = "\n".join(explorer_faults(tab))
        assert re.search(message, faults) if message else not faults, faults


def test_an_answer_that_does_not_unfold_is_noticed(browser, tmp_path):
    for attributes in ("onclick='return false'", "tabindex='-1'"):
        stuck = FOLD.replace("<summary", f"<summary {attributes}")
        with opened(browser, written(tmp_path, stuck), "light") as (tab, _):
            assert folded_faults(tab)
    with opened(browser, written(tmp_path, FOLD.replace("<details", "<details open")), "light") as (tab, _):
        assert folded_faults(tab)


# The built pages


@pytest.fixture(
    scope="module",
    params=[(page, theme) for page in PAGES or [None] for theme in THEMES],
    ids=lambda visit: f"{visit[0].stem if visit[0] else 'not-built'}-{visit[1]}",
)
def visit(request, browser):
    """(tab, trouble, theme) for each built page in each theme; the tests share the tab and may resize it."""
    page, theme = request.param
    if page is None:
        pytest.skip("the book is not built from these sources; run `make html`")
    with opened(browser, page, theme) as (tab, trouble):
        yield tab, trouble, theme


def test_a_page_has_the_theme_that_was_asked_for(visit):
    tab, _, theme = visit
    assert tab.evaluate("document.documentElement.dataset.theme") == theme


def test_a_phone_shows_a_page_without_sideways_scroll(visit):
    """B8: what is wider than 390 px scrolls in its own box."""
    tab, _, _ = visit
    tab.set_viewport_size(PHONE)
    assert not tab.evaluate(SIDEWAYS)


def test_no_white_box_in_the_dark(visit):
    """B7."""
    tab, _, theme = visit
    assert theme == "light" or not tab.evaluate(WHITE_BOXES)


def test_every_picture_has_words(visit):
    assert not visit[0].evaluate(SILENT)


def test_explorers_move_by_keyboard_and_change_their_picture(visit):
    """B5."""
    tab, _, _ = visit
    tab.set_viewport_size(DESK)
    assert not explorer_faults(tab)


def test_folded_answers_open_by_keyboard(visit):
    """B9."""
    tab, _, _ = visit
    tab.set_viewport_size(DESK)
    assert not folded_faults(tab)


def test_text_can_be_read_in_figures_code_and_prose(visit):
    """B7."""
    tab, _, _ = visit
    tab.set_viewport_size(DESK)
    assert not tab.evaluate(CONTRAST)


def test_on_paper_there_are_no_controls_and_text_can_be_read(visit):
    tab, _, _ = visit
    tab.emulate_media(media="print")
    assert tab.locator(CONTROLS).filter(visible=True).count() == 0
    assert not tab.evaluate(CONTRAST)
    tab.emulate_media(media="screen")


def test_a_page_loaded_and_worked_without_an_error(visit):
    """B5: last of the tests that share the tab, so that it sees what the others caused."""
    assert not visit[1]


@pytest.mark.parametrize("page", PAGES or [None], ids=lambda page: page.stem if page else "not-built")
def test_without_script_the_first_picture_stands(browser, page):
    if page is None:
        pytest.skip("the book is not built from these sources; run `make html`")
    with opened(browser, page, "light", java_script_enabled=False) as (tab, _):
        for figure in tab.locator(EXPLORER).all():
            assert figure.locator(".minillm-scroll > svg").is_visible() and figure.locator("noscript p").is_visible()
        assert tab.locator(CONTROLS).filter(visible=True).count() == 0


def test_every_chapter_has_an_explorer():
    if not PAGES:
        pytest.skip("the book is not built from these sources; run `make html`")
    chapters = [page for page in PAGES if re.match(r"\d\d_", page.stem)]
    assert chapters and all('class="minillm-controls"' in page.read_text(encoding="utf-8") for page in chapters)


# JupyterLab


@contextmanager
def jupyterlab(folder: Path):
    """JupyterLab on 127.0.0.1 with `folder` as its root and nothing of the user's settings: yields (address, token).

    At the end the server is asked to stop, which stops its kernels; a kernel whose server is gone stops by itself.
    Should this process be killed, kernel and server end after five minutes without work.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, home = secrets.token_hex(16), folder / "home"
    places = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = {k: v for k, v in os.environ.items() if k != notebooks.BUILDING}
    environment |= places | {"IPYTHONDIR": str(home / "ipython"), "JUPYTER_TOKEN": token}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += ["--ServerApp.port_retries=0", "--LabApp.news_url=None", "--LabApp.extension_manager=readonly"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", f"--ServerApp.root_dir={folder}"]
    command += ["--ServerApp.shutdown_no_activity_timeout=300", "--MappingKernelManager.cull_idle_timeout=300"]
    command += ["--MappingKernelManager.cull_connected=True"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        until(lambda: listens(port), 120, lambda: (folder / "server.log").read_text(), lambda: server.poll() is None)
        yield f"http://127.0.0.1:{port}", token
    finally:
        kernels = [json.loads(file.read_text()) for file in home.glob("runtime/kernel-*.json")]
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        finally:
            server.kill()
            server.wait()
        ports = [kernel["hb_port"] for kernel in kernels if kernel["transport"] == "tcp"]
        until(lambda: not any(map(listens, ports)), 30, lambda: "a kernel outlives its server")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition, seconds: float, message, possible=lambda: True) -> None:
    """Wait for a condition; fail with a message after so many seconds, or when it is no longer possible."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end or not possible():
            pytest.fail(message())
        time.sleep(0.2)


def test_in_jupyterlab_the_explorer_of_a_chapter_follows_its_slider(browser, tmp_path):
    """A reader's way: open chapter 2, run all cells, move a slider with the arrow keys, see another picture."""
    shutil.copy(CHAPTER, tmp_path)
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    (index,) = (i for i, cell in enumerate(cells) if re.search(r"(?m)^lab\.explore\(", "".join(cell["source"])))
    with jupyterlab(tmp_path) as (address, token):
        context = browser.new_context(viewport=DESK)
        context.set_default_timeout(PATIENCE)
        tab = context.new_page()
        trouble = watch(tab, (address, address.replace("http", "ws"), "data:", "blob:"))
        tab.goto(f"{address}/lab/tree/{CHAPTER.name}?token={token}")
        # "Run All Cells" runs nothing before all cells are there and the kernel is.
        cell = tab.locator(f'.jp-Cell[data-windowed-list-index="{index}"]')
        tab.locator(f'.jp-Cell[data-windowed-list-index="{len(cells) - 1}"]').wait_for(state="attached")
        tab.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        tab.get_by_role("menuitem", name="Run", exact=True).click()
        tab.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        cell.locator(".jp-InputPrompt", has_text=re.compile(r"\[(\*|\d+)\]")).wait_for(state="attached")
        slider, picture = cell.get_by_role("slider").first, cell.locator(".minillm-figure svg[role=img]")

        def ran() -> bool:
            cell.scroll_into_view_if_needed()  # JupyterLab attaches the output of a cell when it comes into view
            return slider.is_visible() and picture.is_visible()

        def frame() -> tuple:
            return picture.get_attribute("aria-label"), picture.inner_html()

        def state() -> str:
            tab.keyboard.press("Control+s")
            tab.wait_for_timeout(3000)
            saved = json.loads((tmp_path / CHAPTER.name).read_text(encoding="utf-8"))["cells"]
            outputs = [output for cell in saved for output in cell.get("outputs", ())]
            errors = [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]
            return f"no explorer in cell {index}; {len(outputs)} outputs so far, errors: {errors}"

        until(ran, 300, state)  # the chapter takes 40 s; a busy machine is no failure
        frames = [frame()]
        slider.focus()
        for key in ("ArrowRight", "ArrowLeft"):
            tab.keyboard.press(key)
            until(lambda: frame() != frames[-1], 60, lambda: "the picture stays the same")
            frames.append(frame())
        context.close()
    first, moved, back = frames
    assert back == first and moved[0] != first[0] and moved[1] != first[1]
    assert not [text for text in trouble if text.startswith("elsewhere")]

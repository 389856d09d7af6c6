"""The pages of a report and of the scoreboard in a real browser: desktop and phone, light and dark, by keyboard, and
printed. Skipped without Chromium."""

import pytest
from browser import PROGRAM, Browser
from hand_written import write_run
from test_scoreboard import run_of, sweep_of

from rankbench.report.jobs import find_runs
from rankbench.report.report import gather
from rankbench.report.scoreboard import scoreboard

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")]

CONTROLS = "a[href], summary, button, input, select, [tabindex='0']"
UNFOLD = "document.querySelectorAll('details').forEach(fold => fold.open = true)"
# The texts that stand out too little from what is behind them: WCAG's ratio of luminances is to be 4.5 at least.
FAINT = """(() => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((x, i) => a * x + (1 - a) * below[i]);
  const behind = element => {
    if (!element) return parse(getComputedStyle(document.documentElement).backgroundColor)[3] === 0
      ? [255, 255, 255] : parse(getComputedStyle(document.documentElement).backgroundColor);
    const colour = parse(getComputedStyle(element).backgroundColor);
    return colour[3] === 0 ? behind(element.parentElement) : over(colour, behind(element.parentElement));
  };
  const luminance = rgb => rgb.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
  const texts = [...document.body.querySelectorAll("*")].filter(element => element.checkVisibility()
    && !element.closest("svg, script, dialog")
    && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  const faint = texts.filter(element => {
    const below = behind(element), ink = over(parse(getComputedStyle(element).color), below);
    const [low, high] = [luminance(ink), luminance(below)].sort((a, b) => a - b);
    return (high + .05) / (low + .05) < 4.5;
  });
  return {texts: texts.length, faint: faint.map(element => element.outerHTML.slice(0, 100)),
          dark: luminance(behind(document.body)) < .5};
})()"""


def page_of(home):
    gather(find_runs(str(home / "runs")), home / "report")
    return home / "report" / "report.html"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a hand-written sweep with long names and a wide table."""
    home = tmp_path_factory.mktemp("page")
    row = {"run": "", "task": "sorting", "model": "san", "seed": 0, "weights": "trained", "sublayer": "mlp"}
    row |= {"relative_noise_floor": 2.0**-52, "relative_residual": 0.5}
    for number in range(4):
        model = {"name": "a_network_with_a_long_name", "layers": number}
        steps = [{"step": k, "seed": 0, "split": "test", "loss": 1.0 / (k + 1), "accuracy": 0.5} for k in range(3)]
        write_run(
            home / "runs" / f"{number}_model.layers={number},model.attention_init=0.5,task.alphabet=1000",
            {"model": model},
            [{"test_accuracy": 0.5 + seed / 10} for seed in range(3)],
            metrics=steps,
            residual=[row | {"variant": variant, "layer": k} for variant in ("full", "no_skip") for k in (0, 1)],
        )
    return page_of(home)


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The scoreboard of a sweep with two settings and of a run."""
    home = tmp_path_factory.mktemp("board")
    sweep_of(home / "outputs", "dong_fig4_sorting", [{"where": "task.label=0"}, {"where": "task.label=1"}])
    run_of(home / "outputs", "knob", preset="knob_temperature", budget="laptop", outcome="failed")
    scoreboard("all", home, outputs=home / "outputs")
    return home / "scoreboard.html"


@pytest.fixture(params=["report", "board"])
def page(request):
    return request.getfixturevalue(request.param)


def overflow(browser):
    return browser.see("document.documentElement.scrollWidth") - browser.width


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_beside_the_page(page, width):
    with Browser(page.as_uri(), width=width) as browser:
        browser.see(UNFOLD)
        assert overflow(browser) <= 0 and browser.see("document.body.innerText.length") > 500
        figures = browser.see(
            "[...document.querySelectorAll('figure > a > *')].map(x => x.getBoundingClientRect())"
            ".map(x => [x.width, x.right])"
        )
        assert figures and all(wide > 0 and right <= width for wide, right in figures)
        browser.see("document.querySelector('h1').style.width = '2000px'")
        assert overflow(browser) > 0


AROUND = """[...document.querySelectorAll("figure svg")].map(svg => {
      const box = svg.getBoundingClientRect(), around = [], own = svg.viewBox.baseVal;
      for (let at = svg.parentElement; at; at = at.parentElement) {
        const edge = at.getBoundingClientRect(), clips = getComputedStyle(at).overflow !== "visible";
        if (clips || at.tagName === "FIGURE" || at.tagName === "BODY")
          around.push([edge.top - box.top, box.bottom - edge.bottom, edge.left - box.left, box.right - edge.right]);
      }
      return {height: box.height, ratio: box.height / box.width, own: own.height / own.width, around: around};
    })"""


def test_nothing_clips_a_tall_figure_and_it_keeps_its_shape(report):
    with Browser(report.as_uri(), width=1200) as browser:
        for width in (1200, 390):
            browser.look(width)
            figures = browser.see(AROUND)
            assert figures and (width == 390 or max(figure["height"] for figure in figures) > 1000)
            for figure in figures:
                assert figure["ratio"] == pytest.approx(figure["own"], rel=1e-3)  # the browser's pixels are 1/64 wide
                assert len(figure["around"]) >= 2 and max(map(max, figure["around"])) <= 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The report of a sweep over four keys with three final numbers, of many digits each."""
    home = tmp_path_factory.mktemp("wide")
    numbers = {"test_accuracy": 0.1234567, "valid_loss": 12.3456789, "test_loss": 123.456789}
    for job, (norm, heads) in enumerate((norm, heads) for norm in ("none", "pre") for heads in (1, 128)):
        keys = {"name": "contractive_l2", "norm": norm, "heads": heads, "width": 48 * heads, "layers": heads + 2}
        seeds = [{name: value * (1 + seed / 7) for name, value in numbers.items()} for seed in range(3)]
        write_run(home / "runs" / str(job), {"model": keys}, seeds)
    return page_of(home)


@pytest.mark.parametrize("look", [{"width": 1280}, {"width": 390}, {"width": 718, "printed": True}], ids=str)
def test_the_summary_of_a_sweep_is_not_cut(wide, look):
    """718 px: the width between the margins of a sheet of A4."""
    box = "document.querySelector('[aria-label=Summary]')"
    with Browser(wide.as_uri(), **look) as browser:
        over = f"[{box}.scrollWidth - {box}.clientWidth, {box}.getBoundingClientRect().right - {look['width']}]"
        assert max(browser.see(over)) <= 0
        text = browser.see(f"{box}.innerText").replace("\n", " ")
        assert "0.1411" in text and "best 0.1587" in text and "123.5" in text
        browser.see(f"{box}.querySelector('td').style.minWidth = '3000px'")
        assert max(browser.see(over)) > 0


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"width": 390, "dark": True}, {"printed": True}], ids=str)
def test_every_text_stands_out_from_what_is_behind_it(page, look):
    with Browser(page.as_uri(), **look) as browser:
        browser.see(UNFOLD)
        seen = browser.see(FAINT)
        assert seen["faint"] == [] and seen["texts"] > 20 and seen["dark"] == look.get("dark", False)
        browser.see("document.querySelector('h1').style.color = '#777'")
        assert len(browser.see(FAINT)["faint"]) == 1


def test_tab_reaches_every_control(page):
    with Browser(page.as_uri()) as browser:
        browser.see(UNFOLD)
        browser.see(
            f'window.unreached = new Set([...document.querySelectorAll("{CONTROLS}")].filter(x => x.checkVisibility()))'
        )
        number = browser.see("unreached.size")
        assert number > 10
        for _ in range(number + 2):
            browser.press("Tab")
            browser.see("unreached.delete(document.activeElement)")
        assert browser.see("[...unreached].map(x => x.outerHTML.slice(0, 100))") == []


def test_enter_shows_a_figure_large_and_escape_closes_it(page):
    with Browser(page.as_uri()) as browser:
        browser.see(UNFOLD)
        browser.see("(window.link = document.querySelector('figure > a')).focus()")
        width = browser.see("link.firstElementChild.getBoundingClientRect().width")
        browser.press("Enter")
        shown = "document.querySelector('dialog[open] > *')"
        assert browser.see(f"{shown}.getBoundingClientRect().width") > width
        assert browser.see("document.querySelector('dialog').ariaLabel.length") > 10
        browser.press("Escape")
        assert browser.see(f"{shown} === null && document.activeElement === link")
        assert browser.see("location.href") == page.as_uri()


TAP = """(where => document.elementFromPoint(...where).dispatchEvent(
  new MouseEvent("click", {bubbles: true, clientX: where[0], clientY: where[1]})))"""
CORNER = "(at => [at.x, at.y])(document.querySelector('%s').getBoundingClientRect())"


def test_a_tap_near_a_mark_of_a_large_figure_reads_it_and_one_elsewhere_closes_it(report):
    with Browser(report.as_uri()) as browser:
        browser.see("[...document.querySelectorAll('figure > a')].find(x => x.querySelector('circle')).click()")
        x, y = browser.see(CORNER % "dialog circle")
        browser.see(f"{TAP}([{x - 5}, {y + 5}])")
        read = browser.see("document.querySelector('dialog .reading').textContent")
        assert read == browser.see("document.querySelector('dialog circle').textContent") and " = " in read
        x, y = browser.see(CORNER % "dialog")
        browser.see(f"{TAP}([{x + 4}, {y + 4}])")
        assert browser.see("document.querySelector('dialog[open]') === null")


def test_a_thumbnail_leads_to_the_claims_of_its_preset(board):
    with Browser(board.as_uri()) as browser:
        links = browser.see("[...document.querySelectorAll('#thumbnails a')].map(link => link.textContent)")
        assert links and browser.see("document.getElementById('thumbnails').getBoundingClientRect().height") > 50
        wide = "[...document.querySelectorAll('#thumbnails img')].every(image => image.naturalWidth > 0)"
        assert browser.see(wide)
        for number, preset in enumerate(links):
            browser.see(f"document.querySelectorAll('#thumbnails a')[{number}].click()")
            assert browser.see("location.hash") == f"#{preset}"
            shown = f"document.getElementById('{preset}').checkVisibility({{contentVisibilityAuto: true}})"
            assert browser.see(shown) and browser.see(f"document.getElementById('{preset}').open")
    with Browser(board.as_uri(), printed=True) as browser:
        assert browser.see("getComputedStyle(document.getElementById('thumbnails')).display") == "none"


def test_the_page_can_be_printed(page):
    with Browser(page.as_uri()) as browser:
        printed = browser.pdf()
    assert printed[:5] == b"%PDF-" and len(printed) > 10_000
    with Browser(page.as_uri(), printed=True) as browser:
        browser.see("dispatchEvent(new Event('beforeprint'))")
        assert browser.see("[...document.querySelectorAll('details')].every(fold => fold.open)")
        assert browser.see("[...document.querySelectorAll('form, dialog')].every(x => !x.checkVisibility())")

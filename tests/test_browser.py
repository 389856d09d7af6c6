"""The page of a report in a real browser: desktop and phone, light and dark, and printed. Skipped without Chromium."""

import json
import re
import shutil
import subprocess

import pandas as pd
import pytest
import yaml

from rankbench.report.report import find_runs, gather

BROWSER = next(filter(shutil.which, ("chromium", "google-chrome", "chromium-browser")), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]

# Opens the page in a frame of a phone's or a screen's width, and writes what it measures there into the title.
FRAME = """<iframe src="report.html" style="width: {width}px; height: 900px; border: 0"></iframe><script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement
  const style = getComputedStyle(page.body)
  page.querySelectorAll("details").forEach(fold => fold.open = true)
  document.title = JSON.stringify({{
    scrollable: root.scrollWidth - root.clientWidth, words: page.body.innerText.length,
    colour: style.color, background: style.backgroundColor === "rgba(0, 0, 0, 0)"
      ? getComputedStyle(root).backgroundColor : style.backgroundColor,
    figures: [...page.querySelectorAll("img, svg")].map(x => x.getBoundingClientRect()).map(x => [x.width, x.right]),
    unreachable: [...page.querySelectorAll("a[href], summary, input, button")].filter(x => x.tabIndex < 0).length,
  }})
}}
</script>"""


def browse(*words):
    how = {"capture_output": True, "text": True, "timeout": 120}
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars"]
    return subprocess.run([BROWSER, *options, *words], **how).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a hand-written sweep with long names and a wide table."""
    home = tmp_path_factory.mktemp("page")
    for number in range(4):
        folder = home / "runs" / f"{number}_model.layers={number},model.attention_init=0.5,task.alphabet=1000"
        folder.mkdir(parents=True)
        config = {
            "model": {"name": "a_network_with_a_long_name", "layers": number},
            "task": {"name": "sorting"},
            "seed": 0,
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        seeds = [{"seed": seed, "status": "finished", "test_accuracy": 0.5 + seed / 10} for seed in range(3)]
        (folder / "summary.json").write_text(json.dumps({"status": "finished", "seeds": seeds}))
        steps = [
            {"step": step, "seed": 0, "split": "test", "loss": 1.0 / (step + 1), "accuracy": 0.5} for step in range(3)
        ]
        pd.DataFrame(steps).to_csv(folder / "metrics.csv", index=False)
    (home / "report").mkdir()
    gather(find_runs(str(home / "runs")), home / "report")
    return home / "report" / "report.html"


def measured(page, width, *options):
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(width=width))
    dom = browse("--virtual-time-budget=5000", "--window-size=1600,1000", *options, "--dump-dom", frame.as_uri())
    return json.loads(re.search("<title>(.*?)</title>", dom)[1])


def brightness(colour):
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3 / 255


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_beside_the_page(page, width):
    seen = measured(page, width)
    assert seen["scrollable"] <= 0 and seen["words"] > 500 and seen["unreachable"] == 0
    assert seen["figures"] and all(wide > 0 and right <= width for wide, right in seen["figures"])


def test_a_page_that_is_too_wide_is_noticed(page, tmp_path):
    wide = tmp_path / "report.html"
    wide.write_text(page.read_text().replace("</body>", '<div style="width: 700px">x</div></body>'))
    assert measured(wide, 390)["scrollable"] > 0


def test_letters_stand_out_in_light_and_dark(page):
    for options, is_dark in (((), False), (("--blink-settings=preferredColorScheme=0",), True)):
        seen = measured(page, 1280, *options)
        letters, paper = brightness(seen["colour"]), brightness(seen["background"])
        assert (paper < letters) == is_dark and abs(paper - letters) > 0.6, seen


def test_the_page_can_be_printed(page):
    printed = page.with_name("printed.pdf")
    browse(f"--print-to-pdf={printed}", page.as_uri())
    assert printed.read_bytes()[:5] == b"%PDF-" and printed.stat().st_size > 10_000

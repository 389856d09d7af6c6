"""rankbench.report.scoreboard, preset_runs and results: which run of a preset is shown, what is said of it, and the
pages that say it, compared with the tables beside them."""

import html
import io
import json
import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml
from browser import PROGRAM, Browser
from hand_written import write_run
from PIL import Image

from rankbench.config.keys import ConfigError
from rankbench.config.presets import presets
from rankbench.judging import CLAIMS, beside_second, of_today
from rankbench.plots.pictures import png_within
from rankbench.report import results
from rankbench.report.page import records
from rankbench.report.preset_runs import across_presets
from rankbench.report.results import index_of, known_second
from rankbench.report.scoreboard import scoreboard
from rankbench.runs.tables import read_table

DOCS = Path(__file__).resolve().parents[2] / "docs"
CLAIM = {"claim": "dong_fig4_whole_sorting", "kind": "claim", "where": "", "outcome": "held", "measured": 0.99}
CLAIM |= {"low95": 0.98, "high95": 0.995, "interval": "t of logits", "is_bound": False, "published": 0.98}
CLAIM |= {"claimed": "> 0.95", "side": 1, "line": 0.95, "exists": False, "p_value": 0.001, "more_repeats": None}
CLAIM |= {"num_seeds": 5, "num_repeats": 5, "repeats": "seed", "reason": "", "control": "it is not so"}
CLAIM |= {"refuted_by": "less", "statement": "It sorts.", "source": "Dong et al. 2021, sec. 4.3"}
# the smallest PNG file: one pixel
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63600000000200014865"
    "3ca40000000049454e44ae426082"
)


@pytest.fixture
def outputs(tmp_path):
    return tmp_path / "outputs"


def record(experiment):
    return yaml.safe_dump({"hydra": {"runtime": {"choices": {"experiment": experiment}}}})


def run_of(outputs, name, preset="demo", budget=None, status="finished", written=1000, seed=0, judged=True, **verdict):
    """A folder as `rankbench train experiment=<preset>` leaves it, as far as the scoreboard looks."""
    config = {"budget": budget, "seed": seed} | ({} if judged else {"claims": [CLAIM["claim"]]})
    tables = {"verdicts": [CLAIM | verdict]} if judged else {}
    folder = write_run(outputs / "train" / name, config, status=status, **tables)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "hydra.yaml").write_text(record(preset))
    (folder / "paths.png").write_bytes(PIXEL)
    for path in folder.iterdir():
        os.utime(path, (written, written))
    return folder


def scoreboard_of(outputs, tmp_path, experiment="all"):
    """Rows of scoreboard.csv and of presets.csv, and the lines."""
    lines = scoreboard(experiment, tmp_path, outputs=outputs)
    claims, boards = (records(read_table(tmp_path / f"{name}.csv")) for name in ("scoreboard", "presets"))
    return claims, {board["preset"]: board for board in boards}, lines


def test_a_scoreboard_tells_what_is_new_since_the_last(outputs, tmp_path):
    """The last one is the one in the same folder, else the newest of these presets in outputs/report."""
    run_of(outputs, "one")
    first, second, third = (outputs / "report" / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir(parents=True)
    lines = scoreboard("demo", first, outputs=outputs)
    assert not any(line.startswith("since the report") for line in lines)
    assert "Since the report of" not in (first / "scoreboard.html").read_text()
    os.utime(first / "scoreboard.csv", (86400 * 365, 86400 * 365))
    said = "since the report of 1971-01-01 "
    (line,) = (line for line in scoreboard("demo", second, outputs=outputs) if line.startswith(said))
    assert line.endswith(": no new verdict")
    run_of(outputs, "two", written=2000, outcome="failed")
    (line,) = (line for line in scoreboard("demo", first, outputs=outputs) if line.startswith(said))
    assert line.endswith(f": {CLAIM['claim']} failed (before: held)")
    page = (first / "scoreboard.html").read_text()
    assert f'<a href="#claim-{CLAIM["claim"]}">{CLAIM["claim"]}</a>' in page and "(before: held)" in page
    # that of one preset says nothing about all; a damaged one nothing at all
    assert not any(line.startswith("since") for line in scoreboard("all", second, outputs=outputs))
    for folder in (first, second):
        (folder / "scoreboard.csv").write_text("no table")
    assert not any(line.startswith("since") for line in scoreboard("demo", third, outputs=outputs))


def test_every_preset_has_a_row_and_its_command(outputs, tmp_path):
    run_of(outputs, "one")
    _, boards, lines = scoreboard_of(outputs, tmp_path)
    assert list(boards) == list(presets())
    unrun = [name for name, board in boards.items() if board["note"] == "not run"]
    assert unrun == [name for name in presets() if name != "demo"] and f"not run: {', '.join(unrun)}" in lines
    assert lines[0] == f"1 of {len(presets())} presets run; 1 held"
    assert all(command.startswith("rankbench ") and name in command for name, command in presets().items())
    page = (tmp_path / "scoreboard.html").read_text()
    assert all(html.escape(command) in page for name, command in presets().items() if name != "demo")


def test_our_number_stands_beside_the_published_one(outputs, tmp_path):
    folder = run_of(outputs, "one")
    (row,), boards, lines = scoreboard_of(outputs, tmp_path, "demo")
    assert (row["outcome"], row["measured"], row["published"], row["num_repeats"]) == ("held", 0.99, 0.98, 5)
    assert (row["paper"], row["scale"]) == ("Dong et al. 2021", "paper")
    assert (row["presets"], row["held_after_holm"]) == ("demo", "yes")
    assert boards["demo"]["folder"] == str(folder)
    measured = "measured 0.99 [0.98, 0.995] (95 %, 5 seeds), claimed > 0.95, published 0.98"
    assert f"held      dong_fig4_whole_sorting: {measured} - Dong et al. 2021, sec. 4.3" in lines


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"written": 1000}, {"written": 2000}),
        ({"budget": "smoke", "written": 2000}, {"budget": "laptop"}),
        ({"budget": "laptop", "written": 2000}, {"budget": None}),
        ({"status": "running", "written": 2000}, {"budget": "smoke"}),
        ({"judged": False, "written": 2000}, {"budget": "smoke"}),  # analyses go on after the training
    ],
)
def test_the_newest_complete_run_at_the_largest_scale_is_shown(outputs, tmp_path, worse, better):
    run_of(outputs, "a", **worse, measured=0.1)
    run_of(outputs, "b", **better, measured=0.2)
    (row,), _, _ = scoreboard_of(outputs, tmp_path, "demo")
    assert row["measured"] == 0.2


SETTINGS = [{"where": "task.label=0"}, {"where": "task.label=1", "outcome": "failed", "measured": 0.5}]


def sweep_of(outputs, preset, verdicts, name=None, **more):
    """A sweep's folder with these verdicts."""
    sweep = outputs / "train" / (name or preset)
    for number in (0, 1):
        run_of(outputs, f"{sweep.name}/{number}_task.label={number}", preset=preset, **more)
    (sweep / "multirun.yaml").write_text(record(preset))
    pd.DataFrame([CLAIM | verdict for verdict in verdicts]).to_csv(sweep / "verdicts.csv", index=False)
    return sweep


def test_the_settings_of_a_sweep_are_one_claim(outputs, tmp_path):
    sweep_of(outputs, "dong_fig4_sorting", SETTINGS)
    (row,), _, _ = scoreboard_of(outputs, tmp_path, "dong_fig4_sorting")
    assert (row["outcome"], row["num_held"], row["num_settings"]) == ("partly held", 1, 2)
    assert "held in 1 of 2 settings" in row["reading"] and "failed: task.label=1 (0.5)" in row["reading"]
    assert read_table(tmp_path / "verdicts.csv")["where"].tolist() == ["task.label=0", "task.label=1"]
    page = (tmp_path / "scoreboard.html").read_text()
    details = page.split("<details>")[1].split("</details>")[0]
    assert "task.label=0" in details and "task.label=1" in details and "it is not so" in details


def test_the_settings_with_the_same_outcome_on_other_seeds_are_counted(outputs, tmp_path):
    sweep_of(outputs, "dong_fig4_sorting", SETTINGS)
    sweep_of(outputs, "dong_fig4_sorting", [SETTINGS[0], SETTINGS[1] | {"outcome": "undecided"}], "again", seed=1000)
    scoreboard("all", tmp_path, pages=tmp_path / "docs", outputs=outputs)
    said = "- With other seeds: the same in 1 of 2 settings; task.label=1: undecided (0.5 ["
    assert said in (tmp_path / "docs" / "dong_et_al_2021.md").read_text()


def test_a_claim_of_two_presets_is_one_entry_with_the_settings_of_both(outputs, tmp_path):
    run_of(outputs, "one", where="s=a")
    run_of(outputs, "two", preset="dong_fig4_sorting_san", where="s=a", measured=0.96, budget="laptop")
    (row,), boards, _ = scoreboard_of(outputs, tmp_path)
    assert boards["dong_fig4_sorting_san"]["command"].endswith("experiment=dong_fig4_sorting_san budget=laptop")
    assert (row["num_settings"], row["presets"], row["scale"]) == (2, "demo, dong_fig4_sorting_san", "paper, laptop")
    assert row["where"] == "dong_fig4_sorting_san, s=a"


def test_claims_that_a_preset_no_longer_has_leave_its_page(outputs, tmp_path):
    run_of(outputs, "demo")
    old = run_of(outputs, "old", preset="dong_fig4_sorting")
    rows = [CLAIM, CLAIM | {"claim": "amsel_bound_is_tight", "source": "Amsel, Yehudai and Bruna, slide"}]
    pd.DataFrame(rows).to_csv(old / "verdicts.csv", index=False)
    pages = tmp_path / "pages"
    scoreboard("all", tmp_path, pages=pages, outputs=outputs)
    assert "amsel_bound_is_tight" in (pages / "statements.csv").read_text()
    shutil.rmtree(old)
    scoreboard("all", tmp_path, pages=pages, outputs=outputs)
    kept = (pages / "statements.csv").read_text()
    assert "amsel_bound_is_tight" not in kept and CLAIM["claim"] in kept
    assert disagreements(pages) == []


@pytest.mark.parametrize(
    ("second", "replicated", "outcome", "text"),
    [
        ({"measured": 0.97}, "yes", "held", "- With other seeds: the same, 0.97 [0.98, 0.995] (95 %, 5 seeds)"),
        ({"outcome": "undecided"}, "no", "held", "- With other seeds: undecided (0.99 [0.98, 0.995] (95 %, 5 seeds))"),
        ({"outcome": "failed"}, "no", "undecided", "held with the first seeds, failed with others (0.99 [0.98"),
        ({"outcome": "failed", "budget": "laptop"}, None, "held", None),  # another scale is no repetition
        ({"outcome": "failed", "status": "running"}, None, "held", None),
    ],
)
def test_a_second_run_on_other_seeds_stands_beside_the_first(outputs, tmp_path, second, replicated, outcome, text):
    """Newer than the first run, it does not represent the preset; its verdicts stay on the pages without its folder."""
    run_of(outputs, "one")
    again = run_of(outputs, "again", **({"written": 2000, "seed": 1000} | second))
    for _ in range(2):
        scoreboard("all", tmp_path, pages=tmp_path / "docs", outputs=outputs)
        (row,) = records(read_table(tmp_path / "docs" / "statements.csv"))
        assert (row["replicated"], row["outcome"], row["measured"]) == (replicated, outcome, 0.99)
        page = (tmp_path / "docs" / "dong_et_al_2021.md").read_text()
        assert text in page if text else "- With other seeds" not in page
        board = next(row for row in records(read_table(tmp_path / "docs" / "presets.csv")) if row["preset"] == "demo")
        complete = second.get("status") != "running"
        assert (board["second"] or "").startswith("commit ") == complete
        assert disagreements(tmp_path / "docs") == []
        shutil.rmtree(again, ignore_errors=True)


def test_an_interrupted_call_leaves_the_pages_files(outputs, tmp_path, monkeypatch):
    runs = [run_of(outputs, "one"), run_of(outputs, "two", preset="dong_fig4_sorting")]
    (runs[0] / "old.png").write_bytes(PIXEL)
    pages = tmp_path / "docs"
    scoreboard("all", tmp_path, pages=pages, outputs=outputs)
    before = {path.relative_to(pages) for path in pages.rglob("*") if path.is_file()}
    (runs[0] / "old.png").unlink()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(results, "png_within", interrupted)
        scoreboard("all", tmp_path, pages=pages, outputs=outputs)
    assert {path.relative_to(pages) for path in pages.rglob("*") if path.is_file()} == before
    scoreboard("all", tmp_path, pages=pages, outputs=outputs)
    after = {path.relative_to(pages) for path in pages.rglob("*") if path.is_file()}
    assert before - after == {Path("presets", "demo", "old.png")} and after < before


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_second_run_does_not_replace_the_first_that_the_pages_know(outputs, tmp_path):
    first = run_of(outputs, "one")
    scoreboard("all", tmp_path, pages=tmp_path / "docs", outputs=outputs)
    shutil.rmtree(first)
    run_of(outputs, "again", seed=1000, written=2000, measured=0.97)
    scoreboard("all", tmp_path, pages=tmp_path / "docs", outputs=outputs)
    (row,) = records(read_table(tmp_path / "docs" / "statements.csv"))
    assert (row["measured"], row["replicated"]) == (0.99, "yes") and disagreements(tmp_path / "docs") == []


@pytest.mark.parametrize(
    ("outcome", "same", "text"),
    [
        ("held", "yes", "Of 1 settings that were judged at both scales, 1 have the same outcome ("),
        ("undecided", "undecided", "0 have the same outcome, 1 is undecided at one of them ("),
        ("failed", "no", "0 have the same outcome, and 1 turns round ("),
    ],
)
def test_a_verdict_of_the_laptop_stays_beside_that_of_the_papers_scale(outputs, tmp_path, outcome, same, text):
    laptop = run_of(outputs, "one", budget="laptop")
    pages = tmp_path / "docs"
    scoreboard("all", tmp_path, pages=pages, outputs=outputs)
    assert "both scales" not in (pages / "README.md").read_text()
    shutil.rmtree(laptop)
    paper = run_of(outputs, "two", outcome=outcome, measured=0.5, written=2000)
    run_of(outputs, "other", preset="dong_fig4_sorting")
    for _ in range(2):  # also without the runs
        scoreboard("all", tmp_path, pages=pages, outputs=outputs)
        (row,) = records(read_table(pages / "laptop_and_paper.csv"))
        assert (row["laptop"], row["paper"], row["same"]) == ("held", outcome, same)
        assert row["laptop_measured"].startswith("0.99 ") and row["paper_measured"].startswith("0.5 ")
        assert text in (pages / "README.md").read_text()
        shutil.rmtree(paper, ignore_errors=True)


def test_a_run_on_late_seeds_alone_represents_its_preset(outputs, tmp_path):
    run_of(outputs, "only", seed=1234)
    (row,), boards, _ = scoreboard_of(outputs, tmp_path, "all")
    assert (row["outcome"], row["replicated"]) == ("held", None) and "only" in boards["demo"]["folder"]


def test_what_no_preset_made_is_left_out(outputs, tmp_path):
    run_of(outputs, "one")
    run_of(outputs, "two", preset=None, written=5000, measured=0.3)
    (run_of(outputs, "three", written=6000, measured=0.4) / ".hydra" / "hydra.yaml").write_text("{not yaml")
    (row,), _, _ = scoreboard_of(outputs, tmp_path, "demo")
    assert row["measured"] == 0.99


def test_a_run_with_a_damaged_summary_still_has_a_place(outputs, tmp_path):
    (run_of(outputs, "one") / "summary.json").write_text("{")
    scoreboard_of(outputs, tmp_path, "demo")
    assert "not all jobs finished" in (tmp_path / "scoreboard.html").read_text()


def test_a_caption_counts_the_seeds_that_did_not_diverge(outputs, tmp_path):
    statuses = ["finished", "finished", "finished", "diverged"]
    seeds = [{"seed": seed, "status": status} for seed, status in enumerate(statuses)]
    (run_of(outputs, "one") / "summary.json").write_text(json.dumps({"status": "finished", "seeds": seeds}))
    scoreboard_of(outputs, tmp_path, "demo")
    assert "Lines are means over 3 seeds;" in (tmp_path / "scoreboard.html").read_text()


@pytest.mark.parametrize("experiment", ["demo", "all"])
def test_a_run_without_verdicts_says_so(outputs, tmp_path, experiment):
    folder = run_of(outputs, "one")
    (folder / "verdicts.csv").unlink()
    claims, _, lines = scoreboard_of(outputs, tmp_path, experiment)
    assert claims == [] and "demo: no claims" in lines
    (folder / "config.yaml").write_text(yaml.safe_dump({"claims": ["dong_fig4_whole_sorting"]}))
    assert "demo: not judged" in scoreboard_of(outputs, tmp_path, experiment)[2]


def test_what_could_not_be_measured_is_told_without_a_number(outputs, tmp_path):
    run_of(outputs, "one", outcome="undecided", measured=float("nan"), p_value=float("nan"))
    _, _, lines = scoreboard_of(outputs, tmp_path, "demo")
    assert any(line.startswith("undecided dong_fig4_whole_sorting: not measured, claimed > 0.95") for line in lines)


def test_a_bound_is_no_measurement(outputs, tmp_path):
    run_of(outputs, "one", measured=-12.5, low95=float("nan"), high95=float("nan"), interval="none", is_bound=True)
    _, _, lines = scoreboard_of(outputs, tmp_path, "demo")
    assert any("dong_fig4_whole_sorting: measured at most -12.5 (5 seeds)" in line for line in lines)
    assert "≤ -12.5" in (tmp_path / "scoreboard.html").read_text()


@pytest.mark.parametrize("earlier", [{"since": ""}, {"claimed": "< -0.4"}, {"since": None, "measured": None}])
def test_a_verdict_of_a_test_that_the_claim_no_longer_has_is_not_shown(outputs, tmp_path, earlier):
    run_of(outputs, "knob", preset="knob_temperature", **(OTHER | {"outcome": "held", "measured": -0.9} | earlier))
    ((row,), _, lines) = scoreboard_of(outputs, tmp_path, "knob_temperature")
    assert (row["outcome"], row["measured"], row["claimed"]) == ("undecided", None, "< -0.5")
    assert any("not judged since the claim changed (held before: " in line for line in lines)
    run_of(outputs, "again", preset="knob_temperature", written=2000, **(OTHER | {"outcome": "held", "measured": -0.9}))
    ((row,), *_) = scoreboard_of(outputs, tmp_path, "knob_temperature")
    assert (row["outcome"], row["measured"], row["threshold"]) == ("held", -0.9, "ours")
    assert row["distance"] == pytest.approx(0.4) and row["statement"] == CLAIMS["knob_temperature"].statement


def test_checks_of_the_tool_stand_apart_from_claims(outputs, tmp_path):
    folder = run_of(outputs, "one")
    check = CLAIM | {"kind": "check", "claim": "paths_sum_to_output", "outcome": "passed", "claimed": "< -10"}
    pd.DataFrame([check, CLAIM]).to_csv(folder / "verdicts.csv", index=False)
    _, _, lines = scoreboard_of(outputs, tmp_path)
    assert lines[0].endswith("1 held, 1 passed")
    for file in ("scoreboard.html", "results/dong_et_al_2021.md"):
        page = (tmp_path / file).read_text()
        claim, check = page.index("dong_fig4_whole_sorting"), page.index("paths_sum_to_output")
        assert claim < page.rindex("Checks of the tool") < check


def test_verdicts_of_an_earlier_test_are_judged_again(outputs, tmp_path):
    sweep = sweep_of(outputs, "dong_fig4_sorting", [{"claimed": "> 0.5"}])
    for skip, job in zip((True, False), sorted(sweep.glob("*_task.label=*")), strict=True):
        config = {"claims": ["dong_fig4_whole_sorting", "no longer there"], "model": {"skip": skip}}
        (job / "config.yaml").write_text(yaml.safe_dump(config))
    accuracies = pd.DataFrame({"seed": [0, 1, 2] * 2, "whole_accuracy": [0.99, 0.98, 0.985, 0.5, 0.51, 0.52]})
    accuracies.assign(**{"model.skip": ["true"] * 3 + ["false"] * 3}).to_csv(sweep / "paths.csv", index=False)
    (row,), _, _ = scoreboard_of(outputs, tmp_path, "dong_fig4_sorting")
    assert (row["outcome"], row["where"]) == ("partly held", "model.skip=false")


def test_the_page_needs_nothing_else_and_links_to_the_run(outputs, tmp_path):
    folder = run_of(outputs, "one & two")
    scoreboard_of(outputs, tmp_path)
    page = (tmp_path / "scoreboard.html").read_text()
    sources, links = (re.findall(f'{name}="([^"]+)"', page) for name in ("src", "href"))
    assert len(sources) == 1 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "outputs/train/one%20%26%20two/" in links
    assert not [link for link in links if "//" in link]
    assert folder.exists()


def test_the_figures_of_final_numbers_are_left_out_however_many_pages_they_have(outputs, tmp_path):
    folder = run_of(outputs, "one")
    for name in ("sweep", "sweep_1", "sweep_12", "residual_1"):
        (folder / f"{name}.png").write_bytes(PIXEL)
    scoreboard_of(outputs, tmp_path, "demo")
    page = (tmp_path / "scoreboard.html").read_text()
    assert "residual_1 of demo" in page and "paths of demo" in page and "sweep" not in page.split("<main>")[1]


# --- pages of the results ---------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "command": ["rankbench train", "experiment=dong_fig4_sorting", "budget=laptop", "hydra.job.config.x=[y]", "out=o"],
    "git": {"commit": "0123456789abcdef", "dirty": False},
}
OTHER = {"claim": "knob_temperature", "source": "Giorlandino and Goldt 2025", "where": "", "outcome": "undecided"}
OTHER |= {"claimed": "< -0.5", "side": -1, "line": -0.5, "measured": -0.4, "p_value": 0.6, "published": None}
OTHER |= {"since": CLAIMS["knob_temperature"].since}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of two presets, one with a large figure and a person's note; written twice."""
    home = tmp_path_factory.mktemp("pages")
    sweep = sweep_of(home / "outputs", "dong_fig4_sorting", SETTINGS)
    (sweep / "0_task.label=0" / "environment.json").write_text(json.dumps(ENVIRONMENT))
    pd.DataFrame({"task.label": [0, 1], "test_accuracy_mean": [0.99, 0.5]}).to_csv(sweep / "summary.csv", index=False)
    noise = np.random.default_rng(0).integers(0, 256, (240, 360, 3), dtype=np.uint8)
    Image.fromarray(noise).save(sweep / "paths.png")
    run_of(home / "outputs", "knob", preset="knob_temperature", budget="laptop", **OTHER)
    notes = home / "docs" / "notes"
    notes.mkdir(parents=True)
    (notes / "knob_temperature.md").write_text("What a person says of <it>.\n")
    (notes / "index.md").write_text("What a person says of all.\n")
    for number in (1, 2):
        lines = scoreboard("all", home, pages=home / "docs", outputs=home / "outputs")
        assert f"-> {home / 'docs' / 'README.md'} and scoreboard.html" in lines
        if number == 1:
            first = {path.name: path.read_bytes() for path in (home / "docs").rglob("*.*")}
    assert first == {path.name: path.read_bytes() for path in (home / "docs").rglob("*.*")}
    return home / "docs"


def disagreements(folder):
    """Numbers of the index that are not those of statements.csv, and claims of statements.csv that the presets' own
    verdicts do not come to."""
    statements, boards = (records(read_table(folder / f"{name}.csv")) for name in ("statements", "presets"))
    lines = re.split("## (Presets|Does the laptop)", (folder / "README.md").read_text())[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    wrong = [] if rows else ["no table"]
    for cells in rows:
        row = dict(zip(head, cells, strict=True))
        name = row["paper"].partition("]")[0].strip("[")
        claims = [one for one in statements if one["kind"] == "claim" and name in ("all", one["paper"])]
        expected = {"claims": len(claims)}
        for word in ("held", "partly held", "failed", "undecided"):
            expected[word] = len([one for one in claims if one["outcome"] == word])
        expected["held after Holm"] = len([one for one in claims if one["held_after_holm"] == "yes"])
        wrong += [f"{name}: {word} {row[word]}" for word, count in expected.items() if row[word] != str(count)]
    papers = [one["paper"] for one in statements if one["kind"] == "claim"]
    wrong += [paper for paper in papers if f"[{paper}]" not in "".join(lines)]
    tables = [folder / "presets" / board["preset"] / "verdicts.csv" for board in boards if board["note"] != "not run"]
    verdicts = [
        row
        for path in tables
        for row in beside_second(of_today(records(read_table(path))), known_second(folder, path.parent.name))
    ]
    rebuilt = {one["claim"]: one for one in across_presets(verdicts)}
    keys = ("outcome", "num_held", "num_settings", "measured", "reading", "held_after_holm", "replicated")
    wrong += [f"{one['claim']}: {key}" for one in statements for key in keys if rebuilt[one["claim"]][key] != one[key]]
    return wrong if index_of(folder) == (folder / "README.md").read_text() else [*wrong, "another index"]


def test_the_index_agrees_with_its_tables(pages):
    assert disagreements(pages) == []


def test_pages_keep_what_they_say_of_a_preset_without_a_run(pages, tmp_path):
    copy = shutil.copytree(pages, tmp_path / "docs")
    run_of(tmp_path / "outputs", "knob", preset="knob_temperature", budget="laptop", **(OTHER | {"measured": 0.25}))
    scoreboard("all", tmp_path, pages=copy, outputs=tmp_path / "outputs")
    assert disagreements(copy) == []
    for name in ("presets/dong_fig4_sorting/paths.png", "dong_et_al_2021.md"):
        assert (copy / name).read_bytes() == (pages / name).read_bytes()
    was, now = ((folder / "presets" / "knob_temperature" / "verdicts.csv").read_text() for folder in (pages, copy))
    assert "0.25" in now and "0.25" not in was
    was, now = (read_table(folder / "presets.csv").set_index("preset").command for folder in (pages, copy))
    assert was["dong_fig4_sorting"] == now["dong_fig4_sorting"]


def test_pages_are_written_again_without_any_run(pages, tmp_path):
    """As in a clone: with the scoreboard of all that the pages know, its figures the files next to it."""
    copy = shutil.copytree(pages, tmp_path / "docs")
    (copy / "scoreboard.html").unlink()
    scoreboard("all", tmp_path, pages=copy, outputs=tmp_path / "nothing")
    files = [path.relative_to(pages) for path in pages.rglob("*.*")]
    assert all((copy / file).read_bytes() == (pages / file).read_bytes() for file in files)
    page = (copy / "scoreboard.html").read_text()
    assert '<details open id="dong_fig4_sorting"' in page and 'id="claim-knob_temperature"' in page
    sources = re.findall(r'<img [^>]*src="([^"]+)"', page)
    assert "presets/dong_fig4_sorting/paths.png" in sources and all((copy / source).exists() for source in sources)
    links = re.findall(r'href="([^#"]+)"', page)
    assert len(links) > 5 and all((copy / link).exists() for link in links)


def test_a_page_opens_with_sentences_and_folds_its_tables(pages):
    lines = (pages / "dong_et_al_2021.md").read_text().splitlines()
    first = lines.index("1 claim: 1 partly held.")
    sentence = lines[first + 2]
    assert sentence.startswith("- **partly held**: ") and "0.5 [0.98, 0.995] (95 %, 5 seeds)" in sentence
    anchor = re.search(r"\(#([^)]+)\)", sentence)[1]
    assert "### dong_fig4_whole_sorting: partly held" in lines and anchor == "dong_fig4_whole_sorting-partly-held"
    picture = "![paths of dong_fig4_sorting](presets/dong_fig4_sorting/paths.png)"
    assert first < lines.index("## Presets") < lines.index(picture) < lines.index("## Claims")
    for page in pages.glob("*.md"):
        folds = 0
        for line in page.read_text().splitlines():
            folds += line.count("<details>") - line.count("</details>")
            assert folds == 1 if line.startswith("| ") else folds in (0, 1), (page.name, line)


@pytest.mark.skipif(not (DOCS / "results" / "README.md").exists(), reason="no results are kept here")
def test_the_results_that_are_kept_agree_with_their_tables():
    assert disagreements(DOCS / "results") == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("README.md", "(dong_et_al_2021.md) | 1 | 0 | 1 |", "(dong_et_al_2021.md) | 1 | 1 | 0 |"),
        ("README.md", "| all | 2 |", "| all | 3 |"),
        ("statements.csv", "partly held", "held"),
        ("presets/dong_fig4_sorting/verdicts.csv", "0.5", "0.6"),
    ],
)
def test_a_doctored_result_is_found_out(pages, tmp_path, name, old, new):
    copy = shutil.copytree(pages, tmp_path / "copy")
    text = (copy / name).read_text()
    assert old in text
    (copy / name).write_text(text.replace(old, new))
    assert disagreements(copy)


def test_a_page_of_a_paper_has_all_that_its_verdicts_rest_on(pages):
    text = (pages / "dong_et_al_2021.md").read_text()
    for part in (
        "### dong_fig4_whole_sorting: partly held",
        "held in 1 of 2 settings",
        "- Source: Dong et al. 2021, sec. 4.3",
        "- Refuted by: less",
        "- Control, in which it must fail: it is not so",
        "- Measured: 0.5 [0.98, 0.995] (95 %, 5 seeds) at task.label=1, claimed &gt; 0.95",
        "- Published: 0.98",
        "| task.label=0 | held | 0.99 [0.98, 0.995] (95 %, 5 seeds) | 0.001 |",
        "    rankbench train experiment=dong_fig4_sorting budget=laptop\n",  # as it was typed, but for the folder
        "Commit 0123456789ab, scale paper",
        "[summary.csv](presets/dong_fig4_sorting/summary.csv)",
        "![paths of dong_fig4_sorting](presets/dong_fig4_sorting/paths.png)",
    ):
        assert part in text
    links = [link for page in pages.glob("*.md") for link in re.findall(r"\]\(([^)#]+)", page.read_text())]
    assert links and all((pages / link).exists() for link in links)


def test_the_scoreboard_counts_by_paper_and_has_an_address_for_each_claim_and_preset(pages):
    page = (pages.parent / "scoreboard.html").read_text()
    totals = {paper: re.findall(r"\d+", counts) for paper, counts in re.findall(r'">([^<>]+)</a></td>(.*?)</tr>', page)}
    assert totals["Dong et al. 2021"] == list("101000") and totals["Giorlandino and Goldt 2025"] == list("100010")
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names)) and set(re.findall(r'href="#([^"]+)"', page)) <= set(names)
    addresses = {"dong_et_al_2021", "dong_fig4_sorting", "claim-dong_fig4_whole_sorting", "claim-knob_temperature"}
    assert addresses <= set(names)
    assert "Accuracy by path length" in page and "To repeat it: <code>rankbench train" in page


@pytest.mark.further
@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")
def test_a_browser_filters_the_claims_and_opens_what_an_address_names(pages):
    script = """(() => {
    const rows = [...document.querySelectorAll("tr[data-outcome]")];
    const shown = () => rows.filter(row => row.checkVisibility()).map(row => row.id);
    const seen = [shown()];
    location.hash = "claim-knob_temperature"; unfold(); seen.push(shown());
    for (const [name, value] of [["outcome", "partly held"], ["outcome", ""], ["words", "sorts dong"], ["words", ""],
                                 ["source", "giorlandino_and_goldt_2025"], ["words", "no such claim"]]) {
      form[name].value = value; form.dispatchEvent(new Event("input")); seen.push(shown());
    }
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    return {seen, over: document.documentElement.scrollWidth - innerWidth};
    })()"""
    with Browser((pages.parent / "scoreboard.html").as_uri(), width=390) as browser:
        seen = browser.see(script)
    dong, knob = ["claim-dong_fig4_whole_sorting"], ["claim-knob_temperature"]
    assert seen["seen"] == [[], knob, dong, [], dong, [], knob, []] and seen["over"] <= 0


def test_badges_say_what_the_tables_say(pages):
    """Of the pages of two presets, and of those that are kept."""
    for folder in (pages, DOCS / "results"):
        statements, boards = (records(read_table(folder / f"{name}.csv")) for name in ("statements", "presets"))
        claims = [row["outcome"] for row in statements if row["kind"] == "claim"]
        ran = len([board for board in boards if board["note"] != "not run"])
        wanted = {"claims": f"{claims.count('held')} of {len(claims)}", "presets": f"{ran} of {len(boards)}"}
        for name, value in wanted.items():
            nodes = ElementTree.parse(folder / f"{name}.svg").iter()
            assert [node.text for node in nodes if node.tag.endswith("text")][1] == value, folder


def test_what_a_person_wrote_is_kept_and_shown(pages):
    assert "What a person says of <it>." in (pages / "giorlandino_and_goldt_2025.md").read_text()
    assert "What a person says of all." in (pages / "README.md").read_text()


@pytest.mark.further
def test_a_large_figure_is_made_to_fit(pages, tmp_path):
    figure = pages / "presets" / "dong_fig4_sorting" / "paths.png"
    assert figure.stat().st_size <= 200_000
    with Image.open(figure) as picture:
        assert picture.format == "PNG" and picture.width / picture.height == pytest.approx(1.5, abs=0.02)
    rows = np.linspace(0, 255, 300)[:, None, None] * np.ones((1, 400, 3))  # more shades than a palette has
    noise = np.random.default_rng(0).integers(0, 6, (300, 400, 3))
    Image.fromarray((rows * [1, 0.5, 0.2] + noise).clip(0, 255).astype("uint8")).save(tmp_path / "large.png")
    with Image.open(io.BytesIO(png_within(tmp_path / "large.png", 50_000))) as picture:
        assert picture.mode == "RGB" and picture.width / picture.height == pytest.approx(400 / 300, rel=0.01)
        right, ends = picture.width // 2, (0, picture.height - 1)
        colours = [picture.getpixel((right, y)) for y in ends]
    assert np.abs(np.subtract(colours, [(3, 2, 2), (255, 130, 53)])).max() <= 6
    (tmp_path / "small.png").write_bytes(PIXEL)
    assert png_within(tmp_path / "small.png", 200_000) == PIXEL


def test_a_file_that_is_no_page_is_not_overwritten(outputs, tmp_path):
    run_of(outputs, "one")
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(ConfigError, match=r"pages=.*: README.md there was not written by this command"):
        scoreboard("all", tmp_path / "out", pages=tmp_path, outputs=outputs)
    assert (tmp_path / "README.md").read_text() == "# My project\n" and not (tmp_path / "out").exists()


def test_a_paper_without_claims_loses_its_page(pages, tmp_path):
    copy = shutil.copytree(pages, tmp_path / "copy")
    shutil.copytree(pages.parent / "outputs" / "train" / "knob", tmp_path / "outputs" / "train" / "knob")
    (copy / "presets.csv").unlink()  # the pages say nothing of presets without a run any more
    scoreboard("all", tmp_path, pages=copy, outputs=tmp_path / "outputs")
    assert not (copy / "dong_et_al_2021.md").exists() and disagreements(copy) == []

"""rankbench.report.scoreboard: which run of a preset is shown, and what is said of it."""

import html.parser
import json
import os

import pandas as pd
import pytest
import yaml

from rankbench.keys import ConfigError
from rankbench.report.scoreboard import check_experiment, presets, scoreboard
from rankbench.runs.tables import read_table

CLAIM = {"claim": "dong_fig4_whole_sorting", "kind": "claim", "where": "", "outcome": "held", "measured": 0.99}
CLAIM |= {"low95": 0.98, "high95": 0.995, "interval": "t of logits", "is_bound": False, "published": 0.98}
CLAIM |= {
    "claimed": "> 0.95",
    "num_seeds": 5,
    "num_repeats": 5,
    "repeats": "seed",
    "reason": "",
    "control": "it is not so",
}
CLAIM |= {"statement": "It sorts.", "source": "D"}
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


def run_of(outputs, name, preset="demo", budget=None, status="finished", written=1000, **verdict):
    """A folder as `rankbench train experiment=<preset>` leaves it, as far as the scoreboard looks."""
    folder = outputs / "train" / name
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "hydra.yaml").write_text(record(preset))
    (folder / "config.yaml").write_text(yaml.safe_dump({"budget": budget}))
    (folder / "summary.json").write_text(json.dumps({"status": status, "seeds": []}))
    pd.DataFrame([CLAIM | verdict]).to_csv(folder / "verdicts.csv", index=False)
    (folder / "paths.png").write_bytes(PIXEL)
    for path in (folder / "summary.json", folder / "verdicts.csv"):
        os.utime(path, (written, written))
    return folder


def scoreboard_of(outputs, tmp_path, experiment="all"):
    lines = scoreboard(experiment, tmp_path, outputs)
    return read_table(tmp_path / "scoreboard.csv"), lines


def test_every_preset_has_a_row_and_its_command(outputs, tmp_path):
    run_of(outputs, "one")
    table, lines = scoreboard_of(outputs, tmp_path)
    assert list(table.preset.unique()) == list(presets())
    assert (table[table.preset != "demo"].outcome == "not run").all()
    assert lines[0].startswith(f"1 of {len(presets())} presets run; ")
    assert all(command.startswith("rankbench ") and name in command for name, command in presets().items())
    page = (tmp_path / "scoreboard.html").read_text()
    assert all(command in page for name, command in presets().items() if name != "demo")


def test_our_number_stands_beside_the_published_one(outputs, tmp_path):
    folder = run_of(outputs, "one")
    table, lines = scoreboard_of(outputs, tmp_path, "demo")
    (row,) = table.to_dict("records")
    assert (row["outcome"], row["measured"], row["published"], row["num_repeats"]) == ("held", 0.99, 0.98, 5)
    assert row["budget"] == "paper" and row["folder"] == str(folder)
    measured = "measured 0.99 [0.98, 0.995] (95 %, 5 seeds)"
    assert f"held       demo: dong_fig4_whole_sorting: {measured}, published 0.98" in lines
    assert "| 0.99 [0.98, 0.995] | 0.98 | &gt; 0.95 | 5 seeds |" in (tmp_path / "scoreboard.md").read_text()
    for suffix in ("md", "tex"):
        assert "0.98" in (tmp_path / f"scoreboard.{suffix}").read_text()


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"written": 1000}, {"written": 2000}),
        ({"budget": "smoke", "written": 2000}, {"budget": "laptop"}),
        ({"budget": "laptop", "written": 2000}, {"budget": None}),
        ({"status": "running", "written": 2000}, {"budget": "smoke"}),
    ],
)
def test_the_newest_complete_run_at_the_largest_scale_is_shown(outputs, tmp_path, worse, better):
    run_of(outputs, "a", **worse, measured=0.1)
    run_of(outputs, "b", **better, measured=0.2)
    table, _ = scoreboard_of(outputs, tmp_path, "demo")
    assert table.measured.tolist() == [0.2]


def test_a_sweep_is_known_by_its_own_record(outputs, tmp_path):
    sweep = outputs / "train" / "sweep"
    for number in (0, 1):
        run_of(outputs, f"sweep/{number}_task.label={number}")
    (sweep / "multirun.yaml").write_text(record("dong_fig4_sorting"))
    pd.DataFrame([CLAIM | {"where": f"task.label={number}"} for number in (0, 1)]).to_csv(
        sweep / "verdicts.csv", index=False
    )
    table, _ = scoreboard_of(outputs, tmp_path, "dong_fig4_sorting")
    assert table["where"].tolist() == ["task.label=0", "task.label=1"]


def test_what_no_preset_made_is_left_out(outputs, tmp_path):
    run_of(outputs, "one")
    run_of(outputs, "two", preset=None, written=5000, measured=0.3)
    (run_of(outputs, "three", written=6000, measured=0.4) / ".hydra" / "hydra.yaml").write_text("{not yaml")
    table, _ = scoreboard_of(outputs, tmp_path, "demo")
    assert table.measured.tolist() == [0.99]


def test_a_run_without_verdicts_says_so(outputs, tmp_path):
    (run_of(outputs, "one") / "verdicts.csv").unlink()
    table, lines = scoreboard_of(outputs, tmp_path, "demo")
    assert table.outcome.tolist() == ["not judged"] and "not judged demo" in lines


def test_what_could_not_be_measured_is_told_without_a_number(outputs, tmp_path):
    run_of(outputs, "one", outcome="undecided", measured=float("nan"))
    _, lines = scoreboard_of(outputs, tmp_path, "demo")
    assert "undecided  demo: dong_fig4_whole_sorting: not measured, published 0.98" in lines


def test_a_bound_is_no_measurement(outputs, tmp_path):
    run_of(outputs, "one", measured=-12.5, low95=float("nan"), high95=float("nan"), interval="none", is_bound=True)
    _, lines = scoreboard_of(outputs, tmp_path, "demo")
    assert "held       demo: dong_fig4_whole_sorting: measured at most -12.5 (5 seeds), published 0.98" in lines
    for name in ("scoreboard.md", "scoreboard.html"):
        assert "≤ -12.5" in (tmp_path / name).read_text()


def test_checks_of_the_tool_stand_apart_from_claims(outputs, tmp_path):
    folder = run_of(outputs, "one")
    check = CLAIM | {"kind": "check", "claim": "paths_sum_to_output", "outcome": "passed"}
    pd.DataFrame([CLAIM, check]).to_csv(folder / "verdicts.csv", index=False)
    _, lines = scoreboard_of(outputs, tmp_path, "demo")
    assert lines[0].endswith("1 held, 1 passed")
    text = (tmp_path / "scoreboard.md").read_text()
    assert text.index("dong_fig4_whole_sorting") < text.index("Checks of the tool") < text.index("paths_sum_to_output")
    page = (tmp_path / "scoreboard.html").read_text()
    assert (
        page.index("dong_fig4_whole_sorting") < page.index(">Checks of the tool<") < page.index("paths_sum_to_output")
    )


def test_verdicts_from_before_there_were_controls_do_not_count(outputs, tmp_path):
    folder = run_of(outputs, "one")
    pd.read_csv(folder / "verdicts.csv").drop(columns="control").to_csv(folder / "verdicts.csv", index=False)
    table, lines = scoreboard_of(outputs, tmp_path, "demo")
    assert table.outcome.tolist() == ["not judged"] and table.claim.isna().all()
    assert "not judged demo: judged without controls: report it again" in lines


def test_the_page_needs_nothing_else_and_links_to_the_run(outputs, tmp_path):
    folder = run_of(outputs, "one & two")
    scoreboard_of(outputs, tmp_path)
    targets = {"src": [], "href": []}

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            for name, value in attributes:
                if name in targets:
                    targets[name].append(value)

    Reader().feed((tmp_path / "scoreboard.html").read_text())
    assert len(targets["src"]) == 1 and all(source.startswith("data:image/png;base64,") for source in targets["src"])
    assert "outputs/train/one%20%26%20two/" in targets["href"]
    assert not [link for link in targets["href"] if "//" in link]
    assert folder.exists()


def test_nothing_run_yet_and_unknown_presets_are_told(outputs, tmp_path):
    with pytest.raises(ConfigError, match=r"experiment=demo: not run yet under .*; run it with `rankbench train exp"):
        scoreboard("demo", tmp_path, outputs)
    with pytest.raises(ConfigError, match=r"experiment=dmo: unknown, did you mean demo\?; allowed are all, "):
        check_experiment("dmo")
    check_experiment("all")


def test_the_figures_of_final_numbers_are_left_out_however_many_pages_they_have(outputs, tmp_path):
    folder = run_of(outputs, "one")
    for name in ("sweep", "sweep_1", "sweep_12", "residual_1"):
        (folder / f"{name}.png").write_bytes(PIXEL)
    scoreboard_of(outputs, tmp_path, "demo")
    page = (tmp_path / "scoreboard.html").read_text()
    assert "residual_1 of demo" in page and "paths of demo" in page and "sweep" not in page.split("<main>")[1]

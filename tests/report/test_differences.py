"""Differences from a baseline in `rankbench report`: against tables written by hand and SciPy's tests."""

import numpy as np
import pandas as pd
import pytest
from hand_written import write_run
from refusals import refusal
from scipy import stats

from rankbench.config.schema import StudyKeys
from rankbench.plots.sweep import draw_differences
from rankbench.report.differences import MOST_LINES, baseline_in, differences, printed, sentences
from rankbench.report.jobs import find_runs
from rankbench.report.report import check_study, gather

pytestmark = pytest.mark.usefixtures("unpainted")
# accuracy by attention and seed; sigmoid shares no seed with the others
ACCURACIES = {
    "dot": {0: 0.50, 1: 0.61, 2: 0.68, 3: 0.80},
    "l2": {0: 0.41, 1: 0.50, 2: 0.60, 3: 0.71, 4: 0.10},
    "cosine": {0: 0.51, 1: 0.60, 2: 0.69, 3: 0.79},
    "sigmoid": {7: 0.2, 8: 0.3, 9: 0.1},
}
KEY = "model.attention"
DOT = {KEY: "dot"}


def rows_of(accuracies):
    rows = [
        {"run": name, KEY: name, "seed": seed, "test_accuracy": value}
        for name, of_seed in accuracies.items()
        for seed, value in of_seed.items()
    ]
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Runs of four attentions, one of them on other seeds, and their report against dot."""
    home = tmp_path_factory.mktemp("differences")
    for number, (attention, of_seed) in enumerate(ACCURACIES.items()):
        seeds = [{"seed": seed, "test_accuracy": value} for seed, value in of_seed.items()]
        write_run(home / "runs" / str(number), {"model": {"attention": attention}}, seeds)
    lines = gather(find_runs(str(home / "runs")), home / "report", baseline="dot")
    (home / "said.txt").write_text("\n".join(lines))
    return home


def check_against_scipy(table):
    """Compare the rows of a table of ACCURACIES with SciPy's tests of the same numbers."""
    dot = ACCURACIES["dot"]
    for name, row in table.set_index(KEY).iterrows():
        shared = [seed for seed in ACCURACIES[name] if seed in dot]
        own, others = [ACCURACIES[name][seed] for seed in shared], [dot[seed] for seed in shared]
        if shared:
            test, pairing = stats.ttest_rel(own, others), "by seed"
        else:
            own, others = list(ACCURACIES[name].values()), list(dot.values())
            test, pairing = stats.ttest_ind(own, others, equal_var=False), "unpaired"
        ends = test.confidence_interval(0.95)
        assert (row.pairing, row.num_seeds, row.num_baseline_seeds) == (pairing, len(own), len(others))
        assert (row["mean"], row.baseline_mean) == pytest.approx((np.mean(own), np.mean(others)))
        assert row.difference == pytest.approx(np.mean(own) - np.mean(others))
        assert (row.low95, row.high95) == pytest.approx((ends.low, ends.high))
        assert row.p_value == pytest.approx(test.pvalue)
    # Holm: the smallest p times 3, the next times 2, the largest as it is, and never falling
    smallest, middle, largest = np.sort(table.p_value)
    adjusted = np.maximum.accumulate([3 * smallest, 2 * middle, largest])
    assert np.sort(table.p_holm) == pytest.approx(adjusted)


def test_the_report_has_the_differences_that_scipy_finds(home):
    table = pd.read_csv(home / "report" / "differences.csv")
    assert list(table[KEY]) == ["l2", "cosine", "sigmoid"] and set(table.baseline) == {"model.attention=dot"}
    check_against_scipy(table)


def test_seeds_that_are_paired_count_by_seed_and_not_by_row(home):
    table = differences(rows_of(ACCURACIES), [KEY], ["test_accuracy"], DOT)
    shuffled = differences(rows_of(ACCURACIES).sample(frac=1, random_state=0), [KEY], ["test_accuracy"], DOT)
    numbers = [part.set_index(KEY).loc["l2", ["difference", "low95", "p_value"]] for part in (table, shuffled)]
    assert numbers[1].tolist() == pytest.approx(numbers[0].tolist())
    # rows 0, 1, 2 of two configurations on other seeds are no pairs
    moved = {"dot": ACCURACIES["dot"], "l2": {seed + 50: value for seed, value in ACCURACIES["l2"].items()}}
    assert list(differences(rows_of(moved), [KEY], ["test_accuracy"], DOT).pairing) == ["unpaired"]


def test_terminal_and_page_say_the_differences_in_words(home):
    said, page = (home / "said.txt").read_text(), (home / "report" / "report.html").read_text()
    l2 = "l2 against dot: final test accuracy -0.093 [-0.113, -0.072]"
    # an interval of -0.0184 to 0.0184 round 0
    cosine = "cosine against dot: final test accuracy no difference shown (|d| < 0.019)"
    assert l2 in said and cosine in said
    assert "sigmoid against dot (no pairs of seeds, so unpaired): final test accuracy -0.45 [-0.67, -0.23]" in said
    assert l2 in page and "Differences from model.attention=dot" in page and 'id="figure-differences"' in page
    assert "paired by seed where seeds are shared" in page
    assert (home / "report" / "differences.png").exists()


def test_a_difference_counts_only_after_holm():
    """Of 20 columns of noise some intervals exclude 0; none of them is called a difference."""
    rng = np.random.default_rng(1)
    rows = pd.DataFrame({KEY: ["dot"] * 5 + ["l2"] * 5, "seed": [*range(5)] * 2})
    columns = [f"t.c{number}" for number in range(20)]
    rows = rows.assign(**{column: rng.normal(size=10) for column in columns})
    table = differences(rows, [KEY], columns, DOT)
    assert (table.p_value < 0.05).any() and not (table.p_holm < 0.05).any()
    (sentence,) = sentences(table, [KEY], DOT)
    assert sentence.count("no difference shown") == 20
    (figure,) = [draw_differences(table[table.column == "t.c0"])]
    assert figure.axes[0].get_legend_handles_labels()[1] == ["p of 0.05 or more, or no interval"]


def test_the_figure_has_the_tables_intervals_a_zero_line_and_filled_marks_where_p_is_small(home):
    table = pd.read_csv(home / "report" / "differences.csv")
    (axes,) = draw_differences(table).axes
    drawn = {}
    for container in axes.containers:
        is_filled = container.lines[0].get_markerfacecolor() != "white"
        for segment in container.lines[2][0].get_segments():
            drawn[int(segment[0][1])] = (*segment[:, 0], is_filled)
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["attention l2", "attention cosine", "attention sigmoid"]
    for number, row in enumerate(table.itertuples()):
        assert drawn[number] == pytest.approx((row.low95, row.high95, row.p_holm < 0.05))
    assert [line.get_xdata() for line in axes.lines if list(line.get_xdata()) == [0, 0]]


def test_long_names_of_configurations_leave_the_panels_their_room():
    rows = rows_of({name: ACCURACIES[name] for name in ("dot", "l2", "cosine")})
    keys = [KEY, *(f"trainer.key{number}" for number in range(12))]
    table = differences(rows.assign(**dict.fromkeys(keys[1:], "0.001")), keys, ["test_accuracy"], DOT)
    figure = draw_differences(table)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.bbox.width > figure.bbox.width / 3
    for name in axes.get_yticklabels():
        assert name.get_window_extent().height <= axes.bbox.height / 2  # of two rows
        assert name.get_window_extent().width < figure.bbox.width * 2 / 3


def test_keys_that_the_baseline_leaves_out_are_the_same_on_both_sides():
    values = {("dot", 2): (0.5, 0.6), ("dot", 4): (0.7, 0.9), ("l2", 2): (0.4, 0.4), ("l2", 4): (0.1, 0.2)}
    rows = [
        {KEY: attention, "model.layers": layers, "seed": seed, "test_accuracy": value}
        for (attention, layers), of_seed in values.items()
        for seed, value in enumerate(of_seed)
    ]
    rows, keys = pd.DataFrame(rows), [KEY, "model.layers"]
    matched = differences(rows, keys, ["test_accuracy"], baseline_in("dot", rows[keys]))
    assert matched[[*keys, "difference"]].to_dict("list") == {
        KEY: ["l2", "l2"],
        "model.layers": ["2", "4"],
        "difference": pytest.approx([-0.15, -0.65]),
    }
    assert sentences(matched, keys, DOT)[0].startswith("attention=l2, layers=2 against the same with attention=dot: ")
    first = baseline_in(None, rows[keys])
    assert first == {KEY: "dot", "model.layers": "2"}
    assert len(differences(rows, keys, ["test_accuracy"], first)) == 3


def test_tasks_are_not_compared_unless_the_user_asks():
    rows = pd.DataFrame(
        {"task": task, KEY: attention, "seed": seed, "test_loss": loss + 0.1 * (attention == "l2") + 0.01 * seed}
        for task, loss in (("sorting", 1.0), ("linear_regression", 30.0))
        for attention in ("dot", "l2")
        for seed in (0, 1)
    )
    table = differences(rows, keys := ["task", KEY], ["test_loss"], first := baseline_in(None, rows[keys]))
    assert table.difference.tolist() == pytest.approx([0.1, 0.1]) and first == DOT
    dot = rows[rows[KEY] == "dot"]
    assert differences(dot, ["task"], ["test_loss"], baseline_in(None, dot[["task"]])).empty
    assert len(differences(dot, ["task"], ["test_loss"], baseline_in("sorting", dot[["task"]]))) == 1


def test_one_shared_seed_has_a_difference_without_interval():
    table = differences(rows_of({"dot": {0: 0.5}, "l2": {0: 0.25}}), [KEY], ["test_accuracy"], DOT)
    assert np.isnan([table.low95[0], table.p_holm[0]]).all()
    (sentence,) = sentences(table, [KEY], DOT)
    assert sentence == "l2 against dot (one shared seed, so no interval): final test accuracy -0.25"
    draw_differences(table)


def test_equal_numbers_are_no_difference_and_many_lines_are_cut():
    of_seed = {0: 0.5, 1: 0.7}
    table = differences(rows_of({"dot": of_seed, "l2": of_seed}), [KEY], ["test_accuracy"], DOT)
    assert sentences(table, [KEY], DOT) == ["l2 against dot: final test accuracy no difference"]
    assert printed(["a"] * (MOST_LINES + 2)) == ["a"] * MOST_LINES + ["... and 2 more in differences.csv"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dott", "no value of a key that varies, did you mean dot?"),
        ("model.attention=dott", "no run has model.attention=dott, did you mean dot?"),
        ("model.atention=dot", "does not vary between these runs, did you mean model.attention?"),
        ("model.attention=", "give key=value,key=value, as in model.attention=dot"),
    ],
)
def test_a_baseline_that_is_no_runs_is_refused_before_anything_is_read(home, text, said, monkeypatch):
    monkeypatch.setattr("rankbench.report.report.read_all", lambda *_: pytest.fail("tables were read"))
    study = StudyKeys(None, None, None, ["test_accuracy"], None)
    line = refusal(check_study, study, find_runs(str(home / "runs")), text)
    assert line.startswith(f"report.baseline={text}: ") and said in line


def test_a_baseline_has_the_values_of_one_run():
    runs = pd.DataFrame({"a": [1, 2], "b": [1, 2]})
    assert "no run has all of these values; give those of one run, as in a=1" in refusal(baseline_in, "a=1,b=2", runs)
    assert "no key varies between these runs" in refusal(baseline_in, "1", runs[[]])


def test_values_of_configs_and_of_tables_are_the_same_words():
    configs = pd.DataFrame({"a": ["0.0001", "1000000", ""], "b": ["true", "1e-05", "x"]})
    tables = pd.DataFrame({"a": [1e-4, 1e6, np.nan], "b": ["true", 1e-05, "x"]})
    for row in range(3):
        assert baseline_in(None, configs[row:]) == baseline_in(None, tables[row:])
    assert baseline_in("a=1e6", tables) == {"a": "1000000"}

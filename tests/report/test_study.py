"""`rankbench report` with chosen columns, and `rankbench plot`: against tables written by hand, pandas and SciPy."""

import re

import numpy as np
import pandas as pd
import pytest
from hand_written import write_run
from refusals import refusal
from scipy import stats

from rankbench.commands.compose import compose
from rankbench.config.schema import StudyKeys
from rankbench.plots import fit
from rankbench.plots.sweep import draw_scatter, draw_sweep
from rankbench.report.figures import Drawing, drawable, redraw
from rankbench.report.jobs import find_runs
from rankbench.report.report import check_study, gather
from rankbench.report.study import rank_correlation, rank_correlations, values_of
from rankbench.runs.tables import with_errors

RHO = {"over": "configurations", "configuration": "", "rank_correlation": 0.5, "low95": 0.25, "high95": 0.75}
RHO["num_seeds"] = 3
WHERE = "weights=initialised,layer=last,sublayer=last"
RANK = {(2, "pre"): 3.0, (2, "none"): 1.5, (4, "pre"): 2.5, (4, "none"): 1.2}


def rank_at(layers, norm, layer, sublayer, seed):
    return RANK[layers, norm] + 10 * layer + (5 if sublayer == "mlp" else 0) + seed / 100


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Runs of two depths with and without a norm, three seeds each, and their report on two columns."""
    home = tmp_path_factory.mktemp("study")
    for number, (layers, norm) in enumerate(RANK):
        seeds = [{"test_accuracy": layers / 10 + seed / 50 + (norm == "pre") / 4} for seed in range(3)]
        rows = [
            {"run": str(number), "task": "sorting", "model": "san", "seed": seed, "weights": weights, "variant": "full"}
            | {"layer": layer, "sublayer": sublayer, "dtype": "float64", "relative_noise_floor": 2.0**-52}
            | {"relative_residual": 0.5}
            | {"effective_rank": rank_at(layers, norm, layer, sublayer, seed) if sublayer != "weights" else None}
            for seed in range(3)
            for weights in ("trained", "initialised")
            for layer in range(1, layers + 1)
            for sublayer in ("weights", "attention", "mlp")
        ]
        write_run(home / "runs" / str(number), {"model": {"layers": layers, "norm": norm}}, seeds, residual=rows)
    chosen = StudyKeys(value=["residual.effective_rank", "test_accuracy"], where=WHERE)
    check_study(chosen, find_runs(str(home / "runs")))
    lines = gather(find_runs(str(home / "runs")), home / "report", chosen=chosen)
    (home / "said.txt").write_text("\n".join(lines))
    return home


@pytest.mark.further
def test_a_study_is_one_value_of_each_run_and_seed_as_figure_and_table(home):
    table = pd.read_csv(home / "report" / "residual_effective_rank.csv")
    assert len(table) == 12
    for row in table.itertuples():
        layers, norm = list(RANK)[row.run]
        assert row.effective_rank == pytest.approx(rank_at(layers, norm, layers, "mlp", row.seed), abs=1e-12)
    summary = pd.read_csv(home / "report" / "summary.csv").set_index(["model.layers", "model.norm"])
    for (layers, norm), row in summary.iterrows():
        of_seeds = [rank_at(layers, norm, layers, "mlp", seed) for seed in range(3)]
        mean = np.mean(of_seeds)
        ends = mean * np.exp(stats.t.interval(0.95, 2, 0, stats.sem(of_seeds) / mean))  # ranks are above 0
        assert (row["residual.effective_rank_low95"], row["residual.effective_rank_high95"]) == pytest.approx(ends)
    for name in ("residual_effective_rank", "test_accuracy_by_residual_effective_rank", "sweep"):
        assert (home / "report" / f"{name}.png").exists() and f"{name}.png" in (home / "said.txt").read_text()
    page = (home / "report" / "report.html").read_text()
    assert "effective rank (residual) by model.layers" in page and "layer=last, sublayer=last" in page


@pytest.mark.further
def test_the_rank_correlation_is_the_mean_of_the_seeds_on_the_scale_of_fisher(home):
    (row,) = pd.read_csv(home / "report" / "correlations.csv").to_dict("records")
    assert (row["num_seeds"], row["num_configurations"]) == (3, 4)
    assert row["rank_correlation"] == pytest.approx(0.8)  # ranks 2 1 4 3 and 3 1 4 2 in each seed: 1 - 6 * 2 / 60
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"k": np.repeat(range(9), 4), "seed": list(range(4)) * 9})
    rows = rows.assign(x=rows.k + rng.normal(0, 3, 36), y=rows.k + rng.normal(0, 3, 36))
    found = rank_correlation(rows, "x", "y", ["k"])
    of_seed = np.array([stats.spearmanr(part.x, part.y).statistic for _, part in rows.groupby("seed")])
    error = stats.sem(of_seed) / (1 - of_seed.mean() ** 2)  # the delta method for arctanh
    ends = np.tanh(np.arctanh(of_seed.mean()) + stats.t.ppf([0.025, 0.975], 3) * error)
    assert (found["low95"], found["high95"]) == pytest.approx(tuple(ends))
    few = rank_correlation(rows[rows.k < 2], "x", "y", ["k"])
    assert few["num_seeds"] == 0 and np.isnan(few["rank_correlation"])


def test_a_column_of_the_table_can_be_the_axis(home, tmp_path, unpainted_here):
    chosen = StudyKeys("layer", "model.norm", "model.layers", ["residual.effective_rank"], "weights=trained")
    runs = find_runs(str(home / "runs"))
    chosen.where += ",sublayer=first"
    gather(runs, tmp_path, chosen=chosen)
    table = pd.read_csv(tmp_path / "residual_effective_rank.csv")
    assert len(table) == 3 * 2 * (2 + 4) and list(table[table["model.layers"] == 4].layer.unique()) == [1, 2, 3, 4]
    assert "residual.effective_rank" not in pd.read_csv(tmp_path / "sweep.csv")


@pytest.mark.parametrize(
    ("value", "where", "x", "said"),
    [
        (["residual.effective_rank"], "layer=mean", "dtyp", "no key of these runs, did you mean dtype?"),
        (["effective_rank"], None, None, "give it with its table, as in residual.effective_rank"),
        (["spectrum.share"], None, None, "no run has a table spectrum; measure one run with `rankbench analyze"),
        (["residual.effective_rnk"], None, None, "did you mean residual.effective_rank?"),
        (["residuel.effective_rank"], None, None, "did you mean residual?"),
        (["residual.variant"], None, None, "a column of words"),
        (["residual.seed"], None, None, "a column of seeds, which are averaged over"),
        (["test_accuracy"], None, "seed", "report.series=seed draws a line for each of them"),
        (["residual.effective_rank"], "layer=1,layer=2", None, "names a column twice"),
        (["residual.effective_rank"], "layer=mean", "layer", "values of layer are drawn apart"),
        (["residual.effective_rank"], "seed=mean", None, "values of seed are drawn apart"),
        (["residual.layer"], WHERE, "layer", "x, series or facet of its own figure"),
        (["residual.effective_rank"], "layer=7", None, "layer=7 leaves no row"),
        (["residual.effective_rank"], "lyer=last", None, "did you mean layer?"),
        (["residual.effective_rank"], "last", None, "give column=value"),
        ([], WHERE, None, "report.value, which is empty"),
        (["residual.effective_rank", "test_accuracy"], "weights=trained,sublayer=last", "layer", "compared run by run"),
        (["test_accuracy"], None, "lyer", "no key of these runs"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_written(home, value, where, x, said, monkeypatch):
    if not re.search("a column of|leaves no row|compared run by run|drawn apart|own figure", said):  # need rows
        monkeypatch.setattr("rankbench.report.report.read_all", lambda *_: pytest.fail("a table was read for words"))
    assert said in refusal(check_study, StudyKeys(x, value=value, where=where), find_runs(str(home / "runs")))


def test_the_words_of_the_command_line():
    words = ["report.value=residual.effective_rank", f"report.where={WHERE}"]
    cfg = compose("report", *words, "report.baseline=model.attention=dot,model.layers=2")
    assert (cfg.report.value, cfg.report.where) == (["residual.effective_rank"], WHERE)
    assert cfg.report.baseline == "model.attention=dot,model.layers=2" and compose("report").report.baseline is None
    # plot takes the path of a table as it is printed
    cfg = compose("plot", "a/3_model=san,model.heads=2/residual.csv", "plot.column=single")
    assert (cfg.table, cfg.plot.column) == ("a/3_model=san,model.heads=2/residual.csv", "single")


def test_a_condition_on_numbers_compares_numbers_and_first_is_of_each_run():
    rows = pd.DataFrame({"run": ["a", "a", "b", "b"], "seed": 0, "step": [10, 20, 30, 40], "y": [1.0, 2.0, 3.0, 4.0]})
    assert list(values_of(rows, "t.y", "step=first", []).y) == [1.0, 3.0]
    assert list(values_of(rows, "t.y", "step=20.0", []).y) == [2.0]


@pytest.mark.further
def test_rows_that_nobody_chose_are_trained_last_and_said(home, tmp_path, undrawn_here):
    runs = find_runs(str(home / "runs"))
    chosen = StudyKeys(None, None, None, ["residual.effective_rank", "test_accuracy"], None)
    check_study(chosen, runs)
    gather(runs, tmp_path, chosen=chosen)
    for row in pd.read_csv(tmp_path / "residual_effective_rank.csv").itertuples():
        layers, norm = list(RANK)[row.run]
        assert row.effective_rank == pytest.approx(rank_at(layers, norm, layers, "mlp", row.seed), abs=1e-12)
    captions = re.findall("<figcaption>(.*?)</figcaption>", (tmp_path / "report.html").read_text())
    said = [caption for caption in captions if "weights=trained, layer=last, sublayer=last (by default)" in caption]
    assert said[0].startswith("effective rank (residual) by model.layers")
    assert said[1].startswith("final test accuracy against effective rank (residual)")
    chosen = StudyKeys(None, None, None, ["residual.effective_rank"], "weights=initialised")
    gather(runs, tmp_path, chosen=chosen)
    assert "weights=initialised; layer=last, sublayer=last (by default)" in (tmp_path / "report.html").read_text()


def by_head(num_layers=2):
    """Rows of a table by layer, sub-layer and head, whose values are 100 x layer + 10 x head + seed."""
    return pd.DataFrame(
        [
            {"run": "a", "task": "t", "model": "m", "seed": seed, "layer": layer, "sublayer": sublayer, "head": head}
            | {"other": layer / 7 + head / 3, "rank": 100 * layer + 10 * head + seed + (sublayer == "mlp") / 2}
            for seed in (0, 1)
            for layer in range(num_layers + 1)
            for sublayer in (("attention", "mlp") if layer else ("input",))
            for head in (1, 2, 4)
        ]
    )


def test_heads_are_averaged_by_default_and_layers_where_asked():
    rows = values_of(by_head(), "t.rank", None, [])
    assert list(rows["rank"]) == pytest.approx([200.5 + 70 / 3, 201.5 + 70 / 3])
    assert rows.attrs["by_default"] == "layer=last, sublayer=last, head=mean"
    rows = values_of(by_head(), "t.rank", "sublayer=mlp,layer=mean,head=4", [])
    assert list(rows["rank"]) == pytest.approx([190.5, 191.5]) and not rows.attrs["by_default"]
    rows = values_of(by_head(), "t.rank", "head=2", [])
    assert list(rows["rank"]) == [220.5, 221.5]


def test_along_the_layers_the_last_sublayer_of_each_counts():
    rows = values_of(by_head(), "t.rank", "head=2", ["layer"])
    assert list(rows["rank"][rows.seed == 0]) == [20, 120.5, 220.5]
    assert rows.attrs["by_default"] == "sublayer=last"


def test_measurements_of_different_things_are_not_chosen_by_default():
    both = pd.concat([by_head().assign(matrix="qk"), by_head().assign(matrix="vo")])
    both = both[["run", "seed", "layer", "sublayer", "head", "matrix", "rank"]]
    assert "differ in matrix (qk, vo); choose one of each" in refusal(values_of, both, "t.rank", None, [])


def noisy(num_configurations, num_seeds=8):
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"k": np.repeat(range(num_configurations), num_seeds)})
    rows = rows.assign(seed=list(range(num_seeds)) * num_configurations, x=rng.normal(size=len(rows)))
    return rows.assign(y=rows.x + rng.normal(size=len(rows)))


@pytest.mark.parametrize("count", [1, 2])
def test_few_configurations_are_correlated_over_their_seeds(count):
    rows = noisy(count)
    found = rank_correlations(rows, "x", "y", ["k"])
    assert [(row["over"], row["configuration"]) for row in found] == [("seeds", f"k={k}") for k in range(count)]
    for row, (_, part) in zip(found, rows.groupby("k"), strict=True):
        r = stats.spearmanr(part.x, part.y).statistic
        error = np.sqrt((1 + r**2 / 2) / 5)  # Bonett and Wright, for 8 seeds
        ends = np.tanh(stats.norm.ppf([0.025, 0.975], np.arctanh(r), error))
        assert (row["rank_correlation"], row["low95"], row["high95"]) == pytest.approx((r, *ends))
    assert [row["over"] for row in rank_correlations(noisy(3), "x", "y", ["k"])] == ["configurations"]


def test_a_run_without_a_key_is_a_configuration_of_its_own(tmp_path, undrawn_here):
    rows = [
        {"run": str(window), "task": "t", "model": "m", "seed": seed, "model.window": window}
        | {"test_loss": seed, "test_accuracy": 0.5 - seed / 9, "job_status": "finished", "status": "finished"}
        for window in (None, 3)
        for seed in range(3)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "sweep.csv", index=False)
    chosen = StudyKeys(facet="model.window", value=["test_loss", "test_accuracy"])
    redraw(tmp_path / "sweep.csv", Drawing(tmp_path, chosen))
    correlated = pd.read_csv(tmp_path / "correlations.csv", keep_default_na=False)
    assert list(correlated.panel) == ["3", "none"]
    assert list(correlated.configuration) == ["model.window=3", "model.window=none"]
    pd.DataFrame(rows[:3]).to_csv(tmp_path / "sweep.csv", index=False)  # none has the key
    assert redraw(tmp_path / "sweep.csv", Drawing(tmp_path, StudyKeys(facet="model.window", value=["test_loss"])))


def test_too_few_seeds_have_no_correlation_and_the_figure_says_so():
    few = noisy(1, 2)
    figure = draw_scatter(few, "x", "y", ["k"], {"": rank_correlations(few, "x", "y", ["k"])})
    assert figure.axes[0].get_title() == "no rank correlation over 2 seeds: too few or equal values"


def test_a_scatter_names_each_configuration_and_gives_it_a_colour():
    rows = noisy(2, 5).rename(columns={"k": "model.layers"}).replace({"model.layers": {0: 2, 1: 4}})
    keys = ["model.layers"]
    figure = draw_scatter(rows, "x", "y", keys, {"": rank_correlations(rows, "x", "y", keys)})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["2 layers", "4 layers"]
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 2
    first, second = figure.axes[0].get_title().splitlines()
    assert first.startswith("2 layers: rank correlation over 5 seeds ") and second.startswith("4 layers: ")


def test_one_run_alone_has_its_scatter_over_seeds(home, tmp_path, unpainted_here):
    chosen = StudyKeys(None, None, None, ["residual.effective_rank", "test_accuracy"], None)
    gather(find_runs(str(home / "runs" / "0")), tmp_path, chosen=chosen)
    (row,) = pd.read_csv(tmp_path / "correlations.csv").to_dict("records")
    assert (row["over"], row["num_seeds"], row["rank_correlation"]) == ("seeds", 3, pytest.approx(1.0))
    assert (tmp_path / "test_accuracy_by_residual_effective_rank.png").exists()


def test_a_wide_column_has_a_logarithmic_axis_and_a_positive_interval():
    rows = pd.DataFrame({"k": [1, 1, 1, 2, 2, 2], "seed": [0, 1, 2] * 2, "residual": [1e-9, 5e-9, 4e-8, 1.0, 0.9, 0.8]})
    (axes,) = draw_sweep(rows, "k", value="residual").axes
    assert axes.get_yscale() == "log"
    assert min(low for segment in axes.collections[0].get_segments() for _, low in segment) > 0
    (axes,) = draw_scatter(rows.assign(z=[1, 2, 3, 4, 5, 6]), "residual", "z", ["k"], {"": [RHO]}).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert axes.get_title() == "rank correlation 0.50 (0.25 to 0.75)"


def test_a_table_for_print_has_means_with_errors_and_names_of_a_paper(home):
    text = (home / "report" / "summary.tex").read_text()
    assert r"layers & norm & seeds & final test accuracy & effective rank (residual) \\" in text
    assert (with_errors(0.8281, 0.796, 0.8559), with_errors(1.25, 1.125, 1.375)) == (
        "$0.828_{-0.032}^{+0.028}$",
        r"$1.25 \pm 0.12$",
    )
    assert with_errors(1.23e-12, 1.03e-12, 1.43e-12) == r"$(1.23 \pm 0.20) \times 10^{-12}$"
    assert [with_errors(mean, np.nan, np.nan) for mean in (0.5, np.nan)] == ["$0.5$", ""]
    assert with_errors(1.0, 1 - 1e-9, 1 + 1e-9) == "$1$"


# --- rankbench plot ---------------------------------------------------------------------------------------------------


@pytest.mark.further
def test_a_table_drawn_again_is_the_reports_figure(home, tmp_path):
    redraw(home / "report" / "residual.csv", Drawing(tmp_path, StudyKeys()))
    assert (tmp_path / "residual.svg").read_bytes() == (home / "report" / "residual.svg").read_bytes()


def test_a_table_is_drawn_again(home, tmp_path, unpainted_here):
    nothing = StudyKeys()
    lines = redraw(home / "report" / "sweep.csv", Drawing(tmp_path, nothing, width="single"))
    assert lines[0].startswith("Final test accuracy by model.layers, model.norm") and (tmp_path / "sweep.pdf").exists()
    study = StudyKeys(value=["residual.effective_rank", "test_accuracy"])
    redraw(home / "report" / "sweep.csv", Drawing(tmp_path, study))
    there = (home / "report" / "correlations.csv").read_text()
    assert (tmp_path / "correlations.csv").read_text() == there and (tmp_path / "test_accuracy.png").exists()


@pytest.mark.parametrize(
    ("name", "x", "said"),
    [
        ("nothing.csv", None, "no such file"),
        ("summary.csv", None, "not a table of runs, because it has no column run"),
        ("residual_effective_rank.csv", None, "choose a column, as in report.value=effective_rank"),
        ("residual.csv", "model.layer", "did you mean model.layers?"),
    ],
)
def test_a_table_that_cannot_be_drawn_is_refused(home, name, x, said):
    assert said in refusal(drawable, home / "report" / name, StudyKeys(x))


def test_a_table_of_words_alone_is_refused(tmp_path):
    (tmp_path / "words.csv").write_text("run,task,model,seed,word\na,sorting,san,0,yes\n")
    assert refusal(drawable, tmp_path / "words.csv", StudyKeys()).endswith("it has no column of numbers either")


def test_runs_with_and_without_a_key_share_no_line(tmp_path, monkeypatch):
    rows = [
        {"run": str(window), "task": "t", "model": "m", "seed": 0, "model.window": window, "weights": "trained"}
        | {"variant": "full", "layer": layer, "relative_residual": 0.5, "relative_noise_floor": 1e-9}
        for window in (None, 3)
        for layer in (0, 1)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "residual.csv", index=False)
    drawn: dict = {}
    monkeypatch.setattr("rankbench.report.figures.draw", lambda pages, *_: drawn.update(pages) or ["residual"])
    redraw(tmp_path / "residual.csv", Drawing(tmp_path, StudyKeys()))
    ((page,),) = drawn.values()
    assert set(page.rows.variant) == {"model.window=3", "model.window=none"}


def test_the_table_of_one_run_has_no_key_to_draw_by(tmp_path):
    rows = [{"run": "a", "task": "sorting", "model": "san", "seed": 0, "layer": 1, "relative_residual": 0.5}]
    pd.DataFrame(rows).to_csv(tmp_path / "residual.csv", index=False)
    line = refusal(drawable, tmp_path / "residual.csv", StudyKeys("layer"))
    assert line.startswith("report.x=layer: no key varies in ") and line.endswith("give report.value=<column>, too")


@pytest.mark.parametrize(("column", "width", "rows"), [("single", 3.25, 3), ("double", 6.75, 1), (None, 9.75, 1)])
def test_a_figure_for_print_has_a_columns_width_and_labels_on_its_outer_panels(column, width, rows):
    table = pd.DataFrame({"k": [1, 2] * 3, "f": ["a", "a", "b", "b", "c", "c"], "seed": 0, "test_accuracy": 0.5})
    figure = fit(draw_sweep(table, "k", facet="f"), column)
    assert figure.get_figwidth() == pytest.approx(width)
    assert [axes.get_title() for axes in figure.axes] == ["f=a", "f=b", "f=c"]
    lines = {axes.get_subplotspec().rowspan.start: axes for axes in reversed(figure.axes)}
    assert len(lines) == rows and all(axes.get_ylabel() == "final test accuracy" for axes in lines.values())
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)
    assert max(box.x1 for box in boxes) <= figure.bbox.x1 + 1
    assert {text.get_fontsize() for axes in figure.axes for text in axes.get_xticklabels()} == {8.0}

"""rankbench.plots.pages: every configuration of a sweep has a line of its own, counted off from the figures."""

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from rankbench import plots
from rankbench.analyses import ANALYSES
from rankbench.config.schema import StudyKeys
from rankbench.plots import marks
from rankbench.plots.pages import pages_of_analysis, pages_of_final_numbers
from rankbench.report.figures import Drawing, draw_final

KEYS = {"model.skip": ["true", "false"], "model.norm": ["none", "pre", "post"], "model.layers": ["2", "4", "6"]}
LRS = {"optimizer.lr": [f"0.{number:02}" for number in range(1, 31)]}


def residual_table(keys, variants=("full",)):
    """Runs of all combinations of the keys' values; each run's and variant's residual is a number that no other has."""
    rows = []
    for run, values in enumerate(itertools.product(*keys.values())):
        for variant in variants:
            level = (1 + len(rows)) / 10_000
            for layer, sublayer in enumerate(("input", "mlp", "mlp")):
                row = {"run": str(run), "variant": variant, "layer": layer, "sublayer": sublayer}
                rows.append(row | {"relative_residual": level} | dict(zip(keys, values, strict=True)))
    return pd.DataFrame(rows).assign(seed=0, weights="trained", relative_noise_floor=2.0**-52)


def pages(name, table, keys, x=None, series=None, facet=None):
    analysis = ANALYSES[name]
    return pages_of_analysis(
        table, list(keys), x, series, facet, analysis.lines, analysis.drawn_apart, analysis.most_panels
    )


def levels_drawn(page):
    """The y values of each line of a residual figure's page, one list a panel."""
    figure = ANALYSES["residual"].figure(page.rows, None, page.facet)
    return [
        [round(line.get_ydata()[0], 12) for line in axes.get_lines() if len(line.get_ydata()) == 3]
        for axes in figure.axes
    ]


CHOSEN = [(0, {}), (4, {"series": "model.layers"})]
CHOSEN += [(num_keys, chosen) for num_keys in (2, 4) for chosen in ({}, {"facet": "model.norm"}, {"x": "model.skip"})]
CHOSEN += [(1, {"series": "model.skip", "facet": "model.skip"})]  # one key in two places
FOUR = ("full", "no_mlp", "no_skip", "attention_only")


@pytest.mark.parametrize(
    ("num_keys", "chosen", "variants"),
    [
        *((*keys, ("full",)) for keys in CHOSEN),
        *(pytest.param(*keys, FOUR, marks=pytest.mark.slow if keys[0] == 4 else ()) for keys in CHOSEN),
    ],
)
def test_no_two_configurations_share_a_line(variants, num_keys, chosen):
    keys = dict(list((KEYS | {"model.heads": ["1", "2"]}).items())[:num_keys])
    table = residual_table(keys, variants)
    levels = []
    for page in pages("residual", table, keys, **chosen):
        panels = levels_drawn(page)
        assert len(panels) <= 24 and max(map(len, panels)) <= 6  # as many lines in a panel as there are colours
        levels += [level for panel in panels for level in panel]
    assert sorted(levels) == sorted(table.relative_residual.unique())  # each once, and no mean among them


def test_with_both_places_chosen_the_rest_is_averaged_and_the_figure_says_so(tmp_path):
    table = residual_table(KEYS)
    chosen = {"series": "model.layers", "facet": "model.skip"}
    (page,) = pages("residual", table, KEYS, **chosen)
    means = table.groupby(["model.skip", "model.layers"]).relative_residual.mean()
    for panel, skip in zip(levels_drawn(page), ("true", "false"), strict=True):
        np.testing.assert_allclose(panel, means[skip], rtol=0, atol=1e-11)  # rounded to 12 digits above
    figure = ANALYSES["residual"].figure(page.rows, None, page.facet)
    plots.save_pages([(figure, page.note)], tmp_path / "residual", (".svg",))
    assert (figure.get_suptitle(), page.note) == ("averaged over norm", "averaged over model.norm")
    assert [axes.get_title() for axes in figure.axes] == ["trained weights · skip", "trained weights · no skip"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"{n} layers" for n in (2, 4, 6)]
    # a key that the user named is not one that was left out
    (page,) = pages("residual", table, KEYS, x="model.norm", **chosen)
    assert page.note == "" and sorted(itertools.chain(*levels_drawn(page))) == sorted(table.relative_residual.unique())


def test_of_one_and_of_two_keys_the_lines_are_the_key_with_most_numbers():
    for keys, num_panels in ((["model.layers"], 1), (["model.norm"], 1), (["model.norm", "model.layers"], 3)):
        own = {key: KEYS[key] for key in keys}
        (page,) = pages("residual", residual_table(own), own)
        panels = levels_drawn(page)
        assert len(panels) == num_panels and {len(panel) for panel in panels} == {3} and page.note == ""
        assert set(page.rows.variant) == {f"{keys[-1]}={value}" for value in KEYS[keys[-1]]}


@pytest.mark.further
def test_beyond_24_panels_a_page_for_each_value_of_a_key():
    keys = KEYS | {"model.heads": ["1", "2", "4", "8"]}
    table = residual_table(keys, ("full", "no_skip"))
    pages_of_norm = pages("residual", table, keys)
    assert [page.note for page in pages_of_norm] == [f"model.norm={norm}" for norm in KEYS["model.norm"]]
    assert [page.rows[page.facet].nunique() for page in pages_of_norm] == [24, 24, 24]
    # what the user chose stays together where it can
    notes = {page.note for page in pages("residual", table, keys, facet="model.norm")}
    assert notes == {f"model.layers={layers}" for layers in KEYS["model.layers"]}
    alone = pages("residual", residual_table(LRS), LRS)
    assert [page.note for page in alone] == ["optimizer.lr=0.01 to 0.24", "optimizer.lr=0.25 to 0.30"]
    assert [len(levels_drawn(page)) for page in alone] == [24, 6]
    # runs of many configurations: not a page for each run
    runs = residual_table(KEYS | {"s": ["1", "2"]}, ("full", "no_skip")).rename(columns={"run": "own"})
    apart = pages("residual", runs.assign(run=runs.own), [*KEYS, "own"])
    assert [(page.note, len(levels_drawn(page))) for page in apart] == [("own=0 to 23", 24), ("own=24 to 35", 12)]


def test_the_order_of_panels_is_that_of_the_values_with_the_chosen_key_first():
    keys = {"model.skip": ["true", "false"], "model.heads": ["2", "10"]}
    table = residual_table(keys, ("full", "no_skip"))
    table = pd.concat([table[table["model.heads"] == "2"], table[table["model.heads"] == "10"]])  # not sorted by skip
    (page,) = pages("residual", table, keys)
    wanted = [f"{skip}, model.heads={heads}" for skip in ("true", "false") for heads in (2, 10)]
    assert page.rows[page.facet].unique().tolist() == wanted
    (page,) = pages("residual", table, keys, facet="model.heads")
    wanted = [f"{heads}, model.skip={skip}" for heads in (2, 10) for skip in ("true", "false")]
    assert page.rows[page.facet].unique().tolist() == wanted


def test_a_figure_that_takes_no_facet_gets_lines_or_pages_for_what_it_would_mix():
    """Curves tell runs apart by variant and layers: keys that go with these need nothing, others do."""
    keys = {"model": ["san", "lstm"], "model.layers": ["1", "2"], "optimizer.lr": ["0.1", "0.2"]}
    rows = [
        {"run": str(run), "seed": 0, "variant": model, "layers": int(layers), "model": model}
        | {"model.layers": layers, "optimizer.lr": lr}
        for run, (model, layers, lr) in enumerate(itertools.product(*keys.values()))
    ]
    table = pd.DataFrame(rows)
    one_lr = table[table["optimizer.lr"] == "0.1"]
    (page,) = pages("curves", one_lr, keys)
    assert page.note == "" and page.facet is None and list(page.rows.variant) == ["san", "san", "lstm", "lstm"]
    (page,) = pages("curves", table, keys)
    assert list(page.rows.variant[:2]) == ["san, optimizer.lr=0.1", "san, optimizer.lr=0.2"] and page.facet is None
    many = pd.concat([table, table.assign(**{"optimizer.lr": "0.3"}), table.assign(**{"optimizer.lr": "0.4"})])
    many = many.assign(run=[str(run) for run in range(len(many))])
    assert [page.note for page in pages("curves", many, keys)] == [f"optimizer.lr=0.{n}" for n in (1, 2, 3, 4)]
    (page,) = pages("curves", many, keys, series="model", facet="model.layers")
    assert page.note == "averaged over optimizer.lr"


@pytest.mark.further
@pytest.mark.parametrize("num_facets", [7, pytest.param(9, marks=pytest.mark.slow), 24])
def test_many_facets_stand_side_by_side_each_with_its_labels(num_facets):
    keys = {"k": [str(number) for number in range(num_facets)]}
    (page,) = pages("residual", residual_table(keys, ("full", "no_skip")), keys)
    figure = ANALYSES["residual"].figure(page.rows, None, page.facet)
    assert [axes.get_title() for axes in figure.axes] == [f"trained weights · k={number}" for number in keys["k"]]
    assert figure.get_figheight() / figure.get_figwidth() < 1.5  # a page, no ribbon
    figure.draw_without_rendering()
    lowest = {axes.get_subplotspec().colspan.start: axes for axes in figure.axes}
    assert len(lowest) == 4
    for axes in lowest.values():
        assert axes.get_xlabel() == "layer (0: embedding)"
        assert any(label.get_visible() and label.get_text() for label in axes.get_xticklabels())


def test_more_lines_than_colours_have_other_dashes():
    axes = Figure().add_subplot()
    for number in range(12):
        rows = pd.DataFrame({"layer": [0, 1], "value": 0.5, "seed": 0})
        marks.line(axes, rows, "layer", "value", str(number), number)
    styles = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(styles) == 12
    assert max(line.get_xdata()[0] for line in axes.get_lines()) < 0.5  # nearer to its own layer than to the next


def test_the_pages_that_an_earlier_report_left_are_removed(tmp_path):
    def figures_of(number):
        return [(Figure(), "") for _ in range(number)]

    (tmp_path / "residual_notes.txt").touch()
    (tmp_path / "residual_2.csv").touch()
    for number, names in ((3, ["residual_1", "residual_2", "residual_3"]), (1, ["residual"]), (2, ["residual_1"])):
        files = plots.save_pages(figures_of(number), tmp_path / "residual", (".png", ".svg"))
        assert len(files) == number and list(files)[: len(names)] == names
        stems = {path.stem for path in tmp_path.glob("residual*") if path.suffix in (".png", ".svg")}
        assert stems == set(files) and all(path.exists() for paths in files.values() for path in paths)
    assert (tmp_path / "residual_notes.txt").exists() and (tmp_path / "residual_2.csv").exists()


# --- the figure of final numbers --------------------------------------------------------------------------------------


def final_numbers(keys):
    rows = [
        dict(zip(keys, values, strict=True)) | {"seed": 0, "test_accuracy": number / 1000}
        for number, values in enumerate(itertools.product(*keys.values()))
    ]
    return pd.DataFrame(rows).assign(job_status="finished", status="finished")


@pytest.fixture
def drawn(monkeypatch):
    """What is handed to draw_sweep: rows, x, series, facet."""
    calls = []
    monkeypatch.setattr("rankbench.report.figures.draw_sweep", lambda *given: calls.append(given) or Figure())
    return calls


def test_keys_without_a_place_are_panels_and_nothing_is_averaged(tmp_path, drawn):
    keys = KEYS | {"model.heads": [1, 2]}
    seeds = final_numbers(keys | {"model.layers": [2, 4, 6]})
    (caption,) = draw_final(seeds, list(keys), Drawing(tmp_path, StudyKeys())).values()
    ((rows, x, series, facet, *_),) = drawn
    assert (x, series, facet) == ("model.layers", "model.skip", "model.norm") and "averaged" not in caption
    assert rows.groupby([x, series, facet]).size().max() == 1 and len(rows) == 36
    assert list(dict.fromkeys(rows[facet]))[:2] == ["none, model.heads=1", "none, model.heads=2"]


def test_final_numbers_are_averaged_over_what_the_user_left_out(tmp_path, drawn):
    chosen = StudyKeys("model.layers", "model.skip", "model.norm")
    keys = KEYS | {"model.heads": ["1", "2"]}
    captions = draw_final(final_numbers(keys), list(keys), Drawing(tmp_path, chosen))
    ((_, *keys_drawn, _, _),) = drawn
    assert keys_drawn == ["model.layers", "model.skip", "model.norm"]
    assert captions["sweep"].endswith("; averaged over model.heads")


def test_runs_without_a_key_have_a_panel_and_many_panels_have_pages(tmp_path, drawn):
    keys = {"x": [1, 2, 3], "s": [1, 2], "f": ["a", None], "g": [str(number) for number in range(20)]}
    captions = draw_final(final_numbers(keys), ["x", "s", "f", "g"], Drawing(tmp_path, StudyKeys("x", "s")))
    assert list(captions) == ["sweep_1", "sweep_2"]
    assert captions["sweep_1"].endswith("; f=a") and captions["sweep_2"].endswith("; f=none")
    assert sum(len(given[0]) for given in drawn) == 240 and all(given[3] == "g" for given in drawn)


@pytest.mark.further
def test_pages_lose_no_row():
    keys = {key: values for key, values in KEYS.items()} | {"a": ["1", "2", "3"], "b": ["x", "y"]}
    table = final_numbers(keys)
    for most in (1, 2, 5, 24):
        pages_of_table = pages_of_final_numbers(table, list(keys), [], most)
        together = pd.concat([page.rows for page in pages_of_table])
        assert sorted(together.test_accuracy) == sorted(table.test_accuracy)
        assert all((page.rows[page.facet].nunique() if page.facet else 1) <= most for page in pages_of_table)

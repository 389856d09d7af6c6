"""rankbench.plots: figures are a function of the CSV, byte for byte, and show what they say they show."""

from itertools import pairwise, product

import matplotlib
import numpy as np
import pandas as pd
import pytest
from breadth import some
from matplotlib.figure import Figure

from rankbench import plots
from rankbench.analyses import ANALYSES
from rankbench.plots.curves import draw_speed
from rankbench.plots.figure import empty_figure, fit
from rankbench.plots.marks import BELOW, FLOOR, spread
from rankbench.plots.names import in_lines
from rankbench.plots.paths import SCHEMES
from rankbench.plots.residual import AFTER_ALL
from rankbench.plots.spectrum import draw_spectrum
from rankbench.plots.sweep import draw_sweep
from rankbench.plots.training import draw_metrics, draw_observed_weights
from rankbench.runs.tables import mean_and_spread, read_table, write_table

LENGTHS = range(4)


def paths_table(seeds=(0, 1, 2), schemes=("frozen", "recomputed"), sizes=(5, 20), **more):
    """A table of paths with numbers that are a function of their place."""
    rows = []
    for seed in seeds:
        for scheme in schemes:
            for length in LENGTHS:
                base = {"seed": seed, "scheme": scheme, "path_length": length, "whole_accuracy": 0.9 + 0.01 * seed}
                base |= {"majority_accuracy": 0.2 + 0.001 * seed, "position_majority_accuracy": 0.3, **more}
                level = 0.8 / (1 + length) + 0.013 * seed + (0.05 if scheme == "frozen" else 0)
                rows.append({**base, "selection": "all", "subset_size": None, "repeat": None, "accuracy": level})
                sampled = base | {"selection": "sampled"}
                for size, repeat in product(sizes, (0, 1)):
                    value = level - 1 / (10 * size) + 0.01 * repeat
                    rows.append({**sampled, "subset_size": size, "repeat": repeat, "accuracy": value})
    return with_rest(pd.DataFrame(rows))


def residual_table(seeds=(0, 1, 2), decay=0.3, dtype="float64", kinds=("trained", "initialised"), **more):
    """A table of residual with numbers that are a function of their place."""
    rows = []
    for seed, weights, variant in product(seeds, kinds, ("full", "attention_only")):
        states = [(0, "input", None, 1.0)]
        for layer in (1, 2, 3):
            value = 0.9 - 0.1 * layer if variant == "full" else decay**layer
            states += [(layer, "weights", 1, None), (layer, "attention", None, 7.0)]
            states.append((layer, "mlp", None, value * (1 + seed)))
        columns = ["layer", "sublayer", "head", "relative_residual"]
        base = {"seed": seed, "weights": weights, "variant": variant, "dtype": dtype, **more}
        rows += [base | dict(zip(columns, state, strict=True)) for state in states]
    table = pd.DataFrame(rows)
    floors = (4 * np.finfo(dtype).eps * (1 + table.layer)).where(table.sublayer != "weights")
    below = (table.relative_residual <= floors).astype(float).where(floors.notna())
    return with_rest(table.assign(relative_noise_floor=floors, below_floor=below))


def with_rest(table):
    front = pd.DataFrame({"run": "a run", "task": "sorting", "model": "small"}, index=table.index)
    return pd.concat([front, table], axis=1)


TABLES = {"paths": paths_table, "residual": residual_table}


def drawn(name, table, published=None, facet=None):
    return ANALYSES[name].figure(table, published, facet)


def legend_names(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


@pytest.mark.further
@pytest.mark.parametrize("name", TABLES)
def test_the_csv_on_disk_gives_the_figure_of_the_table_in_memory_byte_for_byte(tmp_path, name):
    table = TABLES[name](seeds=(0, 1))
    write_table(table, tmp_path / "table.csv")
    figure = drawn(name, table)
    first, again = (plots.save(figure, tmp_path / stem) for stem in ("memory", "again"))
    second = plots.save(drawn(name, read_table(tmp_path / "table.csv")), tmp_path / "disk")
    assert [path.name for path in first] == ["memory.png", "memory.pdf"]
    for from_memory, saved_again, from_disk in zip(first, again, second, strict=True):
        assert from_memory.read_bytes() == saved_again.read_bytes() == from_disk.read_bytes()
    assert len(list(tmp_path.iterdir())) == 7  # and no half-written file
    other = plots.save(drawn(name, TABLES[name](seeds=(0, 2))), tmp_path / "other")
    assert other[0].read_bytes() != first[0].read_bytes()
    assert first[0].read_bytes().startswith(b"\x89PNG") and first[1].read_bytes().startswith(b"%PDF")


@pytest.mark.further
def test_figures_do_not_depend_on_the_settings_of_the_caller(tmp_path):
    def png():
        return plots.save(drawn("paths", paths_table(seeds=(0, 1))), tmp_path / "one")[0].read_bytes()

    before = png()
    with matplotlib.rc_context({"font.size": 20, "savefig.dpi": 50, "lines.linewidth": 9}):
        assert png() == before
        assert matplotlib.rcParams["font.size"] == 20  # and leave them alone


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("facet", [None, "task.label"])
def test_axes_have_labels_and_every_facet_a_row(name, facet):
    # the jobs of a sweep are runs of their own
    parts = [TABLES[name](**{"task.label": label}).assign(run=label) for label in ("position", "value")]
    figure = drawn(name, pd.concat(parts, ignore_index=True) if facet else parts[0], None, facet)
    assert isinstance(figure, Figure)
    num_rows = 2 if facet else 1
    (*kinds, x, y) = {
        "paths": ("frozen paths", "recomputed paths", "path length (heads used)", "accuracy"),
        "residual": ("trained weights", "initialised weights", "layer (0: embedding)", "relative residual"),
    }[name]
    assert len(figure.axes) == 2 * num_rows
    for number, axes in enumerate(figure.axes):
        row, column = divmod(number, 2)
        assert bool(axes.get_xlabel()) == (row == num_rows - 1)  # the outer ones
        assert bool(axes.get_ylabel()) == (column == 0)
        kind = kinds[column]
        label = f" · label {('position', 'value')[row]}" if facet else ""
        explained = f"\n{SCHEMES[kind.split()[0]]}" if name == "paths" and row == 0 else ""
        assert axes.get_title() == kind + label + explained
    assert figure.axes[-2].get_xlabel() == x and y in figure.axes[0].get_ylabel()


def test_fresh_models_of_a_sweep_keep_their_rows():
    """`rankbench analyze -m model.heads=1,2`: every job's run is called fresh, and only the facet tells them apart."""
    parts = [residual_table(decay=decay, **{"model.heads": heads}) for heads, decay in ((1, 0.3), (2, 0.2))]
    figure = drawn("residual", pd.concat(parts, ignore_index=True).assign(run="fresh"), None, "model.heads")
    assert len(figure.axes) == 4
    for axes, decay in zip(figure.axes[::2], (0.3, 0.2), strict=True):
        assert lines(axes)["attention only"].get_ydata()[1] == pytest.approx(decay * 6 ** (1 / 3), rel=1e-12)


def test_lines_of_paths_are_means_over_seeds():
    table = paths_table()
    figure = drawn("paths", table)
    for axes, shift in zip(figure.axes, (0.05, 0.0), strict=True):
        drawn_line = lines(axes)
        level = [0.8 / (1 + length) + 0.013 + shift for length in LENGTHS]  # the middle one of three seeds
        np.testing.assert_allclose(drawn_line["all paths"].get_ydata(), level, rtol=1e-12)
        np.testing.assert_allclose(drawn_line["5 sampled paths"].get_ydata(), np.array(level) - 0.015, rtol=1e-12)
        np.testing.assert_allclose(drawn_line["20 sampled paths"].get_ydata(), np.array(level), rtol=1e-12)
        for label in ("all paths", "5 sampled paths", "20 sampled paths"):  # side by side, near their length
            np.testing.assert_allclose(drawn_line[label].get_xdata(), LENGTHS, rtol=0, atol=0.2)
        levels = {"whole network": 0.91, "commonest class": 0.201, "commonest class of the position": 0.3}
        for label, value in levels.items():
            np.testing.assert_allclose(drawn_line[label].get_ydata(), value, rtol=1e-12)
        # the seeds, 0, .013 and .026 above the first: each a point at its length
        points = sorted(axes.collections[0].get_offsets().tolist())
        wanted = sorted([length, value + shift] for length, value in enumerate(level) for shift in (-0.013, 0, 0.013))
        np.testing.assert_allclose(points, wanted, rtol=1e-9)


@pytest.mark.parametrize(("score", "label"), [("loss", "loss (squared error)"), ("norm_share", "share of the norms")])
def test_paths_without_accuracy_are_drawn_and_printed_by_what_they_have(score, label):
    table = paths_table().assign(whole_accuracy=np.nan, majority_accuracy=np.nan, position_majority_accuracy=np.nan)
    table = table.assign(**{score: table.accuracy, "whole_loss": 0.5, "remainder": 0.0, "accuracy": np.nan})
    figure = drawn("paths", table)
    assert figure.axes[0].get_ylabel().startswith(label)
    assert len(lines(figure.axes[0])["all paths"].get_ydata()) == len(LENGTHS)
    printed = ANALYSES["paths"].digest(table)
    assert printed.startswith(f"{score.replace('_', ' ')} by path length") and "0.8" in printed
    assert "nan" not in printed and "Empty" not in printed
    both = pd.concat([paths_table().assign(task="sorting"), table.assign(task="arcs")])
    labels = [axes.get_ylabel() for axes in drawn("paths", both, facet="task").axes if axes.get_ylabel()]
    assert labels[0].startswith("accuracy") and labels[1].startswith(label)


def test_the_legend_names_every_series_once():
    wanted = ["all paths", "5 sampled paths", "20 sampled paths", "whole network", "commonest class"]
    assert legend_names(drawn("paths", paths_table())) == [*wanted, "commonest class of the position"]
    assert legend_names(drawn("residual", residual_table())) == ["full", "attention only"]


@pytest.mark.parametrize("letters", some([80, 20, 60], 3))
def test_a_long_legend_takes_nothing_of_the_panels_and_leaves_no_edge(letters):
    """Eight published names of about so many letters: panels stay as high as without, and all is on the page."""
    source = ("square of 10, shift of 3.3, " * 9)[: letters - 15]
    many = pd.concat([PUBLISHED.assign(source=f"{number}: {source}") for number in range(4)])
    heights = []
    for figure in (drawn("paths", paths_table()), drawn("paths", paths_table(), many[many["where"].isna()])):
        figure.draw_without_rendering()
        boxes = [axes.get_tightbbox() for axes in figure.axes] + [figure.legends[0].get_window_extent()]
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)
        heights.append(figure.axes[0].get_window_extent().height)
    assert heights[1] == pytest.approx(heights[0], rel=0.05)


def test_series_are_told_apart_by_colour_and_marker():
    for figure in (drawn("paths", paths_table()), drawn("residual", residual_table())):
        for axes in figure.axes:
            series = [line for line in axes.get_lines() if len(line.get_xdata()) > 2]
            colours, markers = {line.get_color() for line in series}, {line.get_marker() for line in series}
            assert len(colours) == len(markers) == len(series)


def test_equal_lines_lie_upon_each_other_and_the_lower_one_is_wider():
    drawn_lines = lines(drawn("paths", paths_table()).axes[0])
    first, second, third = (drawn_lines[label] for label in ("all paths", "5 sampled paths", "20 sampled paths"))
    assert list(first.get_xdata()) == list(second.get_xdata()) == list(third.get_xdata()) == list(LENGTHS)
    assert first.get_linewidth() > second.get_linewidth() > third.get_linewidth()
    assert first.get_markersize() > second.get_markersize() > third.get_markersize()


def test_small_differences_of_the_residual_look_small_and_the_claimed_one_is_drawn():
    table = residual_table(seeds=(0,), kinds=("initialised",))
    table = table[table.variant == "full"].assign(relative_residual=0.93)
    claim = pd.DataFrame({"series": [AFTER_ALL], "value": [1.0], "source": ["Paper"]})
    (axes,) = drawn("residual", table, claim).axes
    assert axes.get_ylim() == (0.5, 1.0)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0.5", "0.7", "1"]
    assert list(lines(axes)["claimed (Paper)"].get_ydata()) == pytest.approx([0.93, 0.93])


def test_many_rows_of_panels_fit_onto_a_page():
    tables = [residual_table(seeds=(0,), net=net) for net in range(6)]
    assert drawn("residual", pd.concat(tables), None, "net").get_figheight() < 11


def test_lines_of_residual_are_the_state_that_leaves_each_layer():
    figure = drawn("residual", residual_table())
    for axes in figure.axes:
        assert axes.get_yscale() == "log"
        drawn_line = lines(axes)
        # seeds multiply the states after layer 0 by 1, 2, 3, of geometric mean 6^(1/3); the attention's 7.0 is not last
        mean = 6 ** (1 / 3)
        np.testing.assert_allclose(drawn_line["full"].get_ydata(), [1, 0.8 * mean, 0.7 * mean, 0.6 * mean], rtol=1e-12)
        wanted = [1, 0.3 * mean, 0.09 * mean, 0.027 * mean]
        np.testing.assert_allclose(drawn_line["attention only"].get_ydata(), wanted, rtol=1e-12)
        points = axes.collections[1].get_offsets()[:, 1]
        assert points.min() == pytest.approx(0.027, rel=1e-9) and points.max() == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("num_seeds", [10, 11])
def test_up_to_ten_seeds_are_points_and_more_are_a_band(num_seeds):
    axes = drawn("paths", paths_table(seeds=range(num_seeds))).axes[0]
    if num_seeds == 10:
        assert axes.collections[0].get_offsets().shape == (10 * len(LENGTHS), 2)
        return
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    half = 0.013 * np.std(range(11), ddof=1) * 2.2281388519649385 / 11**0.5  # Student's t of 10 degrees of freedom
    for end, mean, sign in ((band.max(), 0.85 + 0.013 * 5, 1), (band.min(), 0.25 + 0.013 * 5, -1)):
        odds = mean / (1 - mean) * np.exp(sign * half / (mean * (1 - mean)))  # an accuracy's interval is one of logits
        assert end == pytest.approx(odds / (1 + odds), rel=1e-9)


@pytest.mark.parametrize("num_seeds", [1, 3, 11])
def test_what_no_line_joins_is_seen(tmp_path, num_seeds):
    """A split that is measured once, as in a run with one evaluation: a mark, and a bar where others have a band."""
    rows = [
        {"split": split, "step": step, "seed": seed, "loss": 1.0 + 0.1 * seed}
        for seed in range(num_seeds)
        for split, steps in (("test", (0, 9)), ("train", (9,)))
        for step in steps
    ]
    (axes,) = draw_metrics(pd.DataFrame(rows)).axes
    (alone,) = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert alone.get_color() == lines(axes)["train"].get_color()
    assert alone.get_xydata() == pytest.approx(np.array([[9, 1.0 + 0.05 * (num_seeds - 1)]]))
    band = [artist.get_linewidth()[0] for artist in axes.collections]
    assert band == ([] if num_seeds == 1 else [0, 0] if num_seeds == 3 else [0, 5])


@pytest.mark.parametrize("layers", [6, 48])
def test_marks_of_a_collapse_are_whole_and_lie_apart(layers):
    """From ten down to 10^-10^23: no mark is cut by the panel's edge, and many do not hide each other."""
    depth = np.arange(layers + 1)
    table = pd.DataFrame({"run": "r", "seed": 0, "weights": "trained", "variant": "full", "layer": depth})
    table = table.assign(log10_residual=np.where(depth == 0, 1.0, -(3.0**depth)), noise_floor=1e-13)
    table = table.assign(log10_measured=table.log10_residual.where(depth < 3))
    figure = drawn("collapse", table)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    pixels = axes.transData.transform(lines(axes)["full"].get_xydata())
    radius = 1.6 * 4 / 2 * figure.dpi / 72
    assert pixels[:, 1].min() - radius > axes.bbox.y0 and pixels[:, 1].max() + radius < axes.bbox.y1
    spacing = lines(axes)["full"].get_markevery()
    assert spacing is None if layers == 6 else spacing * np.hypot(*axes.bbox.size) > 2 * radius


def test_seeds_of_a_long_curve_are_thin_lines():
    rows = pd.DataFrame([{"step": step, "seed": seed, "value": seed + step} for seed in (0, 1) for step in range(40)])
    axes = Figure().subplots()
    summary = mean_and_spread(rows.drop(index=47), ["step"], "value")  # step 7 of seed 1
    spread(axes, summary.step, summary, "black")
    first, second = (line.get_ydata() for line in axes.get_lines())
    assert list(first) == list(range(40)) and not axes.collections
    assert np.isnan(second[7]) and list(second[8:]) == list(range(9, 41))


@pytest.mark.parametrize(
    ("dtype", "decay", "is_drawn"), [("float64", 1e-6, True), ("float64", 0.3, False), ("float32", 1e-3, True)]
)
def test_the_floor_of_rounding_is_drawn_where_it_is_near(dtype, decay, is_drawn):
    table = residual_table(dtype=dtype, decay=decay)
    figure = drawn("residual", table)
    for axes in figure.axes:
        assert (FLOOR in lines(axes)) == is_drawn
    if is_drawn:
        wanted = table[table.weights == "trained"].groupby("layer").relative_noise_floor.max()
        assert lines(figure.axes[0])[FLOOR].get_ydata() == pytest.approx(wanted.to_numpy())


def test_what_is_below_its_floor_is_drawn_there_and_marked():
    table = residual_table(seeds=(0, 1), decay=1e-7, kinds=("trained",))
    floors = table.relative_noise_floor.where(table.variant == "full", 1e-12)
    below = table.relative_residual <= floors
    table = table.assign(relative_noise_floor=floors, below_floor=below.astype(float))
    assert set(table.layer[below]) == {2, 3}  # 1e-14 and 1e-21; 2e-14 and 2e-21 of the other seed
    (axes,) = drawn("residual", table).axes
    heights = lines(axes)["attention only"].get_ydata()
    assert heights[1] == pytest.approx(1e-7 * 2**0.5) and np.isnan(heights[2:]).all()  # no line goes on there
    assert axes.get_ylim()[0] > 1e-14
    (triangles,) = [line for line in axes.get_lines() if line.get_marker() == "v" and len(line.get_xdata())]
    assert triangles.get_ydata() == pytest.approx([1e-12, 1e-12])
    (way,) = [line for line in axes.get_lines() if line.get_linestyle() == ":" and line.get_label() != FLOOR]
    assert way.get_ydata()[1:] == pytest.approx([1e-7 * 2**0.5, 1e-12, 1e-12]) and np.isnan(way.get_ydata()[0])
    assert legend_names(drawn("residual", table)) == ["full", "attention only", BELOW, FLOOR]


def test_a_mean_is_rounding_only_if_all_its_seeds_are():
    table = residual_table(seeds=(0, 1), decay=1e-7, kinds=("trained",))
    table = table.assign(relative_noise_floor=1e-10, below_floor=0.5)  # the residual is 1e-14 from layer 2 on
    of_seed = (table.seed == 1) & (table.variant != "full")
    measured = table.assign(relative_residual=table.relative_residual.mask(of_seed, 1e-3))
    for rows, num_measured in ((table, 2), (measured, 4)):
        line = lines(drawn("residual", rows).axes[0])["attention only"]
        assert np.isfinite(line.get_ydata()).sum() == num_measured


@pytest.mark.parametrize(
    ("below", "num_shown"),
    [
        ([0, 0, 0, 0, 0], 5),
        ([0, 0, 1, 1, 1], 3),  # converged: rounding is all that is left from the third iterate on
        ([1, 1, 0, 0, 0], 5),  # begins at its rounding error and grows out of it
        ([0, 1, 0, 1, 1], 4),
        ([1, 1, 1, 1, 1], 1),
    ],
)
def test_a_line_of_invertibility_ends_where_the_error_stays_below_its_floor(below, num_shown):
    place = {"part": "attention", "layer": 1, "attention": "dot", "weights": "trained", "tokens": 4, "width": 8}
    rows = [
        {**place, "seed": seed, "inputs": "0..1", "coefficient": 0.5, "iteration": k, "error": 2.0**k, "below_floor": b}
        for seed in (0, 1)
        for k, b in enumerate(below)
    ]
    (axes,) = drawn("invertibility", with_rest(pd.DataFrame(rows))).axes
    assert lines(axes)["c=0.5"].get_ydata() == pytest.approx(2.0 ** np.arange(num_shown))
    triangles = [line for line in axes.get_lines() if line.get_marker() == "v" and len(line.get_xdata())]
    marked = [k for line in triangles for k in line.get_xdata()]
    assert marked == [k for k in range(num_shown) if below[k]]


@pytest.mark.parametrize(("widths", "num_panels", "name"), [((8, 16), 1, "c=0.5, N=4, D=8"), ((8, 16, 32), 6, "c=0.5")])
def test_more_sizes_of_invertibility_than_dashes_have_panels(widths, num_panels, name):
    place = {"part": "attention", "layer": 1, "attention": "dot", "weights": "trained", "inputs": "0..1", "seed": 0}
    rows = [
        {**place, "coefficient": 0.5, "tokens": n, "width": d, "iteration": k, "error": n * d / 2**k, "below_floor": 0}
        for n, d, k in product((4, 5), widths, range(3))
    ]
    panels = drawn("invertibility", with_rest(pd.DataFrame(rows))).axes
    assert len(panels) == num_panels
    assert lines(panels[0])[name].get_ydata() == pytest.approx([32, 16, 8])
    if num_panels > 1:
        assert "N=5" in panels[-1].get_title() and "D=32" in panels[-1].get_title()
        assert lines(panels[-1])[name].get_ydata() == pytest.approx([160, 80, 40])


def test_theory_is_drawn_as_means_with_two_standard_errors():
    rows = [
        ("error", "bound_sharp", 1, 1, 0.5),
        ("error", "bound_sharp", 1, 2, 0.3),
        ("error", "equal_weights", 1, 2, 0.4),  # of two seeds
        ("error", "equal_weights", 1, 2, 0.6),
        ("fewest_heads", "bound_sharp", 1, 8, 0.1),
        ("fewest_heads", "bound_sharp", 2, 4, 0.1),
    ]
    table = pd.DataFrame(rows, columns=["quantity", "form", "rank", "heads", "value"])
    left, right = drawn("rank_theory", table.assign(dimension=4, kind="measured", standard_error=0.03)).axes
    assert lines(left)["lower bound (sharp), r=1"].get_xydata().tolist() == [[1, 0.5], [2, 0.3]]
    (bar,) = left.containers[0].lines[2][0].get_segments()
    half = 2 * 0.03 / 2**0.5
    assert bar == pytest.approx(np.array([[2, 0.5 - half], [2, 0.5 + half]]))
    assert lines(right)["fewest heads for an error of 0.1"].get_xydata().tolist() == [[1, 8], [2, 4]]


LAYER = {"weights": "fresh", "attention": "l2", "part": "attention", "p": 2.0, "layer": 1, "seed": 0, "step": 0}


def test_lipschitz_bounds_are_drawn_beside_where_ascents_end():
    rows = [
        LAYER
        | {"quantity": "ascent", "tokens": tokens, "start": start, "step": step, "value": tokens / start - 1 / step}
        for tokens, start, step in product((4, 9), (1, 2), (1, 10))
    ]
    rows += [LAYER | {"quantity": "theorem", "tokens": n, "start": 0, "value": 2.0 * n} for n in (4, 9)]
    rows += [LAYER | {"quantity": "ball", "tokens": n, "start": 0, "value": np.inf} for n in (4, 9)]
    drawn_lines = lines(drawn("lipschitz", pd.DataFrame(rows)).axes[0])
    heights = {name: list(line.get_ydata()) for name, line in drawn_lines.items() if name[0] != "_"}
    assert heights.pop("bound: Theorem 3.2") == pytest.approx([8, 18])
    assert heights.pop("lower bound: ascent, best start") == pytest.approx([3.9, 8.9])
    assert heights == {"ascent, the next best starts": pytest.approx([1.9, 4.4])}


def test_balls_are_drawn_by_their_ratio_and_their_largest_operation():
    rows = [
        LAYER | {"quantity": "certified_ball", "kind": kind, "radius": radius, "value": value}
        for radius, bound, found in ((0.1, 2.0, 1.0), (1.0, 30.0, 2.0), (2.0, 1e9, 2.0))
        for kind, value in (("bound", bound), ("lower_bound", found))
    ]
    share = {"operation": "block 1 mlp activation", "share": lambda table: 0.3 * table.radius}
    above, below = drawn("lipschitz", pd.DataFrame(rows).assign(weights="trained", **share)).axes
    assert above.get_lines()[0].get_xydata().tolist() == [[0.1, 2], [1, 15]]  # beyond a million it says nothing
    assert below.get_lines()[0].get_xydata() == pytest.approx(np.array([[0.1, 0.03], [1, 0.3], [2, 0.6]]))


def test_times_of_a_step_are_drawn_over_those_of_dot_products():
    rows = [
        {"variant": "causal_l2", "layers": layers, "seed": 0, "seconds": seconds, "seconds_dot": 2.0}
        for layers, seconds in ((1, 1.0), (1, 2.0), (2, 3.0))
    ]
    (axes,) = draw_speed(pd.DataFrame(rows)).axes
    assert axes.get_lines()[0].get_xydata().tolist() == [[1, 0.75], [2, 1.5]]


@pytest.mark.parametrize("name", TABLES)
def test_one_seed_has_no_spread_and_no_warning(tmp_path, name):
    png, _ = plots.save(drawn(name, TABLES[name](seeds=(4,))), tmp_path / "one")
    assert png.stat().st_size > 5000  # warnings are errors


@pytest.mark.further
def test_a_residual_of_zero_and_a_missing_one_are_drawn_without_warning(tmp_path):
    table = residual_table(seeds=(0, 1), kinds=("trained",), decay=0.0)
    assert (table.relative_residual == 0).any()
    table.loc[(table.layer == 2) & (table.variant == "full"), "relative_residual"] = np.nan
    assert plots.save(drawn("residual", table), tmp_path / "one")[0].stat().st_size > 5000


def test_a_table_without_all_paths_or_of_one_scheme_is_drawn():
    table = paths_table(schemes=("recomputed",))
    figure = drawn("paths", table[table.selection == "sampled"])
    assert len(figure.axes) == 1 and "all paths" not in legend_names(figure)
    figure = drawn("paths", paths_table(sizes=()))
    assert legend_names(figure)[:2] == ["all paths", "whole network"]


PUBLISHED = pd.DataFrame(
    [
        ("Paper", "f", None, "length-1 paths", 1.0, 0.6),
        ("Paper", "f", None, "whole network", None, 0.98),
        ("Code", "f", "task.label=value", "5 sampled paths", 0.0, 0.35),
        ("Code", "f", "task.label=value", "5 sampled paths", 1.0, 0.46),
    ],
    columns=["source", "figure", "where", "series", "x", "value"],
)
EVERYWHERE = {"length-1 paths (Paper)", "whole network (Paper)"}


def test_published_numbers_are_drawn_beside_the_protocol_and_in_the_facet_that_they_come_from():
    both = pd.concat([paths_table(**{"task.label": label}) for label in ("position", "value")], ignore_index=True)
    figure = drawn("paths", both, PUBLISHED, "task.label")
    labels = [{label for label in lines(axes) if "(" in label} for axes in figure.axes]
    assert labels == [set(), EVERYWHERE, set(), EVERYWHERE | {"5 sampled paths (Code)"}]
    recomputed = lines(figure.axes[3])
    assert recomputed["length-1 paths (Paper)"].get_xydata().tolist() == [[1.0, 0.6]]
    assert recomputed["5 sampled paths (Code)"].get_xydata().tolist() == [[0.0, 0.35], [1.0, 0.46]]
    assert list(recomputed["whole network (Paper)"].get_ydata()) == [0.98, 0.98]
    styles = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in recomputed.values()}
    assert len(styles) == len(recomputed)  # each published series can be told apart too
    names = legend_names(figure)
    assert legend_names(drawn("paths", paths_table())) == [name for name in names if "(" not in name]
    assert set(names) >= EVERYWHERE


def test_a_title_is_no_wider_than_its_panel():
    """A wider one would run into the next or out of the figure."""
    for letters in (20, 48, 76, 116):
        figure = empty_figure(6.5, 2.5)
        panels = figure.subplots(1, 2)
        for axes in panels:
            axes.set_title(("letters " * 20)[:letters].strip())
        figure.get_layout_engine().execute(figure)
        for axes in panels:
            assert axes.title.get_window_extent().width <= axes.get_window_extent().width + 1


def test_titles_are_broken_between_their_parts():
    assert in_lines("weight on the key that gets most · no norm", 36) == "weight on the key that gets most\nno norm"
    assert in_lines("initialised weights · no mask · 2 heads", 30) == "initialised weights · no mask\n2 heads"
    assert in_lines("trained weights · a key of a long value", 12).splitlines()[:2] == ["trained", "weights · a"]
    assert in_lines(r"a $x \leq y$ of_a_plug_in", 9) == "a\n$x \\leq y$\nof_a_plug_in"  # a formula is never cut
    assert max(map(len, in_lines("of_a_plug_in_without_a_space", 9).splitlines())) == 9


def test_long_names_of_a_plug_in_stay_on_the_page():
    """In a legend of one panel, and as words on an axis: nothing is cut, and panels keep some room."""
    names = ["of_a_plug_in" * repeats for repeats in (1, 8, 9)]
    legend = drawn("residual", pd.concat([residual_table().assign(variant=name) for name in names]))
    rows = [{"seed": seed, "model.attention": name, "test_accuracy": 0.5} for name in names for seed in (0, 1)]
    ticks = draw_sweep(pd.DataFrame(rows), "model.attention")
    for figure in (fit(legend, "single"), ticks):
        figure.draw_without_rendering()
        words = figure.axes[0].get_xticklabels() if figure is ticks else []
        boxes = [artist.get_window_extent() for artist in (*words, *figure.legends)]
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        assert all(axes.bbox.width > figure.bbox.width / 2 for axes in figure.axes)
    assert words[0].get_text() == "of a plug in" and len(words[1].get_text()) < 40


def test_curves_of_runs_that_differ_in_much_have_titles_that_fit_and_losses_with_their_unit(tmp_path):
    names = [", ".join(f"{network}, model.key{key}=value" for key in range(9)) for network in range(8)]
    rows = [{"split": "test", "step": step, "seed": 0, "loss": 1.0 + step, "accuracy": 0.5, "model.heads": name}
            for name in names for step in (0, 1)]  # fmt: skip
    figure = draw_metrics(pd.DataFrame(rows), "model.heads")
    plots.save_pages([(figure, "a note " * 40)], tmp_path / "metrics")
    assert {axes.get_ylabel().replace("\n", " ") for axes in figure.axes} == {"loss (nats per token)", "accuracy"}
    for axes in figure.axes:
        assert axes.get_title(loc="left") == "" and axes.title.get_window_extent().width <= axes.bbox.width * 1.1
        assert axes.yaxis.label.get_window_extent().height <= axes.bbox.height * 1.15
    below_note = max(axes.title.get_window_extent().y1 for axes in figure.axes)
    assert below_note < min(text.get_window_extent().y0 for text in figure.texts if "note" in text.get_text())
    regression = draw_metrics(pd.DataFrame(rows).assign(accuracy=np.nan))
    assert [axes.get_ylabel() for axes in regression.axes] == ["loss (squared error)"]


def test_curves_of_a_task_with_classes_and_of_a_regression_share_no_axis():
    of_classes = pd.DataFrame({"split": "test", "step": [0, 1], "seed": 0, "loss": [2.0, 1.0], "accuracy": [0.1, 0.5]})
    tables = [of_classes.assign(task="sorting"), of_classes.assign(task="arcs", accuracy=np.nan, loss=[1.0, 1e-3])]
    accuracy, *_ = [axes for axes in draw_metrics(pd.concat(tables), "task").axes if axes.get_ylabel() == "accuracy"]
    assert accuracy.get_xlabel() == "training step"
    losses = {axes.get_ylabel(): axes for axes in accuracy.figure.axes if axes.axison and axes is not accuracy}
    assert {label: axes.get_yscale() for label, axes in losses.items()} == {
        "loss (nats per token)": "linear",
        "loss (squared error)": "log",
    }


@pytest.mark.further
def test_any_number_of_variants_is_drawn():
    """Variants that are none of the paper's once ran out of colours at the 100th."""
    rows = [{"variant": f"v{n}", "layers": 1, "seed": 0, "seconds": 1.0, "seconds_dot": 2.0} for n in range(100)]
    (axes,) = draw_speed(pd.DataFrame(rows)).axes
    assert len(axes.get_lines()) == 100


def test_each_network_of_a_spectrum_shows_the_first_kind_that_it_has():
    rows = [
        {"run": run, "of": of, "path_length": k, "mass": 2.0**-k, "error_upto": 2.0**-k, "loss_upto": loss}
        for run, kinds, loss in (("one", ("states", "output"), 1.0), ("two", ("output",), np.nan))
        for of in kinds
        for k in range(3)
    ]
    table = pd.DataFrame(rows).assign(seed=0, weights="trained", part="length", below_floor=0, error_below_floor=0)
    table = table.assign(checkpoint=table.run, whole_loss=table.loss_upto, kl_upto=np.nan)
    table = table.assign(
        **{f"{x}_{end}": table[x] for x in ("mass", "error_upto", "loss_upto") for end in ("low", "high")}
    )
    axes = draw_spectrum(table, facet="checkpoint").axes
    assert len(axes) == 6 and [len(panel.texts) for panel in axes] == [0, 0, 0, 0, 0, 1]
    assert axes[5].texts[0].get_text() == "none" and "states, else output" in axes[0].get_ylabel()
    alone = draw_spectrum(table[table.run == "one"], facet="checkpoint").axes
    assert "last states" in alone[0].get_ylabel() and len(alone[0].lines[0].get_xdata()) == 3
    # only one of the two has layers
    layers = pd.DataFrame({"layer": [1.0, 2.0, 3.0], "k95": [1, 1, 2], "k99": [1.0, 1.5, 2.5], "k999": [1, 2, 3]})
    layers = layers.assign(run="one", checkpoint="one", of="layer", part="layer", seed=0, weights="trained")
    axes = draw_spectrum(pd.concat([table, layers]), facet="checkpoint").axes
    assert len(axes) == 8 and [len(panel.texts) for panel in axes] == [0] * 6 + [1, 1]
    assert axes[3].lines[0].get_xydata().tolist() == [[1, 1], [2, 1.5], [3, 2.5]]
    shade = axes[3].collections[0].get_paths()[0].vertices
    assert shade[:, 1].min() == 1 and shade[:, 1].max() == 3 and axes[7].get_xlabel() == "layer"


@pytest.mark.further
def test_many_networks_of_a_spectrum_are_lines_by_share_of_their_depth():
    parts = []
    for depth in range(2, 9):  # seven networks
        for weights, base in (("trained", 2.0), ("initialised", 4.0)):
            who = {"run": str(depth), "checkpoint": f"net{depth}", "weights": weights, "seed": 0}
            lengths = pd.DataFrame({"path_length": range(depth + 1), "mass": 1.0})
            lengths = lengths.assign(**who, of="states", part="length", error_upto=base**-lengths.path_length)
            layers = pd.DataFrame(
                {"layer": range(1, depth + 1), "of": "layer", "part": "layer", "k99": 1.0, "k95": 1.0}
            )
            parts += [lengths, layers.assign(**who, k999=2.0)]
    table = pd.concat(parts).assign(below_floor=0, error_below_floor=0, kl_below_floor=0, loss_upto=np.nan)
    table = table.assign(kl_upto=table.error_upto, weights_sd=table.weights.map({"trained": 0.1, "initialised": 0.02}))
    table["special_tokens"] = np.where(table.checkpoint == "net2", "in", "out")
    table = table.assign(
        **{f"{x}_{end}": table[x] for x in ("mass", "error_upto", "kl_upto", "k99") for end in ("low", "high")}
    )
    figure = draw_spectrum(table, facet="checkpoint")
    assert len(figure.axes) == 6  # error, divergence, layers; trained, initialised
    name = "net4, 4 layers, sd 0.1 and 0.02"
    for axes, base in zip(figure.axes[:4], (2, 4, 2, 4), strict=True):
        assert lines(axes)[name].get_xydata() == pytest.approx(np.array([[k / 4, base**-k] for k in range(5)]))
    assert lines(figure.axes[4])[name].get_xydata() == pytest.approx(np.array([[k / 4, 1 / 4] for k in range(1, 5)]))
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(said) == 7 + 3 and "left out: special tokens of 6 of 7" in said
    assert all(axes.get_xlabel() and axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes)
    older = draw_spectrum(table.drop(columns=["weights_sd", "special_tokens"]), facet="checkpoint")
    assert "net4, 4 layers" in lines(older.axes[0]) and len(older.legends[0].get_texts()) == 7 + 2


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, ["trained weights"]),
        ({"weights_sd": 0.0213, "special_tokens": "out"}, ["trained weights, sd 0.021", "left out: special tokens"]),
        ({"weights_sd": [0.02] * 3 + [0.04] * 3}, ["trained weights, sd 0.02 to 0.04"]),
        ({"special_tokens": "in"}, ["trained weights", "special tokens count"]),
        ({"special_tokens": "out+first"}, ["trained weights", "left out: special tokens, first"]),
        ({"special_tokens": ["in"] * 3 + ["out"] * 3}, ["trained weights"]),
    ],
)
def test_a_spectrum_says_how_large_weights_are_and_which_tokens_count(columns, said):
    table = pd.DataFrame({"path_length": [0, 1, 2] * 2, "mass": 0.5, "run": ["one"] * 3 + ["two"] * 3, "of": "states"})
    table = table.assign(seed=[0] * 3 + [1] * 3, weights="trained", part="length", below_floor=0)
    table = table.assign(**dict.fromkeys(["error_upto", "loss_upto", "kl_upto"], np.nan), error_below_floor=0)
    (legend,) = draw_spectrum(table.assign(kl_below_floor=0, **columns)).legends
    assert [text.get_text() for text in legend.get_texts()] == said


@pytest.mark.parametrize("steps", [999, 2345, 36_000, 200_000])
def test_numbers_of_steps_stand_apart(steps):
    rows = pd.DataFrame({"split": "test", "seed": 0, "step": np.linspace(0, steps, 13).round(), "loss": 1.5})
    figure = draw_metrics(rows.assign(accuracy=0.5))
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert len(boxes) >= 4 and all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_rows_of_one_column_have_one_scale():
    """One facet alone needs a logarithmic axis; the others follow it."""
    heads = [
        {"run": of, "seed": 0, "weights": "trained", "layer": layer, "head": 1, "largest_logit": base**layer, "of": of}
        for of, base in (("a", 1.1), ("b", 1e3))
        for layer in (1, 2)
    ]
    parameters = [
        {"run": "r", "seed": 0, "parameter": name, "step": step, "spectral_norm": base**step}
        for name, base in (("w", 1.1), ("v", 100.0))
        for step in (0, 1)
    ]
    figures = (
        ANALYSES["attention"].figure(pd.DataFrame(heads), None, "of"),
        draw_observed_weights(pd.DataFrame(parameters)),
    )
    for figure in figures:
        assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]
    entropies = pd.concat([pd.DataFrame(heads).assign(of=f"{n}", attention_entropy=n / 9) for n in range(1, 9)])
    for facets in (2, 8):  # below each other; side by side, too
        table = entropies[entropies.of.astype(int) <= facets]
        panels = ANALYSES["attention"].figure(table, None, "of").axes
        of_entropy = [axes for axes in panels if axes.get_ylabel().startswith("entropy")]
        assert len(panels) == 2 * len(of_entropy) == 2 * facets
        assert {axes.get_ylim() for axes in of_entropy} == {of_entropy[0].get_ylim()}
        assert of_entropy[0].dataLim.y1 < 2 / 9 and of_entropy[0].get_ylim()[1] > facets / 9
        assert all(axes.yaxis.get_tick_params()["labelleft"] for axes in panels)

"""The figure of the analysis `head_rank`."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import log_y, mean_line, published_marks, tick, ticks, with_legend
from rankbench.plots.names import settings_of
from rankbench.plots.readings import in_steps
from rankbench.plots.style import GREY, INK, colour_of, colour_of_depth, marker_of

BOUNDS = {"bound_sharp": "--", "bound_any": ":"}
BASELINES = {"zero": "-", "linear": "--", "linear attention": ":", "least squares": "-", "averaging": "--"}
BASELINES |= {"3 nearest neighbours": ":"}
SERIES = {"copies": "copies", "points": "N"}  # columns: their names in a legend
LINES = 6  # the most layers whose spectra are shown
X_LABELS = {"share": "rank r / width d", "heads": "heads H"}


@styled
def draw_head_rank(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Of regressions errors and angles of heads by their rank over the width, with a line for each number of copies and
    of points; of other tasks singular values of W_QK and W_VO, with a line for each layer, the mean of its heads.

    A row for each depth. Left: errors with softmax (filled, with the best seed as a dash), with hardmax
    (open), and of baselines; where lower bounds apply, by the number of heads, with a line for each rank. Right: the
    median angle of W_QK to the identity, with the largest angle that the rank allows. If all heads have one rank, x is
    their number. For regression in context: left the errors by examples, right the errors after the last example by the
    number of heads, with the best seed. The sweep's facets are not needed, because the table has the sizes.

    If some run is not a regression, and so has no errors, the figure shows the spectra of W_QK and W_VO instead, with a
    row for each kind of network.
    """
    trained = "trained" if (table.weights == "trained").any() else "initialised"
    if not (table.of == "network").groupby(table.run).any().all():
        return _spectra(table[(table.of == "head") & (table.weights == trained)], trained, facet)
    selected = table[table.weights.isin([trained, "none"])].assign(share=table["rank"] / table.width)
    selected = selected.assign(points=selected.groupby(["seed", "run"]).examples.transform("max").astype(int))
    in_context = selected.groupby(["run", "seed"]).examples.nunique().max() > 1
    x = "heads" if selected["rank"].nunique() == 1 and selected.heads.nunique() > 1 else "share"
    figure, grid, facets = grid_of(selected, "layers", 2, share_y=False, share_x="col")
    for row, (label, rows) in zip(grid, facets, strict=True):
        if in_context:
            _by_examples(row[0], rows)
            _last_by_heads(row[1], rows)
        else:
            _errors(row[0], rows, x, _of(published, "squared error"), label)
            _angles(row[1], rows, x, _of(published, "degrees"), label)
        for axes in row:
            axes.set_title(title(label, f"{trained} weights"))
        row[0].set_ylabel("squared error (predicting 0: 1)")
    for axes in grid.flat:
        axes.xaxis.set_tick_params(labelbottom=True)
    return with_legend(figure, grid)


def _spectra(heads: pd.DataFrame, weights: str, facet: str | None) -> Figure:
    """Singular values above rounding by their index: of each layer the mean over heads, then geometric over seeds."""
    numbers = [name for name in heads if name.startswith("sigma_")]
    kinds = [*([facet] if facet else []), "task", "model", "layers", "heads", "rank"]
    axes_of_head = ["run", "seed", "kind", "layer", "head", "matrix", "numerical_rank"]
    long = heads.assign(kind=settings_of(heads, kinds)).melt(axes_of_head, numbers, "number", "sigma")
    long = long.assign(number=long.number.str.removeprefix("sigma_").astype(int)).dropna(subset="sigma")
    long["sigma"] = long.sigma.where(long.number <= long.numerical_rank)
    figure, grid, facets = grid_of(long, "kind", 2, share_y="col")
    for row, (_, rows) in zip(grid, facets, strict=True):
        for axes, (matrix, name) in zip(row, (("qk", "W_{QK}"), ("vo", "W_{VO}")), strict=True):
            of_matrix = rows[rows.matrix.str.startswith(matrix) & (rows.sigma > 0)]
            for layer in in_steps(sorted(of_matrix.layer.unique()), LINES):
                of_layer, colour = of_matrix[of_matrix.layer == layer], colour_of_depth(layer, heads.layer.max())
                style = {"marker": ".", "label": f"layer {layer}"}
                mean_line(axes, of_layer, "number", "sigma", colour, geometric=True, **style)
            axes.set_ylabel(f"singular value of ${name}$")
            axes.set_title(title(rows.kind.iloc[0], f"{weights} weights"))
            axes.set_xlabel("number of the singular value")
            axes.set_xlim(0.5, len(numbers) + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[0]:
        log_y(axes)
    return with_legend(figure, grid)


def _of(published: pd.DataFrame | None, unit: str) -> pd.DataFrame | None:
    return None if published is None else published[published.unit == unit]


def _series(rows: pd.DataFrame, x: str) -> list[tuple[str, pd.DataFrame]]:
    """Split the rows by the columns that vary besides x; where x is the number of heads, it fixes the copies."""
    varied = [column for column in SERIES if rows[column].nunique() > 1 and (x, column) != ("heads", "copies")]
    if not varied:
        return [("", rows)]
    return [
        (", ".join(f"{SERIES[key]}={tick(value)}" for key, value in zip(varied, values, strict=True)), group)
        for values, group in rows.groupby(varied)
    ]


def _drawn(axes: Axes, rows: pd.DataFrame, x: str, value: str, label: str, number: int, style: dict) -> None:
    mean_line(axes, rows, x, value, colour_of(number), marker=marker_of(number), label=label, **style)


def _best_seed(axes: Axes, rows: pd.DataFrame, x: str) -> None:
    if rows.seed.nunique() > 1:
        best = rows.groupby(x).error.min()
        axes.plot(best.index, best, color=INK, linestyle="none", marker="_", label="best seed, softmax")


def _errors(axes: Axes, rows: pd.DataFrame, x: str, published: pd.DataFrame | None, label: str) -> None:
    networks, is_bounded = rows[rows.of == "network"], "bound_any" in rows
    x = "heads" if is_bounded else x
    by_rank = [(f"r={tick(rank)}", part) for rank, part in networks.groupby("rank")]
    parts = by_rank if is_bounded else _series(networks, x)
    for number, (name, part) in enumerate(parts):
        for evaluation, style in (("soft", {}), ("hard", {"mfc": "none", "linestyle": "--", "linewidth": 0.8})):
            errors = part[part.evaluation == evaluation]
            label_of = ", ".join(text for text in (evaluation + "max", name) if text)
            _drawn(axes, errors, x, "error", label_of, number, style)
            if evaluation == "soft":
                _best_seed(axes, errors, x)
        if is_bounded:
            colour = colour_of(number)
            for bound, dashes in BOUNDS.items():
                level = part.groupby(x)[bound].first()
                name_of = f"lower bound ({bound.removeprefix('bound_')}), {name}"
                axes.plot(level.index, level, color=colour, linestyle=dashes, linewidth=0.8, marker=".", label=name_of)
    for name, part in rows[rows.of == "baseline"].groupby("evaluation", sort=False):
        if rows.points.nunique() == 1 or name == "zero":
            axes.axhline(part.error.mean(), color=GREY, linestyle=BASELINES[name], linewidth=1, label=name, zorder=1)
    ticks(axes, networks[x] if published is None or is_bounded else pd.concat([networks[x], published.x]))
    axes.set_xlabel(X_LABELS[x])
    if not is_bounded:
        published_marks(axes, published, label, {name: number for number, (name, _) in enumerate(parts)})
    log_y(axes)


def _angles(axes: Axes, rows: pd.DataFrame, x: str, published: pd.DataFrame | None, label: str) -> None:
    heads = rows[(rows.of == "head") & rows.matrix.str.startswith("qk", na=False)]
    median = heads.groupby(["run", "seed", "share", "heads", "copies", "points"]).angle.median().reset_index()
    parts = [("median angle", median)] if "bound_any" in rows else _series(median, x)
    for number, (name, part) in enumerate(parts):
        label_of = name if "bound_any" in rows else ", ".join(text for text in ("softmax", name) if text)
        _drawn(axes, part, x, "angle", label_of, number, {})
    limit = rows.groupby(x).angle_limit.first()
    style: dict = {"color": INK, "linestyle": ":", "linewidth": 1, "marker": "_" if len(limit) == 1 else ""}
    axes.plot(limit.index, limit, label="largest or smallest angle of the rank", **style)
    axes.plot(limit.index, 180 - limit, **style)
    ticks(axes, rows[x] if published is None else pd.concat([rows[x], published.x]))
    axes.set_ylim(0, 185)
    axes.set_xlabel(X_LABELS[x])
    axes.set_ylabel(r"angle of $W_{QK}$ to $I$ (degrees)" + "\nmedian over heads")
    published_marks(axes, published, label, {name: number for number, (name, _) in enumerate(parts)})


def _by_examples(axes: Axes, rows: pd.DataFrame) -> None:
    soft = rows[(rows.of == "network") & (rows.evaluation == "soft")]
    for number, (heads, group) in enumerate(soft.groupby("heads")):
        style = {"markevery": 5, "markersize": 3}
        _drawn(axes, group, "examples", "error", f"H={heads}, r={tick(group['rank'].iloc[0])}", number, style)
    for name, group in rows[rows.of == "baseline"].groupby("evaluation", sort=False):
        mean = group.groupby("examples").error.mean()
        colour = INK if name == "least squares" else GREY
        axes.plot(mean.index, mean.clip(lower=1e-3), color=colour, linestyle=BASELINES[name], linewidth=1, label=name)
    axes.set_ylim(bottom=0, top=2)
    axes.set_xlabel("examples in context")


def _last_by_heads(axes: Axes, rows: pd.DataFrame) -> None:
    last = rows[(rows.examples == rows.examples.max()) & (rows.of == "network") & (rows.evaluation == "soft")]
    _drawn(axes, last, "heads", "error", "after the last example", 0, {})
    _best_seed(axes, last, "heads")
    ticks(axes, last.heads)
    axes.set_xlabel("heads H (rank = width / H)")
    axes.set_ylabel("squared error")

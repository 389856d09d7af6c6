"""The figures of the analyses `curves` and `speed`, which compare variants by the number of layers."""

from itertools import chain, count

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.plots.figure import empty_figure, styled
from rankbench.plots.marks import level, log_y, mean_line, with_legend
from rankbench.plots.names import choice_in_words
from rankbench.plots.style import DASHES, GREY, colour_of, marker_of, panel_size

BASE = "causal"  # the variant whose time is 1
ORDER = (BASE, "causal_l2", "causal_l2_tied", "causal_contractive_l2", "lstm", "causal_l2_matched")  # of colours
LONG_DASHES, FAR_DOTS = (0, (10, 3)), (0, (1, 4))  # unlike those of numbers of layers


@styled
def draw_curves(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Test loss over steps, a line for each variant and number of layers, with its spread over seeds.

    A language model also has the losses that the frequencies of symbols and of their pairs give. If several were run:
    also the loss at the best validation step, and the time per token, a geometric mean over the intervals between
    evaluations with its spread, both against layers. The time is a multiple of that of the variant `causal` if that was
    run. Published numbers are open marks of the variant's colour, or dotted lines if they have no number of layers or
    if only one network was run.
    """
    variants = list(dict.fromkeys(table.variant))
    several = len(table[["variant", "layers"]].drop_duplicates()) > 1
    columns = 3 if several else 1
    figure = empty_figure(panel_size()[0] * columns, panel_size()[1] + 1.0)
    grid = figure.subplots(1, columns, squeeze=False)
    layers = sorted(table.layers.unique())
    loss = "loss (nats per token)" if "accuracy" in table else "loss (squared error)"
    if "test_loss_per_character" in table:
        loss = "loss (nats per symbol)"
    test = table[table.split == "test"]
    for (variant, depth), rows in test.groupby(["variant", "layers"], sort=False):
        colour, dash = colour_of(_numbers(variants)[variant]), DASHES[layers.index(depth) % len(DASHES)]
        label = choice_in_words(variant) if len(layers) == 1 else None
        mean_line(grid[0, 0], rows, "step", "loss", colour, linestyle=dash, label=label)
    level(grid[0, 0], table, "unigram_loss", "frequencies of symbols", GREY, LONG_DASHES)
    level(grid[0, 0], table, "bigram_loss", "frequencies of pairs", GREY, FAR_DOTS)
    nats, ratios = (None if published is None else published[published.unit == unit] for unit in ("nats", "ratio"))
    if not several and nats is not None:
        same = (nats.series == variants[0]) & (nats.x.isna() | (nats.x == layers[0]))
        _printed_levels(grid[0, 0], nats[same], variants[0], colour_of(_numbers(variants)[variants[0]]))
    log_y(grid[0, 0])  # else the losses at the start of training would flatten the rest
    grid[0, 0].set(xlabel="training step", ylabel=f"test {loss}")
    if len(layers) > 1:
        for number, depth in enumerate(layers):
            grid[0, 0].plot([], [], color=GREY, linestyle=DASHES[number % len(DASHES)], label=f"layers={depth}")
    if several:
        against_layers(grid[0, 1], table.drop_duplicates(["variant", "layers", "seed"]), "test_loss", variants, nats)
        against_layers(grid[0, 2], _times(test), "microseconds_per_token", variants, ratios, geometric=True)
        grid[0, 1].set_ylabel(f"test {loss}, best step")
        grid[0, 2].set_ylabel(f"time per token / that of {BASE}" if BASE in variants else "microseconds per token")
    return with_legend(figure, grid)


def _numbers(variants: list[str]) -> dict[str, int]:
    """The number of each variant's colour and marker: those of ORDER keep theirs, others have what is left."""
    free = [number for number, name in enumerate(ORDER) if name not in variants]
    others = zip((name for name in variants if name not in ORDER), chain(free, count(len(ORDER))), strict=False)
    return {name: number for number, name in enumerate(ORDER)} | dict(others)


def _times(test: pd.DataFrame) -> pd.DataFrame:
    """Times per token, as a multiple of BASE's in the same interval if it was run. Seeds that train side by side share
    their times, so intervals replace the seeds."""
    keys = ["layers", "step"]
    times = test.groupby(["variant", *keys], sort=False).microseconds_per_token.mean().dropna().reset_index()
    base = times[times.variant == BASE].set_index(keys).microseconds_per_token
    if len(base):
        times = times.join(base.rename("base"), on=keys)
        times["microseconds_per_token"] /= times.pop("base")
    return times.rename(columns={"step": "seed"})


def _printed_levels(axes: Axes, printed: pd.DataFrame, variant: str, colour: str) -> None:
    for row in printed.itertuples():
        axes.axhline(row.value, color=colour, linestyle=":", label=f"{choice_in_words(variant)} ({row.source})")


def against_layers(
    axes: Axes,
    seeds: pd.DataFrame,
    value: str,
    variants: list[str],
    published: pd.DataFrame | None,
    geometric: bool = False,
) -> None:
    """Draw a value against the number of layers, a line for each variant, with the published numbers."""
    for number, variant in enumerate(variants):
        look = _numbers(variants)[variant]
        colour, marker = colour_of(look), marker_of(look)
        rows = seeds[seeds.variant == variant].dropna(subset=value)
        if len(rows):
            if seeds.layers.nunique() == 1:  # marks that no line joins are placed side by side
                rows = rows.assign(layers=rows.layers + 0.06 * (number - (len(variants) - 1) / 2))
            label = choice_in_words(variant)
            mean_line(axes, rows, "layers", value, colour, geometric=geometric, marker=marker, label=label)
        if published is None:
            continue
        of_variant = published[published.series == variant]
        printed, of_any_depth = of_variant.dropna(subset="x"), of_variant[of_variant.x.isna()]
        if len(printed):
            style: dict = {"color": colour, "marker": marker, "mfc": "none", "markersize": 6, "ls": "none"}
            axes.plot(printed.x, printed.value, label=f"{choice_in_words(variant)} ({printed.source.iloc[0]})", **style)
        _printed_levels(axes, of_any_depth, variant, colour)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if high - low < 1:  # networks of one size
        num_layers = int(seeds.layers.iloc[0])
        axes.set_xlim(num_layers - 0.5, num_layers + 0.5)
        axes.set_xticks([num_layers])
    axes.set_xlabel("layers")


@styled
def draw_speed(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Time of a training step over that of the same network with dot products, against the number of layers.

    Published ratios are open marks.
    """
    totals = table.groupby(["variant", "layers", "seed"], sort=False)[["seconds", "seconds_dot"]].sum().reset_index()
    ratios = totals.assign(ratio=totals.seconds / totals.seconds_dot)
    figure = empty_figure(panel_size()[0], panel_size()[1] + 1.0)
    grid = figure.subplots(1, 1, squeeze=False)
    against_layers(grid[0, 0], ratios, "ratio", list(dict.fromkeys(ratios.variant)), published)
    grid[0, 0].set_ylabel("time of a step / with dot products")
    return with_legend(figure, grid)

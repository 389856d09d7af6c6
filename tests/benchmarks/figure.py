"""The figure of the record of benchmarks."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import empty_figure, styled, title
from rankbench.plots.style import GREY, colour_of, colours, marker_of, panel_size, small


@styled
def draw_benchmarks(table: pd.DataFrame, goals: dict[str, tuple[str, tuple[str, float]]]) -> Figure:
    """The ratios with a goal over the recorded runs: median and range, a line for each case, the goal dashed.

    goals: what a ratio compares, and its goal. Each device has panels of its own; with many cases a ratio has a panel
    per setting, such as num_tokens=32.
    """
    panels = [
        panel
        for column, (meaning, goal) in goals.items()
        for device, rows in table[table.column == column].groupby("device")
        for panel in _panels(rows, meaning if device == "cpu" else f"{meaning}, {device}", goal)
    ]
    figure = empty_figure(2 * panel_size()[0], panel_size()[1] * len(panels))
    grid = figure.subplots(len(panels), squeeze=False)
    for axes, (heading, (bound, goal), rows) in zip(grid.flat, panels, strict=True):
        runs = {date: number for number, date in enumerate(sorted(rows.date.unique()))}
        for number, (name, of_case) in enumerate(rows.groupby("name", sort=False)):
            x = of_case.date.map(runs) + 0.05 * number
            style = {"color": colour_of(number), "marker": marker_of(number)}
            axes.plot(x, of_case["median"], label=name, **style)
            axes.vlines(x, of_case.smallest, of_case.largest, color=style["color"], linewidth=0.8, alpha=0.6)
        axes.axhline(goal, color=GREY, linestyle="--", linewidth=1, label=f"goal: {bound} {goal:g}")
        axes.set_title(heading, fontsize=small(7))
        axes.set_ylabel("ratio")
        axes.set_xlabel("recorded run (month-day, time)")
        axes.set_xlim(-0.5, len(runs) - 0.3)
        axes.set_xticks(range(len(runs)), [date[5:] for date in runs], rotation=30, ha="right")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        axes.set_ylim(0, 1.05 * max(goal, rows["median"].max(), rows.largest.max()))
    return figure


def _panels(rows: pd.DataFrame, meaning: str, goal: tuple[str, float]) -> list[tuple[str, tuple, pd.DataFrame]]:
    """(title, goal, rows with the column `name`): one panel, or one for each last word of many cases."""
    if rows.case.nunique() <= len(colours()):
        return [(title(meaning), goal, rows.assign(name=rows.case))] if len(rows) else []
    words = rows.case.str.rsplit(" ", n=1)
    rows = rows.assign(name=words.str[0], setting=words.str[-1])
    return [(title(meaning, setting), goal, of_setting) for setting, of_setting in rows.groupby("setting", sort=False)]

"""`rankbench plot`."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from rankbench.commands.checks import check_folder
from rankbench.commands.job import one_line, prepared
from rankbench.config.keys import ConfigError, check_known
from rankbench.config.schema import PlotConfig


def check(cfg: PlotConfig, words: Sequence[str] = ()) -> None:
    """Raise ConfigError for a table that cannot be drawn."""
    from rankbench.judging import figures_published
    from rankbench.plots import check_style
    from rankbench.report.figures import drawable

    check_style(cfg.plot.style)
    check_folder(cfg.out)
    check_known("published", [] if cfg.published is None else [cfg.published], figures_published())
    if not cfg.table:
        raise ConfigError('table="": which one? give a CSV file, as in `rankbench plot residual.csv`')
    drawable(Path(cfg.table), cfg.report)


@one_line
def run(config: DictConfig) -> None:
    """`rankbench plot`."""
    from rankbench.plots import drawn_with
    from rankbench.report.figures import Drawing, redraw

    cfg = prepared(config)
    how = Drawing(Path(cfg.out), cfg.report, cfg.statistic, cfg.plot.column, cfg.published)
    with drawn_with(cfg.plot.style):
        print("\n".join(redraw(Path(cfg.table), how)))

"""`rankbench report`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rankbench.commands.checks import check_folder
from rankbench.commands.job import one_line, prepared
from rankbench.config.keys import ConfigError, as_typed
from rankbench.config.schema import ReportConfig
from rankbench.runs.sweep import JOBS


def check(cfg: ReportConfig, words: Sequence[str] = ()) -> None:
    """Raise ConfigError for what cannot be reported."""
    from rankbench.plots import check_style
    from rankbench.report.jobs import find_runs, runs_in
    from rankbench.report.report import check_study
    from rankbench.report.results import check_pages
    from rankbench.report.scoreboard import EVERY, check_experiment

    check_style(cfg.plot.style)
    check_folder(cfg.out)
    if (Path(cfg.out) / "config.yaml").exists():  # its tables would be overwritten
        raise ConfigError(f"out={cfg.out}: the folder of a run; give report a folder of its own")
    if cfg.pages is not None:
        if cfg.scoreboard != EVERY:
            raise ConfigError(f"pages={cfg.pages}: the pages cover all presets; add experiment=all")
        check_folder(cfg.pages, "pages")
        check_pages(Path(cfg.pages))
    if cfg.scoreboard is None:
        jobs, folder = find_runs(cfg.runs), Path(cfg.out)
        if (folder / JOBS).exists() and {*map(Path.resolve, jobs)} != {*map(Path.resolve, runs_in(folder))}:
            raise ConfigError(f"out={cfg.out}: the folder of another sweep; give the report a folder of its own")
        return check_study(cfg.report, jobs, cfg.report.baseline)
    check_experiment(cfg.scoreboard, pages=None if cfg.pages is None else Path(cfg.pages))
    chosen = {f"report.{name}": value for name, value in vars(cfg.report).items() if name != "open"}
    chosen |= {f"plot.{name}": value for name, value in vars(cfg.plot).items()}
    for name in (name for name, value in chosen.items() if value):
        raise ConfigError(
            f"{name}={as_typed(chosen[name])}: with experiment={cfg.scoreboard} the figures are those that the "
            "runs have drawn; leave it out, or give runs=<folder> in place of experiment="
        )


@one_line
def run(config: DictConfig) -> None:
    """`rankbench report`."""
    from rankbench.plots import drawn_with
    from rankbench.report.jobs import find_runs
    from rankbench.report.live import watched
    from rankbench.report.report import gather
    from rankbench.report.scoreboard import scoreboard

    cfg = prepared(config)
    if cfg.scoreboard is not None:
        pages = None if cfg.pages is None else Path(cfg.pages)
        print("\n".join(scoreboard(cfg.scoreboard, Path(cfg.out), pages)))
        if cfg.report.open:
            _show(Path(cfg.out) / "scoreboard.html")
    else:
        how: dict[str, Any] = {"chosen": cfg.report, "statistic": cfg.statistic, "column": cfg.plot.column}
        how["baseline"] = cfg.report.baseline
        jobs, folder = find_runs(cfg.runs), Path(cfg.out)
        if cfg.runs == "latest":
            print(f"runs=latest: {os.path.commonpath(jobs)}")
        with drawn_with(cfg.plot.style):
            written = watched(cfg.runs, folder, **how) if cfg.report.watch else [gather(jobs, folder, **how)]
            for number, lines in enumerate(written):
                print("\n".join(lines), flush=True)
                if cfg.report.open and number == 0:
                    _show(folder / "report.html")


def _show(page: Path) -> None:
    """Open a page in the user's browser."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        print(f"report.open=true: no browser here; open {page}")

"""`rankbench train`."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from rankbench.commands.checks import check_folder, preset_in
from rankbench.commands.job import hydra_of_job, one_line, prepared, working
from rankbench.config.keys import ConfigError
from rankbench.config.schema import TrainConfig

MOST_PRINTED = 20  # seeds whose scores the command prints; of more seeds the lowest and the highest


def check(cfg: TrainConfig, words: Sequence[str] = ()) -> None:
    """Raise ConfigError for what cannot be trained or continued, and for a preset that only measures."""
    from rankbench.analysing.runner import check_analyses
    from rankbench.runs.machine import Machine
    from rankbench.runs.run import Run
    from rankbench.tasks import build_task
    from rankbench.training.loop import check_demands
    from rankbench.training.memory import check_memory
    from rankbench.training.writers import check_writers

    name, preset = preset_in(words)
    if preset is not None and preset.verb == "analyze":
        raise ConfigError(f"experiment={name}: trains nothing; use `rankbench analyze experiment={name}`")
    check_folder(cfg.out)
    machine = Machine.prepare(cfg)
    check_analyses(cfg, cfg)
    task = build_task(cfg.task)
    check_memory(cfg, task, machine)
    check_demands(cfg, task)
    Run(Path(cfg.out)).check_begun(cfg, str(machine.device))
    check_writers(cfg.trainer.writers)


@one_line
def run(config: DictConfig) -> float:
    """`rankbench train`. Returns the objective for a sweeper: by default the final test accuracy (regression: loss)."""
    from rankbench.analysing.runner import analyze_trained, draw_curves, drawn_line
    from rankbench.commands.finished_jobs import recipe, record, surroundings
    from rankbench.runs.run import Run
    from rankbench.runs.summary import objective_value
    from rankbench.runs.tables import mean_of_seeds
    from rankbench.tasks import build_task
    from rankbench.training.loop import train

    cfg = prepared(config)
    run = Run(Path(cfg.out))
    hydra, in_sweep = hydra_of_job()
    made_from = recipe(hydra.job.num, hydra.overrides.task, surroundings(hydra)) if in_sweep else None
    with working("train", cfg.out):
        summary = train(cfg, run)
        trained = [row for row in summary["seeds"] if row["status"] != "diverged"]
        score = "test_loss" if any(row.get("test_accuracy") is None for row in trained) else "test_accuracy"
        scores = [row[score] for row in trained]
        mean = sum(scores) / len(scores) if scores else float("nan")
        each = scores if len(scores) <= MOST_PRINTED else [min(scores), max(scores)]
        printed = (" " if each is scores else " to ").join(f"{value:.3f}" for value in each)
        lines = [f"{score.replace('_', ' ')} {mean:.3f} ({mean_of_seeds(len(trained))}: {printed})", f"-> {run.folder}"]
        if not in_sweep and (curves := draw_curves(cfg, run)):  # the report of a sweep has its curves
            lines.append(drawn_line(curves))
        print("\n".join(lines))
        if cfg.analysis and (trained or cfg.objective is None):  # a search continues if every seed diverged
            lines += (analysed := analyze_trained(cfg, run))
            print("\n".join(analysed))
        if not in_sweep:
            print(_closing_line(cfg, run.folder))
        else:
            texts = getattr(build_task(cfg.task), "files", [])
            record(run.folder, made_from, hydra.job.override_dirname, texts, "\n".join(lines).split("\n"))
    return mean if cfg.objective is None else objective_value(summary, cfg.objective)


def _closing_line(cfg: TrainConfig, folder: Path) -> str:
    """What to look at, and what to type next."""
    from rankbench.runs.files import OUTPUTS

    drawn = [folder / f"{name}.{kind}" for name in (*reversed(cfg.analysis), "metrics") for kind in cfg.figures[:1]]
    look = next((f"look at: {path}; " for path in drawn if path.exists()), "")
    is_latest = folder.resolve().parent == (OUTPUTS / "train").resolve()
    return f"{look}next: rankbench report runs={'latest' if is_latest else shlex.quote(str(folder))}"

"""`rankbench bench`."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from rankbench.commands.checks import check_folder
from rankbench.commands.job import one_line, prepared
from rankbench.config.schema import BenchConfig


def check(cfg: BenchConfig, words: Sequence[str] = ()) -> None:
    """Raise ConfigError for what cannot be timed."""
    from rankbench.analysing.runner import check_analyses
    from rankbench.bench import check_benchmarks
    from rankbench.runs.machine import Machine
    from rankbench.tasks import build_task
    from rankbench.training.memory import check_memory

    check_folder(Path(cfg.out))
    machine = Machine.prepare(cfg)
    check_analyses(cfg, cfg)
    check_memory(cfg, build_task(cfg.task), machine)
    check_benchmarks(cfg)


@one_line
def run(config: DictConfig) -> None:
    """`rankbench bench`."""
    from rankbench.bench import bench
    from rankbench.runs.files import write_json, write_text
    from rankbench.runs.machine import Machine
    from rankbench.runs.run import config_text

    cfg = prepared(config, check)
    machine, folder = Machine.prepare(cfg), Path(cfg.out)
    machine.log_threads(cfg.threads)
    write_text(folder / "config.yaml", config_text(cfg))
    write_json(folder / "environment.json", machine.record())
    bench(cfg, machine, folder)

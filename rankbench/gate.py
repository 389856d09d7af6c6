"""Hydra's callback: what happens before a command's folder is made, and after a sweep's last job."""

import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from rankbench.config import AnalyzeConfig, BaseConfig, ConfigError, resolve


class Gate(Callback):
    """Hydra's callback: refuses a wrong config before its folder is made, and gathers what a sweep's jobs wrote."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Check the whole config. Hydra would swallow an exception here, so a refusal exits at once."""
        command = config.hydra.job.name
        try:
            cfg = _job_config(config)
            check_everything(cfg)
            _check_overrides(cfg, config.hydra.overrides.task)
        except ConfigError as error:
            print(f"rankbench {command}: {error}", file=sys.stderr)
            raise SystemExit(1) from None

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Join the tables of the jobs, if they analysed anything."""
        from rankbench.report import gather_sweep

        cfg = _job_config(config)
        words = [
            *config.hydra.overrides.task,
            *(f"{key}={text}" for key, text in (config.hydra.sweeper.params or {}).items()),
        ]
        overrides = OverridesParser.create().parse_overrides(words)
        varied = [override.get_key_element() for override in overrides if override.is_sweep_override()]
        for line in gather_sweep(cfg, Path(config.hydra.sweep.dir), varied):
            print(line)


def _job_config(config: DictConfig) -> BaseConfig:
    own = config.copy()
    with read_write(own), open_dict(own):
        del own["hydra"]
    return resolve(own)


def check_everything(cfg: BaseConfig) -> None:
    """Raise ConfigError for anything in the config that cannot be: before any folder is made, any result written."""
    from rankbench.analyze import check_analyses
    from rankbench.config import AnalyzeConfig
    from rankbench.machine import Machine
    from rankbench.run import find_run
    from rankbench.tasks import build_task

    Machine.prepare(cfg)
    build_task(cfg.task)
    check_analyses(cfg)
    if isinstance(cfg, AnalyzeConfig) and cfg.run is not None:
        find_run(cfg.run).config()


def _check_overrides(cfg: BaseConfig, words: list[str]) -> None:
    """A run brings its own model, task and seeds: to change them here would do nothing."""
    if isinstance(cfg, AnalyzeConfig) and cfg.run is not None:
        for word in words:
            key = word.lstrip("+~").partition("=")[0]
            if key.split(".")[0] in ("model", "task", "seed", "replicas"):
                raise ConfigError(f"{word}: the run in run={cfg.run} has its own {key}; leave one of the two out")

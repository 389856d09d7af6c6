"""`rankbench analyze`."""

from collections.abc import Sequence

from omegaconf import DictConfig

from rankbench.commands.checks import check_folder, measured, preset_in
from rankbench.commands.job import one_line, prepared, working
from rankbench.config.keys import ConfigError
from rankbench.config.schema import AnalyzeConfig

# Keys that are for modules and checkpoints alone
OF_OTHERS = ("inputs", "tokenizer", "tokens", "special_tokens", "masked", "mask", "output", "layers", "token_axis")


def check(cfg: AnalyzeConfig, words: Sequence[str] = (), writes: bool = True) -> None:
    """Raise ConfigError for what cannot be measured, for words that would change nothing, and for a preset that trains.

    writes: whether the caller is going to write to the folder `cfg.out`.
    """
    from rankbench.analysing.runner import check_analyses
    from rankbench.runs.machine import Machine
    from rankbench.tasks import build_task
    from rankbench.training.memory import check_memory

    _check_words(cfg, words)
    if writes:
        check_folder(cfg.out)
    machine = Machine.prepare(cfg)
    check_analyses(cfg, measured(cfg))
    if not _is_given(cfg):
        check_memory(cfg, build_task(cfg.task), machine)
    if not cfg.analysis:
        raise ConfigError("analysis=[]: nothing to measure; name at least one, as in analysis=[paths]")
    _check_seeds(cfg)


def _is_given(cfg: AnalyzeConfig) -> bool:
    """Whether the networks are those of a run, a module or a checkpoint."""
    return bool(cfg.run or cfg.module or cfg.checkpoint)


def _check_words(cfg: AnalyzeConfig, words: Sequence[str]) -> None:
    """Refuse a preset that is not for this command, and words that would change nothing."""
    name, preset = preset_in(words)
    if preset is not None and not _is_given(cfg):  # of those any preset may say how they are measured
        if preset.verb == "train":
            raise ConfigError(
                f"experiment={name}: trains what it measures; use `rankbench train experiment={name}`, or give run="
            )
        if preset.of_given_network:
            raise ConfigError(
                f"experiment={name}: measures a network that you give; use `{preset.command}`, or give run=<folder> or "
                "model=<file.py>:<function>"
            )
    defaults = vars(AnalyzeConfig)
    named = [f"{name}={getattr(cfg, name)}" for name in OF_OTHERS if getattr(cfg, name) != defaults[name]]
    if named and not (cfg.module or cfg.checkpoint):
        raise ConfigError(f"{named[0]}: says how to read a network that is not ours; leave it out")
    check_keys(cfg, words)


def check_keys(cfg: AnalyzeConfig, words: Sequence[str]) -> None:
    """Refuse keys that would change nothing: a run, a module or a checkpoint brings its own model and task."""
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        group = key.partition(".")[0]
        if cfg.run is not None and group in ("model", "task", "seed", "replicas"):
            raise ConfigError(f"{word}: the run in run={cfg.run} has its own {key}; leave one of the two out")
        if (foreign := cfg.module or cfg.checkpoint) is not None and group in ("model", "task"):
            raise ConfigError(
                f"{word}: {foreign} is not a network of rankbench and has no {key}; leave one of the two out"
            )


def _check_seeds(cfg: AnalyzeConfig) -> None:
    from rankbench.runs.run import find_run

    if cfg.run is None and cfg.seeds is not None:
        raise ConfigError(
            f"seeds={cfg.seeds}: chooses among the seeds of a run; give run= (fresh weights: seed= and replicas=)"
        )
    if cfg.run is None:
        return
    run = find_run(cfg.run)
    if not (run.folder / "checkpoint.safetensors").exists():
        run.weights()  # says why there are none
    first, last = run.config.seed, run.config.seed + run.config.replicas - 1
    if any(not first <= seed <= last for seed in cfg.seeds or ()):
        raise ConfigError(f"seeds={cfg.seeds}: the seeds of {run.folder} are {first} to {last}")


@one_line
def run(config: DictConfig) -> None:
    """`rankbench analyze`."""
    from rankbench.analysing.runner import analyze_into

    cfg = prepared(config)
    with working("analyze", cfg.out):
        print("\n".join(analyze_into(cfg)))

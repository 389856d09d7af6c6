"""What a benchmark is told: the config of a training, and how often and on how much it is timed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from rankbench.commands.compose import as_keys, compose
from rankbench.config.keys import ConfigError
from rankbench.config.schema import TrainConfig

# Words of `rankbench train` that come before the user's.
SIZES = ("model.layers=6", "replicas=5", "trainer.steps=20", "trainer.eval_every=50")
OWN = {"repeats": (1, 10_000), "sequences": (1, 10_000_000)}  # keys of the benchmarks alone, with their ranges


@dataclass
class BenchConfig(TrainConfig):
    """A training's config, where trainer.steps is the length of one timed block. repeats: of A B A B ... sequences:
    whose paths are summed. record: folder, such as docs, in whose BENCHMARKS.md the ratios are recorded."""

    repeats: int = 7
    sequences: int = 2000
    record: str | None = None


def config_of(words: Sequence[str]) -> BenchConfig:
    """The checked config of these words: own keys and those of `rankbench train`. Raises ConfigError."""
    own: dict[str, Any] = {}
    others = []
    for word in words:
        key, _, value = word.partition("=")
        if key in OWN or key == "record":
            own[key] = _whole(key, value) if key in OWN else value
        else:
            others.append(word)
    out = time.strftime("out=outputs/bench/%Y-%m-%d_%H-%M-%S")
    cfg = cast(TrainConfig, compose("train", *as_keys("train", [out, *SIZES, *others])))
    for key in ("analysis", "claims", "published"):
        if getattr(cfg, key):
            raise ConfigError(f"{key}: a benchmark analyses nothing; give it to `rankbench analyze`")
    if cfg.model.kind != "transformer":
        raise ConfigError(f"model.kind={cfg.model.kind}: the benchmarks time Transformers; use model.kind=transformer")
    return BenchConfig(**vars(cfg), **own)


def _whole(key: str, value: str) -> int:
    low, high = OWN[key]
    if not (value.isdecimal() and low <= int(value) <= high):
        raise ConfigError(f"{key}={value}: out of range; give a whole number from {low} to {high:,}")
    return int(value)

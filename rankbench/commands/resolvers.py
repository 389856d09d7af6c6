"""Functions that conf/*.yaml calls as `${name:...}`. This module imports neither Hydra nor torch."""

import hashlib
import os
import re
from collections.abc import Callable
from glob import glob
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rankbench.config.schema import OBJECTIVES

LONGEST_FOLDER = 100  # characters of a job's folder name; file systems allow 255 bytes, but terminals show less


def by_budget(scales: Any, *, _root_: Any) -> Any:
    """`${by_budget:{paper:3000,laptop:600,smoke:20}}`: the value of a key at each scale of a preset."""
    return scales[_root_.budget or "paper"]


def by_value(value: Any, values: Any, otherwise: Any) -> Any:
    """`${by_value:${task.points},{4:40000},6000}`: 40000 if task.points is 4, else 6000."""
    return values.get(value, otherwise)


def noam_peak(gamma: float, width: int, warmup: int, layers: int = 1) -> float:
    """Peak learning rate gamma / sqrt(layers * width * warmup).

    With one layer, this lr and warmup, optimizer.schedule=inverse_sqrt is the schedule of Vaswani et al. 2017, eq. 3:
    gamma width^-1/2 min(t^-1/2, t warmup^-3/2) at the steps t = 1, 2, ...
    """
    return gamma / (layers * width * warmup) ** 0.5


def geometric(first: float, last: float, count: int) -> list[float]:
    """`${geometric:0.1,10,3}`: [0.1, 1.0, 10.0], each number the same multiple of the one before."""
    steps = max(count - 1, 1)
    return [float(f"{first * (last / first) ** (step / steps):.6g}") for step in range(count)]


def columns(width: int, heads: int, times: int) -> int:
    """`times` times the usual head width."""
    return times * width // heads


def heads_of(width: int, head_width: int | None, power: float) -> int:
    """Number of heads of this width with width^power columns in all: width^power / head_width, rounded."""
    return max(1, round(width**power / (head_width or width)))


def direction_of(objective: str | None) -> str:
    """Direction of a search for this objective. An unknown objective is refused later, when the config is checked."""
    return OBJECTIVES.get(objective or "", "minimize")


def at_a_time(launcher: str) -> int | None:
    """Number of jobs handed to a launcher at a time; None for all. submitit's local launcher, which starts all that it
    gets at once, gets one for each core."""
    return os.cpu_count() if launcher.endswith("submitit_launcher.LocalLauncher") else None


def jobs_at_once(device: str) -> int:
    """Number of jobs that joblib runs at once: one for each GPU, because two on a GPU would wait for each other;
    without a GPU -1, one for each core."""
    gpus, visible = len(glob("/dev/nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, len([number for number in visible.split(",") if number not in ("", "-1")]))
    return -1 if device == "cpu" else gpus or -1


def job_folder(number: int, overrides: str, *, _root_: DictConfig | None = None) -> str:
    """Folder of a sweep's job, such as `3_model.layers=6`. A long text, or one with slashes, is cut and gets a digest.

    _root_: the job's config, whose values replace references to other keys, such as `${model.skip}`.
    """
    if _root_ is not None:
        reference = r"\$\\?\{([\w.]+)\\?\}"  # Hydra puts a backslash before each brace of a job's overrides
        overrides = re.sub(reference, lambda match: str(OmegaConf.select(_root_, match[1])), overrides)
    readable = re.sub(r"[^\w.,=+-]", "-", str(overrides))
    if readable != overrides or len(readable) > LONGEST_FOLDER:
        digest = hashlib.sha256(str(overrides).encode()).hexdigest()[:8]
        readable = f"{readable[:LONGEST_FOLDER]}~{digest}"
    return f"{number}_{readable}" if overrides else str(number)


RESOLVERS: tuple[Callable[..., Any], ...] = (by_budget, by_value, noam_peak, geometric, columns, heads_of)
RESOLVERS += (direction_of, at_a_time, jobs_at_once, job_folder)

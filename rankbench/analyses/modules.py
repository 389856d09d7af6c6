"""The subjects of `rankbench analyze` that are not networks of ours: a user's module with its inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankbench.analyses.analysis import ModuleSubject
from rankbench.config import AnalyzeConfig
from rankbench.keys import ConfigError
from rankbench.model.modules import Example, as_example, build, read_inputs, unpacked
from rankbench.runs.machine import Machine

# By spec: checked before anything is written, and measured later, so that the user's code runs once.
BUILT: dict[str, tuple[nn.Module, Example | None]] = {}


@contextmanager
def offering(module: nn.Module, inputs: Any) -> Iterator[str]:
    """Let a copy of a module, with its inputs, be known by a name that can stand in cfg.module."""
    spec = f"{type(module).__name__}:given"
    example = as_example(inputs, "rankbench.analyze")
    BUILT[spec] = unpacked(deepcopy(module), "rankbench.analyze")[0], example
    try:
        yield spec
    finally:
        del BUILT[spec]


def checked_modules(cfg: AnalyzeConfig) -> list[ModuleSubject]:
    """The modules of the config, run on one sequence; ConfigError for what cannot be."""
    if cfg.claims:
        raise ConfigError(f"claims=[{','.join(cfg.claims)}]: claims are about networks of ours; leave them out")
    for name in ("run", "checkpoint"):
        if (value := getattr(cfg, name)) is not None:
            raise ConfigError(f"{name}={value}: beside model={cfg.module}; leave one of the two out")
    if cfg.replicas != 1:
        raise ConfigError(f"replicas={cfg.replicas}: model={cfg.module} has one set of weights; use replicas=1")
    subjects = module_subjects(cfg, Machine.prepare(cfg))
    for subject in subjects:
        check_runs(subject)
    return subjects


def module_subjects(cfg: AnalyzeConfig, machine: Machine) -> list[ModuleSubject]:
    """The user's module with the inputs of the config, or else with its own."""
    if cfg.module not in BUILT:
        BUILT[cfg.module] = build(cfg.module)
    module, example = BUILT[cfg.module]
    if cfg.inputs is not None:
        example = read_inputs(cfg.inputs)
    if example is None:
        raise ConfigError(
            f"inputs=null: model={cfg.module} brings none; give inputs=<file>, or return (module, inputs)"
        )
    inputs = "own" if cfg.inputs is None else Path(cfg.inputs).name
    return [subject_of(module, example, machine, name=cfg.module, inputs=inputs, seed=cfg.seed)]


def subject_of(
    module: nn.Module, example: Example, machine: Machine, name: str, inputs: str, seed: int
) -> ModuleSubject:
    """A module with its inputs, on the machine and in its number type; both are changed in place."""
    module = module.to(machine.device, machine.dtype)
    return ModuleSubject(
        name, inputs, type(module).__name__, seed, {"given": module}, example.to(machine.device, machine.dtype)
    )


@torch.no_grad()
def check_runs(subject: ModuleSubject) -> None:
    """ConfigError if a module does not run on its inputs, or if the targets do not fit what it returns."""
    first = subject.example[:1]
    for module in subject.modules.values():
        try:
            module(*first.args, **first.kwargs)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"model={subject.name}: does not run on inputs={subject.inputs} ({reason[:300]}); "
                "HYDRA_FULL_ERROR=1 shows where"
            ) from error

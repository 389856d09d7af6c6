"""The subjects that a command measures: the seeds of a run, a network that is not ours, or fresh networks."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from rankbench.analyses import Subject
from rankbench.analysing.modules import foreign_subjects, is_foreign, tell_unknown
from rankbench.config.keys import ConfigError
from rankbench.config.schema import AnalyzeConfig, BaseConfig, TrainConfig
from rankbench.model import build_model, initial_model
from rankbench.model.kinds import kinds_of_task
from rankbench.model.lstm import Lstm
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.runs.run import PUT_BACK, Run, check_growing, find_run
from rankbench.runs.tables import read_table
from rankbench.seeds import generator_for
from rankbench.tasks import Corpus, Finite, Task, build_task
from rankbench.tasks.task import drawn

HISTORIES = {"history": "layers.csv", "curve": "metrics.csv"}  # fields of Subject: files that training writes
BASELINE_SEQUENCES = 10_000  # of an endless training stream, enough to count its commonest class
CORPUS_SEQUENCES = 1_000  # the same for a corpus, whose sequences are longer
NEEDED = {"metrics.csv": ("split", "loss", "accuracy", "tokens_per_second")}  # columns besides seed and step
CHECKED_SEQUENCES = 64  # on which a network's outputs must be finite

log = logging.getLogger(__name__)


def subjects_of(cfg: AnalyzeConfig, machine: Machine) -> Sequence[Subject]:
    """The subjects that the config names: those of a run, a network that is not ours, or fresh models."""
    if cfg.run is not None:
        return subjects_of_run(find_run(cfg.run), machine, cfg.seeds, cfg.uncounted)
    if not is_foreign(cfg):
        return fresh_subjects(cfg, machine)
    subjects = foreign_subjects(cfg, machine)
    tell_unknown(subjects[0])
    return subjects


def subjects_of_run(
    run: Run, machine: Machine, seeds: list[int] | None = None, uncounted: Sequence[str] | None = None
) -> list[Subject]:
    """Subjects for these seeds of a trained run (None: all), with trained and initial weights, less diverged seeds.

    uncounted: kinds of tokens that are left out.
    ConfigError if all of them have diverged, or if the checkpoint does not fit the config.
    """
    run.check_seeds()
    cfg, stacked = run.config, run.weights()
    task = build_task(cfg.task)
    if run.status in ("running", "failed"):
        log.warning("the training of %s has not finished: its weights are those of its last checkpoint", run.folder)
    diverged = {row["seed"] for row in run.summary().get("seeds", ()) if row["status"] == "diverged"}
    for seed in sorted(diverged if seeds is None else diverged & set(seeds)):
        log.warning("seed %d of %s diverged and is left out", seed, run.name)
    subjects = []
    files = {field: run.folder / name for field, name in HISTORIES.items()}
    histories = {field: _history(file) for field, file in files.items() if file.exists()}
    for index in range(cfg.replicas):
        seed = cfg.seed + index
        if seed in diverged or (seeds is not None and seed not in seeds):
            continue
        trained = build_model(cfg.model, task)
        expected = {name: (cfg.replicas, *parameter.shape) for name, parameter in trained.state_dict().items()}
        if {name: tuple(weight.shape) for name, weight in stacked.items()} != expected:
            raise ConfigError(
                f"run={run.folder}: the weights in checkpoint.safetensors do not fit config.yaml; train it again"
            )
        # assigned, not copied: a copy would round the weights of a float64 run to the model's float32
        trained.load_state_dict({name: weight[index] for name, weight in stacked.items()}, assign=True)
        networks = {"trained": trained, "initialised": initial_model(cfg.model, task, seed)}
        recorded = {field: rows[rows.seed == seed].reset_index(drop=True) for field, rows in histories.items()}
        if "curve" in recorded and "test" not in set(recorded["curve"].split):
            raise ConfigError(f"{files['curve']}: has no row of seed {seed} and split test; {PUT_BACK}")
        subjects.append(_subject(run.name, task, seed, networks, machine, uncounted, cfg, **recorded))
    if not subjects:
        every = "every seed" if seeds is None else f"seeds={seeds}: each of them"
        raise ConfigError(
            f"run={run.folder}: {every} diverged; train it with a lower optimizer.lr, or with trainer.clip"
        )
    return subjects


def _history(path: Path) -> pd.DataFrame:
    """A table that training wrote; ConfigError if it was changed: words for numbers, a lost column, a row twice."""
    table = read_table(path, grows=True)
    check_growing(table, path, NEEDED.get(path.name, ()))
    axes = [name for name in ("step", "seed", "split", "layer", "sublayer", "head") if name in table]
    if table.empty or table.duplicated(axes).any():
        raise ConfigError(f"{path}: {'has no rows' if table.empty else 'has a row twice'}; {PUT_BACK}")
    return table


def fresh_subjects(cfg: BaseConfig, machine: Machine) -> list[Subject]:
    """Untrained models of the config, one for each seed."""
    task, uncounted = build_task(cfg.task), getattr(cfg, "uncounted", None)
    models = {seed: initial_model(cfg.model, task, seed) for seed in range(cfg.seed, cfg.seed + cfg.replicas)}
    return [_subject("fresh", task, seed, {"initialised": model}, machine, uncounted) for seed, model in models.items()]


def _subject(
    run: str,
    task: Task,
    seed: int,
    networks: dict[str, Transformer | Lstm],
    machine: Machine,
    uncounted: Sequence[str] | None,
    training: TrainConfig | None = None,
    **recorded: pd.DataFrame,
) -> Subject:
    if isinstance(task, Corpus):
        splits = task.splits()
        train, test = splits["train"][:CORPUS_SEQUENCES], splits["test"]
    elif isinstance(task, Finite):
        train, test = (task.split(name, seed) for name in ("train", "test"))
    else:
        train = drawn(task, task.train_size or BASELINE_SEQUENCES, generator_for(seed, "train"))
        test = train if task.test_size is None else drawn(task, task.test_size, generator_for(seed, "test"))
    train, test = (batch.to(machine.device, machine.dtype) for batch in (train, test))
    placed = {name: model.to(machine.device, machine.dtype).eval() for name, model in networks.items()}
    kinds = kinds_of_task(task, test)
    kinds.check(uncounted or (), "uncounted")
    for model in placed.values():
        model.kinds = replace(kinds, left_out=tuple(uncounted or ()))
    return Subject(run, seed, task, train, test, placed, training=training, **recorded)


@torch.no_grad()
def check_finite(subjects: Sequence[Subject]) -> None:
    """Raise ConfigError if the output of a network overflows or is nan: no measurement of it would be a number."""
    for subject in subjects:
        for weights, network in subject.networks.items():
            output = network(subject.test.inputs[:CHECKED_SEQUENCES])
            if not output.isfinite().all():
                of_ours = "give a lower model.init_gain or optimizer.lr, or a norm"
                of_others = "check that its weights are finite, or try precision=fp64"
                raise ConfigError(
                    f"model={network.name}: the output of seed {subject.seed}, {weights}, is not finite, so there is "
                    f"nothing to measure; {of_ours if subject.foreign is None else of_others}"
                )

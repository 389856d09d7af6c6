"""Analyses of a run or of a fresh model: for each analysis a table, a figure and a digest; then the claims."""

import dataclasses
import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from rankbench import plots
from rankbench.analyses import ANALYSES, Plan, Subject
from rankbench.claims import CLAIMS, figures_published, judge, published, verdict_line
from rankbench.config import AnalyzeConfig, BaseConfig, ConfigError, TrainConfig, typed, unknown
from rankbench.files import write_json
from rankbench.machine import Machine
from rankbench.model import build_model, initial_model, skeleton
from rankbench.model.lstm import Lstm
from rankbench.model.transformer import Transformer
from rankbench.run import Run
from rankbench.seeds import generator_for
from rankbench.tables import read_table, with_who, write_table
from rankbench.tasks import Corpus, Task, build_task

HISTORIES = {"layers.csv": "history", "metrics.csv": "curve"}  # what training wrote, and the field of Subject

log = logging.getLogger(__name__)

BASELINE_SEQUENCES = 10_000  # of an endless training stream, to count its commonest class
CORPUS_SEQUENCES = 1_000  # of a corpus' training set, whose sequences are longer, for the same


def check_analyses(cfg: BaseConfig, measured: BaseConfig) -> None:
    """ConfigError where an analysis does not exist, its options cannot be, or it does not fit task, model or training.

    measured: the config of the task and the model, a run's own where the command measures a run.
    """
    options, task = options_of(cfg), build_task(measured.task)
    training = measured if isinstance(measured, TrainConfig) else None
    plan = Plan(task, skeleton(measured.model, task), training)
    for name, chosen in options.items():
        if not isinstance(plan.model, Transformer) and not ANALYSES[name].any_model:
            fit = ", ".join(other for other, analysis in ANALYSES.items() if analysis.any_model)
            raise ConfigError(
                f"analysis={name}: takes Transformers apart, not model.kind={measured.model.kind}; use {fit}"
            )
        if (check := ANALYSES[name].check) is not None:
            check(plan, chosen)


def options_of(cfg: BaseConfig) -> dict[str, Any]:
    """The options of each analysis that the config names, typed; ConfigError for what does not exist."""
    for name in cfg.analysis:
        if name not in ANALYSES:
            raise ConfigError(unknown("analysis", name, ANALYSES))
    for name in cfg.claims:
        if name not in CLAIMS:
            raise ConfigError(unknown("claims", name, CLAIMS))
        if CLAIMS[name].table not in cfg.analysis:
            raise ConfigError(
                f"claims={name}: judged by analysis={CLAIMS[name].table}, which this command does not run"
            )
    if cfg.published is not None and cfg.published not in (known := list(figures_published())):
        raise ConfigError(f"published={cfg.published}: no published numbers; allowed are {', '.join(known)}")
    return {name: typed(ANALYSES[name].options, options, f"analysis.{name}") for name, options in cfg.analysis.items()}


def subjects_of_run(run: Run, machine: Machine) -> list[Subject]:
    """Every seed of a trained run that has not diverged, with its trained and its initial weights."""
    cfg, stacked = run.config(), run.weights()
    task = build_task(cfg.task)
    diverged = {one["seed"] for one in run.summary().get("seeds", ()) if one["status"] == "diverged"}
    for seed in sorted(diverged):
        log.warning("seed %d of %s diverged and is left out", seed, run.name)
    subjects = []
    histories = {name: read_table(run.folder / name) for name in HISTORIES if (run.folder / name).exists()}
    for index in range(cfg.replicas):
        seed = cfg.seed + index
        if seed in diverged:
            continue
        trained = build_model(cfg.model, task)
        expected = {name: (cfg.replicas, *parameter.shape) for name, parameter in trained.state_dict().items()}
        if {name: tuple(weight.shape) for name, weight in stacked.items()} != expected:
            raise ConfigError(
                f"run={run.folder}: the weights in checkpoint.safetensors do not fit config.yaml; train it again"
            )
        # assigned, not copied: a copy would round the weights of a float64 run to the model's float32
        trained.load_state_dict({name: weight[index] for name, weight in stacked.items()}, assign=True)
        models = {"trained": trained, "initialised": initial_model(cfg.model, task, seed)}
        mine = {name: rows[rows.seed == seed].reset_index(drop=True) for name, rows in histories.items()}
        told = {HISTORIES[name]: rows for name, rows in mine.items()}
        subjects.append(_subject(run.name, task, seed, models, machine, **told))
    if not subjects:
        raise ConfigError(f"run={run.folder}: every seed diverged; there is nothing to analyse")
    return subjects


def fresh_subjects(cfg: AnalyzeConfig, machine: Machine) -> list[Subject]:
    """Untrained models of the config, one for each seed."""
    task = build_task(cfg.task)
    seeds = range(cfg.seed, cfg.seed + cfg.replicas)
    return [
        _subject("fresh", task, seed, {"initialised": initial_model(cfg.model, task, seed)}, machine) for seed in seeds
    ]


def _subject(
    run: str,
    task: Task,
    seed: int,
    models: dict[str, Transformer | Lstm],
    machine: Machine,
    **told: pd.DataFrame,
) -> Subject:
    if isinstance(task, Corpus):
        splits = task.splits()
        train, test = splits["train"][:CORPUS_SEQUENCES], splits["test"]
    else:
        train = task.sample(task.train_size or BASELINE_SEQUENCES, generator_for(seed, "train"))
        test = train if task.test_size is None else task.sample(task.test_size, generator_for(seed, "test"))
    train, test = (batch.to(machine.device, machine.dtype) for batch in (train, test))
    placed = {name: model.to(machine.device, machine.dtype).eval() for name, model in models.items()}
    return Subject(run, seed, task, train, test, placed, **told)


def analyze(cfg: BaseConfig, subjects: list[Subject], folder: Path) -> list[str]:
    """Run each analysis of the config on every subject and write <name>.csv, .png and .pdf; then verdicts.csv.

    What the folder holds already, of the same subjects with the same options, is not computed again. Returns lines for
    the reader: digests, where the files are, verdicts.
    """
    options = options_of(cfg)
    done_file = folder / "analyses.json"
    done = json.loads(done_file.read_text()) if done_file.exists() else {}
    measured = _fingerprint(subjects)
    lines, tables = [], {}
    for name, chosen in options.items():
        csv, asked = folder / f"{name}.csv", {"options": dataclasses.asdict(chosen), "subjects": measured}
        if csv.exists() and asked.items() <= done.get(name, {}).items():
            log.info("%s is there already", csv)
        else:
            began = time.perf_counter()
            write_table(_table(name, chosen, subjects), csv)
            done[name] = asked | {"seconds": round(time.perf_counter() - began, 2)}
            write_json(done_file, done)
        tables[name] = read_table(csv)
        lines += [ANALYSES[name].digest(tables[name]), f"-> {csv}"]
    return lines + present(cfg, tables, folder)


def _fingerprint(subjects: list[Subject]) -> str:
    """A digest of all that an analysis sees: seeds, task, model, number type and every weight."""
    digest = hashlib.sha256()
    for subject in subjects:
        digest.update(repr((subject.who, subject.task)).encode())
        for weights, model in subject.models.items():
            digest.update(repr((weights, model.cfg, model.read_out.weight.dtype)).encode())
            for parameter in model.parameters():
                digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _table(name: str, options: Any, subjects: list[Subject]) -> pd.DataFrame:
    bar = tqdm(subjects, desc=name, unit="seed", disable=not sys.stderr.isatty())
    parts = []
    for number, subject in enumerate(bar, 1):
        parts.append(with_who(ANALYSES[name].table(subject, options), **subject.who))
        if bar.disable:
            log.info("%s: seed %d (%d of %d)", name, subject.seed, number, len(subjects))
    return pd.concat(parts, ignore_index=True)


def present(cfg: BaseConfig, tables: dict[str, pd.DataFrame], folder: Path, facet: str | None = None) -> list[str]:
    """Figures of the tables and verdicts on the claims, written to the folder; returns lines that say so."""
    return draw(tables, folder, cfg.published, facet) + judge_all(cfg.claims, tables, folder, facet)


def draw(
    tables: dict[str, pd.DataFrame],
    folder: Path,
    figure_published: str | None,
    facet: str | None = None,
    kinds: tuple[str, ...] = plots.KINDS,
) -> list[str]:
    """A figure of each analysis' table, in files of these kinds; returns lines that name them."""
    lines = []
    beside = published(figure_published) if figure_published else None
    for name, table in tables.items():
        if ANALYSES[name].figure is None:
            continue
        paths = plots.save(ANALYSES[name].figure(table, beside, facet), folder / name, kinds)
        lines.append(f"-> {' and '.join(str(path) for path in paths)}")
    return lines


def judge_all(claims: list[str], tables: dict[str, pd.DataFrame], folder: Path, facet: str | None = None) -> list[str]:
    """Verdicts on the claims, written to verdicts.csv where there are any; returns them as lines."""
    if not claims:
        return []
    verdicts = [verdict for name in claims for verdict in judge(name, tables[CLAIMS[name].table], facet)]
    write_table(pd.DataFrame(verdicts), folder / "verdicts.csv")
    return [*map(verdict_line, verdicts), f"-> {folder / 'verdicts.csv'}"]

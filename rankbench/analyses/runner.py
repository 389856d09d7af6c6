"""Analyses of a run or of a fresh model: for each analysis a table, a figure and a digest; then the claims."""

import dataclasses
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import pandas as pd

from rankbench import __version__, plots
from rankbench.analyses import ANALYSES, ModuleSubject, Plan, Subject
from rankbench.analyses.modules import checked_subjects, foreign_subjects, is_foreign
from rankbench.claims import CLAIMS, Facet, figures_published, judge, published, verdict_line
from rankbench.config import AnalyzeConfig, BaseConfig, TrainConfig
from rankbench.keys import ConfigError, typed, unknown
from rankbench.model import build_model, initial_model, skeleton
from rankbench.model.lstm import Lstm
from rankbench.model.transformer import Transformer
from rankbench.progress import bar
from rankbench.runs.files import write_json, write_text
from rankbench.runs.machine import Machine, git_state, source_digest
from rankbench.runs.run import Run, config_text, find_run
from rankbench.runs.tables import read_table, with_who, write_table
from rankbench.seeds import generator_for
from rankbench.tasks import Corpus, Task, build_task

HISTORIES = {"layers.csv": "history", "metrics.csv": "curve"}  # what training wrote, and the field of Subject

# What a table is a function of, as analyses.json records it, and in words.
KEY = {
    "options": "options",
    "subjects": "networks and their training",
    "rankbench": "rankbench's version",
    "code": "rankbench's source",
    "corpus": "the corpus",
}

log = logging.getLogger(__name__)

BASELINE_SEQUENCES = 10_000  # of an endless training stream, to count its commonest class
CORPUS_SEQUENCES = 1_000  # of a corpus' training set, whose sequences are longer, for the same


def check_analyses(cfg: BaseConfig, measured: BaseConfig) -> None:
    """ConfigError where an analysis does not exist, its options cannot be, or it does not fit task, model or training.

    measured: the config of the task and the model, a run's own where the command measures a run.
    """
    options = options_of(cfg)
    if is_foreign(cfg):
        _check_foreign(cfg, options)
        return
    task = build_task(measured.task)
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


def _check_foreign(cfg: AnalyzeConfig, options: dict[str, Any]) -> None:
    """The same for a network that is not ours."""
    for subject in checked_subjects(cfg):
        is_module = isinstance(subject, ModuleSubject)
        fit = [
            name
            for name, analysis in ANALYSES.items()
            if analysis.of_module is not None or (analysis.any_network and not is_module)
        ]
        for name, chosen in options.items():
            if name not in fit:
                measured = f"model={cfg.module}" if cfg.checkpoint is None else f"model.path={cfg.checkpoint}"
                raise ConfigError(
                    f"analysis={name}: takes networks of ours apart, not {measured}; use {', '.join(fit)}"
                )
            if is_module and ANALYSES[name].check_module is not None:
                for module in subject.modules.values():
                    ANALYSES[name].check_module(module, subject.example[:1])
            if not is_module and ANALYSES[name].check is not None:
                ANALYSES[name].check(Plan(subject.task, subject.model, None), chosen)


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


def subjects_of(cfg: AnalyzeConfig, machine: Machine) -> list[Subject] | list[ModuleSubject]:
    """What the config asks to measure: a run, a network that is not ours, or fresh models."""
    if cfg.run is not None:
        return subjects_of_run(find_run(cfg.run), machine)
    return foreign_subjects(cfg, machine) if is_foreign(cfg) else fresh_subjects(cfg, machine)


def subjects_of_run(run: Run, machine: Machine) -> list[Subject]:
    """Every seed of a trained run that has not diverged, with its trained and its initial weights."""
    cfg, stacked = run.config, run.weights()
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
        raise ConfigError(
            f"run={run.folder}: every seed diverged; train it with a lower optimizer.lr, or with trainer.clip"
        )
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


def analyze_trained(cfg: TrainConfig, run: Run) -> list[str]:
    """The analyses that a training config names, in its run's folder. They are in float64, whatever the network was
    trained in, because sums are checked to rounding. Returns lines for the reader."""
    machine = Machine.prepare(dataclasses.replace(cfg, precision="fp64"))
    return analyze(cfg, subjects_of_run(run, machine), run.folder)


def analyze_into(cfg: AnalyzeConfig, command: list[str] | None = None) -> list[str]:
    """Everything that `rankbench analyze` leaves in the folder `cfg.out`: a record of config and machine, the tables,
    figures and verdicts, and a summary. command: see `Machine.record`. Returns lines for the reader."""
    machine, folder = Machine.prepare(cfg), Path(cfg.out)
    subjects = subjects_of(cfg, machine)
    write_text(folder / "config.yaml", config_text(cfg))
    write_json(folder / "environment.json", machine.record(command))
    run = None if cfg.run is None else find_run(cfg.run)
    lines = analyze(cfg, subjects, folder)
    summary = {
        "status": "finished",
        "run": None if run is None else str(run.folder.resolve()),
        "analyses": list(cfg.analysis),
        "seeds": [{"seed": subject.seed, "status": "finished"} for subject in subjects],
    }
    write_json(folder / "summary.json", summary)
    return lines


def analyze(cfg: BaseConfig, subjects: list[Subject] | list[ModuleSubject], folder: Path) -> list[str]:
    """Run each analysis of the config on every subject and write <name>.csv, .png and .pdf; then verdicts.csv.

    A table that the folder holds already is not computed again, if everything in KEY is the same. Returns lines for the
    reader: digests, where the files are, verdicts.
    """
    options = options_of(cfg)
    done_file = folder / "analyses.json"
    done = json.loads(done_file.read_text()) if done_file.exists() else {}
    same = {
        "subjects": _fingerprint(subjects),
        "rankbench": __version__,
        "code": source_digest(),
        "corpus": None if isinstance(subjects[0], ModuleSubject) else _corpus_digest(subjects[0].task),
    }
    lines, tables = [], {}
    for name, chosen in options.items():
        csv, key = folder / f"{name}.csv", {"options": dataclasses.asdict(chosen)} | same
        reason = _why_computed(csv, done.get(name), key)
        if reason is None:
            log.info("%s is there already: %s are the same", csv, ", ".join(KEY.values()))
        else:
            log.info("%s is computed%s", csv, reason)
            began = time.perf_counter()
            write_table(measure(name, chosen, subjects), csv)
            done[name] = key | {"git": git_state(), "seconds": round(time.perf_counter() - began, 2)}
            write_json(done_file, done)
        tables[name] = read_table(csv)
        lines += [ANALYSES[name].digest(tables[name]), f"-> {csv}"]
    return lines + present(cfg, tables, folder)


def _fingerprint(subjects: list[Subject] | list[ModuleSubject]) -> str:
    """A digest of all that an analysis sees: seeds, task, model, number type, every weight, what training recorded."""
    digest = hashlib.sha256()
    for subject in subjects:
        if isinstance(subject, ModuleSubject):
            digest.update(repr((subject.who, subject.modules)).encode())
            weights_and_inputs = [
                tensor for module in subject.modules.values() for tensor in module.state_dict().values()
            ]
            example = subject.example
            weights_and_inputs += [x for x in (*example.tensors, example.targets, example.lengths_B) if x is not None]
            for tensor in weights_and_inputs:
                digest.update(repr((tensor.dtype, tensor.shape)).encode() + tensor.cpu().contiguous().numpy().tobytes())
            continue
        digest.update(repr((subject.who, subject.task)).encode())
        for weights, model in subject.models.items():
            digest.update(repr((weights, getattr(model, "cfg", type(model)), model.read_out.weight.dtype)).encode())
            for parameter in model.parameters():
                digest.update(parameter.detach().cpu().numpy().tobytes())
        for recorded in (subject.history, subject.curve):
            digest.update(b"" if recorded is None else recorded.to_csv().encode())
        if subject.example is not None:
            for tensor in subject.test.inputs, subject.test.targets:
                digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def _corpus_digest(task: Task) -> str | None:
    """A digest of the texts that the task reads; None for a task that generates its sequences."""
    files = getattr(task, "files", [])
    if not files:
        return None
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def _why_computed(csv: Path, record: dict[str, Any] | None, key: dict[str, Any]) -> str | None:
    """Why a table is to be computed, as the end of a sentence; None where the folder holds it already."""
    if not csv.exists():
        return "" if record is None else " again: the file is gone"
    if record is None:
        return " again: nothing is recorded about the file that is there"
    changed = [KEY[name] for name in KEY if name not in record or record[name] != key[name]]
    return f" again: {', '.join(changed)} changed" if changed else None


def measure(name: str, options: Any, subjects: list[Subject] | list[ModuleSubject]) -> pd.DataFrame:
    """The table of one analysis: the rows of every subject, one subject below the other."""
    progress = bar(subjects, desc=name, unit="seed")
    parts = []
    for number, subject in enumerate(progress, 1):
        rows_of = ANALYSES[name].of_module if isinstance(subject, ModuleSubject) else ANALYSES[name].table
        parts.append(with_who(rows_of(subject, options), **subject.who))
        if progress.disable:
            log.info("%s: seed %d (%d of %d)", name, subject.seed, number, len(subjects))
    return pd.concat(parts, ignore_index=True)


def present(cfg: BaseConfig, tables: dict[str, pd.DataFrame], folder: Path) -> list[str]:
    """Figures of the tables and verdicts on the claims, written to the folder; returns lines that say so."""
    pages = {name: [plots.Page(table, None, "")] for name, table in tables.items()}
    lines = [drawn_line(files) for files in draw(pages, folder, cfg.published).values()]
    return lines + judge_all(cfg.claims, tables, folder, None)


def draw(
    pages: dict[str, list[plots.Page]],
    folder: Path,
    figure_published: str | None,
    kinds: tuple[str, ...] = plots.KINDS,
) -> dict[str, list[Path]]:
    """A figure of each page of the analyses that have one, in files of these kinds; returns the files by figure."""
    files = {}
    beside = published(figure_published) if figure_published else None
    for name, pages_of_name in pages.items():
        if (figure := ANALYSES[name].figure) is not None:
            figures = ((figure(page.rows, beside, page.facet), page.note) for page in pages_of_name)
            files |= plots.save_pages(figures, folder / name, kinds)
    return files


def drawn_line(files: list[Path]) -> str:
    """The line for the reader that names a figure's files."""
    return f"-> {' and '.join(map(str, files))}"


def judge_all(claims: list[str], tables: dict[str, pd.DataFrame], folder: Path, facet: Facet) -> list[str]:
    """Verdicts on the claims, written to verdicts.csv where there are any; returns them as lines."""
    if not claims:
        return []
    verdicts = [verdict for name in claims for verdict in judge(name, tables[CLAIMS[name].table], facet)]
    write_table(pd.DataFrame(verdicts), folder / "verdicts.csv")
    return [*map(verdict_line, verdicts), f"-> {folder / 'verdicts.csv'}"]

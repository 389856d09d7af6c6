"""Trackers that also get the rows of metrics.csv: TensorBoard, Weights & Biases, MLflow."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

import pandas as pd

from rankbench.config.keys import ConfigError
from rankbench.config.schema import TrainConfig
from rankbench.runs.files import read_text
from rankbench.runs.run import Run

SCALARS = ("loss", "accuracy", "learning_rate", "tokens_per_second")
PROJECT = "rankbench"  # name of the W&B project and of the MLflow experiment

# Takes a seed, a step, and the seed's scalars at that step, keyed by `<split>/<column>`.
Writer = Callable[[int, int, dict[str, float]], None]


def check_writers(names: list[str]) -> None:
    """Raise ConfigError for a writer whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"trainer.writers=[{name}]: needs the extra: pip install 'rankbench[{name}]'")


@contextmanager
def writing(cfg: TrainConfig, run: Run, upto: int) -> Iterator[Callable[[list[dict]], None]]:
    """Yield a function that hands rows of metrics.csv to each of the config's writers.

    upto: the last step whose rows a continued run keeps; -1 for a run that begins.
    """
    with ExitStack() as stack:
        writers = [stack.enter_context(WRITERS[name](cfg, run, upto)) for name in cfg.trainer.writers]

        def write(rows: list[dict]) -> None:
            for row in rows:
                scalars = {f"{row['split']}/{name}": row[name] for name in SCALARS if name in row}
                for writer in writers:
                    writer(row["seed"], row["step"], scalars)

        yield write


@contextmanager
def _tensorboard(cfg: TrainConfig, run: Run, upto: int) -> Iterator[Writer]:
    """Yield a writer to event files in <run>/events/seed=<seed>, one for each start of the run.

    TensorBoard discards the steps that a continued run writes again.
    """
    from torch.utils.tensorboard import SummaryWriter

    with ExitStack() as stack:
        writers = {}
        for seed in _seeds(cfg):
            folder = str(run.folder / "events" / f"seed={seed}")
            writers[seed] = stack.enter_context(SummaryWriter(folder, purge_step=upto + 1 or None))

        def write(seed: int, step: int, scalars: dict[str, float]) -> None:
            for tag, value in scalars.items():
                writers[seed].add_scalar(tag, value, step)

        yield write


@contextmanager
def _wandb(cfg: TrainConfig, run: Run, upto: int) -> Iterator[Writer]:
    """Yield a writer to one W&B run per seed, in one group; offline in <run>/wandb unless WANDB_MODE says otherwise."""
    import wandb

    mode = os.environ.get("WANDB_MODE", "offline")
    with ExitStack() as stack:
        writers = {
            seed: stack.enter_context(
                wandb.init(
                    project=PROJECT,
                    id=f"{_identity(run)}-{seed}",
                    name=f"{run.name} seed={seed}",
                    group=run.name,
                    config=dataclasses.asdict(cfg),
                    dir=str(run.folder),
                    mode=mode,
                    resume="allow" if mode == "online" else None,  # offline, W&B joins the parts when they are synced
                    reinit="create_new",
                    settings=wandb.Settings(silent=True, console="off"),
                )
            )
            for seed in _seeds(cfg)
        }
        yield lambda seed, step, scalars: writers[seed].log(scalars, step=step)


@contextmanager
def _mlflow(cfg: TrainConfig, run: Run, upto: int) -> Iterator[Writer]:
    """Yield a writer to one MLflow run per seed, in files in <run>/mlflow unless MLFLOW_TRACKING_URI says otherwise."""
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if address is None:
        address = (run.folder / "mlflow").resolve().as_uri()
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required since mlflow 3.13
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name(PROJECT)
    experiment_id = client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
    params = pd.json_normalize(dataclasses.asdict(cfg)).iloc[0].to_dict()
    ids, last_steps = {}, {}
    for seed in _seeds(cfg):
        tags = {"rankbench.run": run.name, "rankbench.id": f"{_identity(run)}-{seed}"}
        earlier = client.search_runs([experiment_id], f"tags.`rankbench.id` = '{tags['rankbench.id']}'")
        if earlier:
            ids[seed] = earlier[0].info.run_id
            client.set_terminated(ids[seed], "RUNNING")
        else:
            ids[seed] = client.create_run(experiment_id, tags=tags, run_name=f"{run.name} seed={seed}").info.run_id
            client.log_batch(ids[seed], params=[Param(key, str(value)) for key, value in params.items()])
        # test/loss is the last metric that a step writes; steps that were written before are not written again
        last_steps[seed] = max(
            (metric.step for metric in client.get_metric_history(ids[seed], "test/loss")), default=-1
        )

    def write(seed: int, step: int, scalars: dict[str, float]) -> None:
        if step > last_steps[seed]:
            now = int(pd.Timestamp.now().timestamp() * 1000)
            client.log_batch(ids[seed], [Metric(tag, value, now, step) for tag, value in scalars.items()])

    status = "FAILED"
    try:
        yield write
        status = "FINISHED"
    finally:
        for seed in ids:
            client.set_terminated(ids[seed], status)


def _seeds(cfg: TrainConfig) -> range:
    return range(cfg.seed, cfg.seed + cfg.replicas)


def _identity(run: Run) -> str:
    """Digest of the run's folder and environment.json, by which a continued run finds its W&B and MLflow runs."""
    start = f"{run.folder.resolve()} {read_text(run.folder / 'environment.json')}"
    return hashlib.sha256(start.encode()).hexdigest()[:16]


WRITERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}

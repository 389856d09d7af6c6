"""rankbench.training.writers: TensorBoard, W&B and MLflow hold what metrics.csv holds."""

import json
import struct
import time

import pandas as pd
import pytest
from command_line import refused

from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.runs.run import Run
from rankbench.training.loop import train
from rankbench.training.writers import SCALARS, WRITERS, check_writers

TINY = ["model.layers=1", "model.width=8", "task.length=4", "task.train_size=10", "task.test_size=10", "replicas=2"]
TINY += ["trainer.eval_every=2"]


@pytest.mark.parametrize("name", WRITERS)
def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setattr("rankbench.training.writers.find_spec", lambda package: None if package == name else package)
    with pytest.raises(ConfigError, match=rf"trainer.writers=\[{name}\]: needs the extra: pip install .*\[{name}\]"):
        check_writers(list(WRITERS))
    line = refused("train", *TINY, f"trainer.writers={name}", "out=run", at=tmp_path)
    assert f"pip install 'rankbench[{name}]'" in line and not (tmp_path / "run").exists()


def test_a_run_of_before_there_were_several_writers_is_read(tmp_path):
    run = Run(tmp_path)
    run.begin(compose("train", *TINY, "trainer.writers=tensorboard"), {})
    text = (tmp_path / "config.yaml").read_text()
    assert "  writers:\n  - tensorboard\n" in text
    (tmp_path / "config.yaml").write_text(text.replace("  writers:\n  - tensorboard\n", "  tensorboard: true\n"))
    assert run.config.trainer.writers == ["tensorboard"]


def twice_trained(folder, name):
    """The metrics of a run that is lengthened, so that each writer goes on where it was."""
    for steps in (3, 6):  # 3 is measured, but not in a training of 6
        train(compose("train", *TINY, f"trainer.steps={steps}", f"trainer.writers={name}"), Run(folder))
    return pd.read_csv(folder / "metrics.csv")


def wanted(metrics, seed):
    """By tag the steps and values of a seed in metrics.csv."""
    by_split = metrics[metrics.seed == seed].groupby("split")
    return {
        f"{split}/{name}": dict(zip(rows.step, rows[name], strict=True))
        for split, rows in by_split
        for name in SCALARS
        if rows[name].notna().any()
    }


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_event_files_hold_the_rows_of_the_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = twice_trained(tmp_path, "tensorboard")
    for seed in (0, 1):
        events = EventAccumulator(str(tmp_path / "events" / f"seed={seed}")).Reload()
        of_seed = wanted(metrics, seed)
        assert set(events.Tags()["scalars"]) == set(of_seed) and "test/accuracy" in of_seed
        for tag, values in of_seed.items():
            events_of_tag = {event.step: event.value for event in events.Scalars(tag)}
            assert events_of_tag == pytest.approx(values, rel=1e-6)  # the files hold float32
            assert len(events.Scalars(tag)) == len(values)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_the_rows_of_the_metrics(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    metrics = twice_trained(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("rankbench").experiment_id])
    assert {run.info.run_name for run in runs} == {f"{tmp_path.name} seed={seed}" for seed in (0, 1)}
    for run in runs:
        assert run.info.status == "FINISHED" and run.data.params["model.width"] == "8"
        of_seed = wanted(metrics, int(run.info.run_name[-1]))
        assert set(run.data.metrics) == set(of_seed)
        for tag, values in of_seed.items():
            history = client.get_metric_history(run.info.run_id, tag)
            assert values.items() <= {metric.step: metric.value for metric in history}.items()
            # the shorter training's own last step stays, as MLflow forgets nothing
            assert [metric.step for metric in history] == sorted({*values, 3})


def wandb_records(path):
    """The records of a W&B file: a log of LevelDB in blocks of 32 KiB, behind a header of 7 bytes."""
    data, part = path.read_bytes(), b""
    assert data[:4] == b":W&B"
    offset = 7
    while offset + 7 <= len(data):  # the file may end within a record
        if 32768 - offset % 32768 < 7:  # the rest of a block is too short for a record
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        part += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield part
            part = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_holds_the_rows_of_the_metrics(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)  # offline is the default
    from wandb.proto.wandb_internal_pb2 import Record

    def records_of(seed):
        """The records of both trainings, which have ended. W&B's own process writes them, and may be behind."""
        deadline = time.monotonic() + 60
        while True:
            paths = sorted(tmp_path.glob(f"wandb/offline-run-*/run-*-{seed}.wandb"))
            files = [[Record.FromString(data) for data in wandb_records(path)] for path in paths if path.stat().st_size]
            if sum(record.HasField("exit") for records in files for record in records) == 2:
                return [record for records in files for record in records]
            assert time.monotonic() < deadline
            time.sleep(0.1)

    metrics = twice_trained(tmp_path, "wandb")
    for seed in (0, 1):
        histories, configs = {}, set()
        for record in records_of(seed):
            if record.HasField("history"):
                items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                for tag in items.keys() - {"_step", "_timestamp", "_runtime"}:
                    histories.setdefault(tag, {})[items["_step"]] = items[tag]
            if record.HasField("run"):
                configs |= {(item.key, item.value_json) for item in record.run.config.update}
                assert record.run.run_group == tmp_path.name and record.run.run_id.endswith(f"-{seed}")
        of_seed = wanted(metrics, seed)
        assert set(histories) == set(of_seed)
        assert json.loads(dict(configs)["model"])["width"] == 8
        for tag, values in of_seed.items():
            assert values.items() <= histories[tag].items()
            assert set(histories[tag]) == {*values, 3}

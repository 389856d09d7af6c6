"""rankbench.training.tensorboard: event files hold what metrics.csv holds."""

import pandas as pd
import pytest

from rankbench.commands.compose import compose
from rankbench.keys import ConfigError
from rankbench.runs.run import Run
from rankbench.training.loop import train
from rankbench.training.tensorboard import SCALARS, check_tensorboard

TINY = ["model.layers=1", "model.width=8", "task.length=4", "task.train_size=10", "task.test_size=10", "replicas=2"]
TINY += ["trainer.steps=6", "trainer.eval_every=2", "trainer.tensorboard=true"]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("rankbench.training.tensorboard.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trainer.tensorboard=true: needs the extra: pip install"):
        check_tensorboard()


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_event_files_hold_the_rows_of_the_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(compose("train", *TINY), Run(tmp_path))
    metrics = pd.read_csv(tmp_path / "metrics.csv")
    for seed in (0, 1):
        events = EventAccumulator(str(tmp_path / "events" / f"seed={seed}")).Reload()
        rows_of_seed = metrics[metrics.seed == seed]
        wanted = {}
        for split, rows in rows_of_seed.groupby("split"):
            for name in SCALARS:
                if rows[name].notna().any():
                    wanted[f"{split}/{name}"] = list(zip(rows.step, rows[name], strict=True))
        assert set(events.Tags()["scalars"]) == set(wanted) and "test/accuracy" in wanted
        for tag, pairs in wanted.items():
            events_of_tag = [(event.step, event.value) for event in events.Scalars(tag)]
            assert [step for step, _ in events_of_tag] == [step for step, _ in pairs]
            # the files hold float32
            assert [value for _, value in events_of_tag] == pytest.approx([value for _, value in pairs], rel=1e-6)

"""rankbench.analyses.speed: what is timed, against a loop of its own; times that do not see other processes."""

import time

import pandas as pd
import pytest
import torch

from rankbench.analyses import ANALYSES, speed
from rankbench.analysing.subjects import fresh_subjects
from rankbench.commands.compose import compose
from rankbench.config.keys import typed
from rankbench.runs.machine import Machine, seconds_of

SMALL = ["task=char_lm", "task.train_size=60", "task.valid_size=5", "task.test_size=5", "model.width=16"]
OPTIONS = typed(speed.Options, {"batch_size": 8, "rounds": 5}, "analysis.speed")


def subject_of(model):
    cfg = compose("analyze", f"model={model}", *SMALL)
    return fresh_subjects(cfg, Machine.prepare(cfg))[0]


@pytest.mark.parametrize(
    "model", ["causal", "causal_l2", "causal_l2_tied", "causal_contractive_l2", "causal_l2_matched"]
)
def test_both_networks_take_the_same_steps(model, monkeypatch):
    """Two networks, the one measured and the same with dot products and free keys, in turn on the same batches."""
    subject, seen = subject_of(model), []
    before = {name: weight.clone() for name, weight in subject.network.named_parameters()}

    def record(work, device):
        seen.append(device.type)
        work()
        return float(len(seen))

    monkeypatch.setattr(speed, "seconds_of", record)
    table = speed.table(subject, OPTIONS)
    assert table.seconds.tolist() == [1, 3, 5, 7, 9] and table.seconds_dot.tolist() == [2, 4, 6, 8, 10]
    assert table.tokens.is_monotonic_increasing and table.tokens.iloc[0] < table.tokens.iloc[-1]
    assert set(table.variant) == {model}
    for name, weight in subject.network.named_parameters():  # the subject itself is not trained
        assert torch.equal(weight, before[name])


def test_a_step_is_one_of_adam():
    subject = subject_of("causal_l2")
    batch = next(speed._batches(subject, OPTIONS))
    ours, other = subject_of("causal_l2").network.float(), subject_of("causal_l2").network.float().requires_grad_(True)
    speed._step(ours, subject)(batch)
    outputs, wanted = other(batch.inputs), batch.targets
    torch.nn.functional.cross_entropy(outputs[wanted >= 0], wanted[wanted >= 0]).backward()
    torch.optim.Adam(other.parameters(), lr=1e-4).step()
    for (name, weight), expected in zip(ours.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight.detach(), expected.detach(), rtol=0, atol=2.1e-4, msg=name)
        assert (weight - expected).abs().median() < 1e-6, name  # Adam's first steps are signs: noise about 0 may flip


def test_waiting_is_not_counted():
    cpu = torch.device("cpu")
    assert seconds_of(lambda: time.sleep(0.3), cpu) < 0.1
    spin = lambda: sum(range(3_000_000))  # noqa: E731
    assert seconds_of(spin, cpu) > 0.01


def test_the_figure_and_the_digest():
    tables = [speed.table(subject_of(model), OPTIONS).assign(seed=0) for model in ("causal", "causal_l2")]
    table = pd.concat(tables)
    assert len(ANALYSES["speed"].figure(table, None, None).axes) == 1
    assert "causal_l2, layers=1: " in speed.digest(table)

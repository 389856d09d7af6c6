"""rankbench.analyses.cost: what a long analysis says before it starts."""

import logging
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rankbench.analyses import ANALYSES, Subject
from rankbench.analyses import cost as cost_module
from rankbench.analyses.cost import LONG, Operations, announcement, pace_of
from rankbench.analyses.runner import measure, options_of
from rankbench.analyses.subjects import subjects_of
from rankbench.commands.compose import compose
from rankbench.model import skeleton
from rankbench.progress import UNITS
from rankbench.runs.machine import Machine
from rankbench.tasks import Batch, build_task

BASE = ("model.layers=12", "model.heads=12", "model.width=768", "task.length=128", "task.test_size=200")
SMALL = ("model.layers=3", "model.heads=4", "model.width=32", "task.length=12", "task.test_size=8")
ESTIMATED = [name for name, analysis in ANALYSES.items() if analysis.cost is not None]
PACE = 1e10  # operations a second, as a core has


def composed(name, *words):
    cfg = compose("analyze", f"analysis=[{name}]", *words)
    return cfg, options_of(cfg)[name]


def subject_without_weights(cfg):
    """The subject of a config, with a network that has shapes alone."""
    task = build_task(cfg.task)
    tokens = torch.zeros(cfg.task["test_size"], task.length, dtype=torch.int64)
    batch = Batch(tokens, tokens)
    return Subject("fresh", 0, task, batch, batch, {"initialised": skeleton(cfg.model, task)})


@pytest.mark.parametrize("words", [(), ("model.mlp=false", "model.norm=pre"), ("model.kv_groups=2", "model.norm=peri")])
def test_the_operations_of_a_forward_pass_are_those_that_torch_counts(words):
    cfg, _ = composed("residual", *SMALL, *words)
    (subject,) = subjects_of(cfg, Machine.prepare(cfg))
    with FlopCounterMode(display=False) as counter:
        subject.model.state(subject.test.inputs[:1], "table")
        subject.model.read_out(torch.zeros(1, 12, 32, dtype=torch.float64))
    # biases and norms, which are no products, have parameters, too: 2 % of these
    assert Operations.of(subject).forward == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize(
    ("name", "large", "longer", "shorter"),
    [
        ("paths", "3,250 paths x 200 sequences", "d", "min"),
        ("path_mass", "158 sums of paths x 200 sequences", "h", "min"),
        ("independence", "8 probes of 144 heads", "d", "h"),  # for each head a product with the Hessian
        ("lipschitz", "25 Jacobians of 98,304 numbers", "d", "min"),
    ],
)
def test_an_analysis_of_days_says_so_and_what_takes_minutes(monkeypatch, name, large, longer, shorter):
    cfg, options = composed(name, *BASE)
    monkeypatch.setattr(cost_module, "pace_of", lambda subject: PACE)
    line = announcement(name, ANALYSES[name], options, [subject_without_weights(cfg)])
    first, _, rest = line.partition("; it continues. With ")
    assert first.startswith(f"{name}: ") and large in first and "12 layers x 12 heads x width 768, 128 tokens" in first
    assert first.endswith(f" {longer}") and "\n" not in line
    *keys, about, time_, unit = rest.split()
    assert about == "about" and unit == shorter
    # the keys can be typed, and with them the estimate is the one of the line
    cfg, cheaper = composed(name, *BASE, *keys)
    seconds = ANALYSES[name].cost(subject_without_weights(cfg), cheaper).operations / PACE
    assert seconds / UNITS[unit] == pytest.approx(float(time_), rel=0.01)


def test_seeds_count(monkeypatch):
    cfg, options = composed("path_mass", *BASE)
    subject = subject_without_weights(cfg)
    operations = ANALYSES["path_mass"].cost(subject, options).operations
    monkeypatch.setattr(cost_module, "pace_of", lambda subject: 1.5 * operations / LONG)
    assert announcement("path_mass", ANALYSES["path_mass"], options, [subject]) is None
    assert "x 2 seeds" in announcement("path_mass", ANALYSES["path_mass"], options, [subject] * 2)


@pytest.mark.parametrize("name", ESTIMATED)
def test_an_analysis_of_seconds_says_nothing_and_times_nothing(monkeypatch, name):
    cfg, options = composed(name, *SMALL, "task.test_size=40")
    monkeypatch.setattr(cost_module, "pace_of", lambda subject: pytest.fail("timed"))
    assert announcement(name, ANALYSES[name], options, [subject_without_weights(cfg)]) is None


def test_the_line_comes_before_the_work(monkeypatch, caplog):
    cfg, options = composed("path_mass", *SMALL)
    subjects = subjects_of(cfg, Machine.prepare(cfg))
    monkeypatch.setattr(cost_module, "LONG", 0.0)
    with caplog.at_level(logging.INFO, "rankbench"):
        measure("path_mass", options, subjects)
    assert caplog.records[0].message.startswith("path_mass: 17 sums of paths x 8 sequences")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("paths", ("model.width=64", "model.layers=4", "task.length=32", "task.test_size=40")),
        ("path_mass", ("model.width=256", "model.heads=8", "task.length=64", "task.test_size=4")),
        ("spectrum", ("model.width=256", "model.heads=8", "task.length=64", "task.test_size=32")),
        ("residual", ("model.width=256", "model.heads=8", "task.length=64", "task.test_size=8")),
        ("pruning", ("model.width=64", "model.layers=4", "model.heads=4", "task.length=16", "task.test_size=64")),
        ("independence", ("model.width=48", "model.layers=3", "task.test_size=60")),
        ("lipschitz", ("model.width=64", "model.layers=3", "task.length=12", "task.test_size=2")),
    ],
)
def test_the_estimate_is_right_within_a_factor_of_three(monkeypatch, name, words):
    """In time of the CPU, which other processes do not change as they do that of the clock."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    cfg, options = composed(name, *words)
    (subject,) = subjects_of(cfg, Machine.prepare(cfg))
    estimate = ANALYSES[name].cost(subject, options).operations / pace_of(subject)
    began = time.process_time()
    ANALYSES[name].table(subject, options)
    assert 1 / 3 < estimate / (time.process_time() - began) < 3

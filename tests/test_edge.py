"""Analyses of networks at the edge of numbers: zero weights, sums that vanish, outputs that overflow."""

import dataclasses
import math

import pandas as pd
import pytest
import torch
from test_combinations import config

from rankbench.analyses import ANALYSES
from rankbench.analyses.runner import analyze, draw, fresh_subjects, options_of, subjects_of_run
from rankbench.commands.compose import compose
from rankbench.keys import ConfigError
from rankbench.plots import Page
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.training.loop import train

# tables without a number that a network's size changes, or refused here
APART = ("rollout", "samples", "rank_theory", "laws", "curves", "dynamics", "path_counts", "lipschitz", "invertibility")


@pytest.fixture(scope="module")
def cfg():
    return config("sorting", "transformer")


@pytest.fixture(scope="module")
def subject(cfg, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("trained") / "run")
    train(dataclasses.replace(cfg, analysis={}), run)
    (subject,) = subjects_of_run(run, Machine.prepare(compose("analyze", "precision=fp64")))
    return dataclasses.replace(subject, models={"trained": subject.model})


@pytest.fixture
def zero(subject):
    """The subject with weights that are all zero, which are put back."""
    model = subject.model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        yield subject
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)


@pytest.mark.parametrize("name", [name for name in ANALYSES if name not in APART])
@pytest.mark.usefixtures("unpainted")
def test_a_network_of_zeros_is_measured_and_drawn(cfg, zero, tmp_path, name):
    """What is a ratio to its output is undefined, and an empty cell."""
    table = ANALYSES[name].table(zero, options_of(cfg)[name]).assign(**zero.who)
    assert len(table)
    for column in ("relative_residual", "norm_share", "mass", "share", "cosine"):
        if column in table:
            assert table[column].isna().all(), column
    assert isinstance(ANALYSES[name].digest(table), str)
    draw({name: [Page(table, None, "")]}, tmp_path, None)


def test_the_sums_of_a_network_of_zeros_miss_nothing(cfg, zero):
    table = ANALYSES["spectrum"].table(zero, options_of(cfg)["spectrum"])
    assert isinstance(table, pd.DataFrame) and (table.remainder == 0).all()


def test_a_network_whose_output_overflows_is_one_line(cfg, subject, tmp_path):
    weight = subject.model.read_out.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(1e308)
    try:
        with pytest.raises(ConfigError, match=r"^model=\w+: the output of seed 0, trained, is not finite, so there "):
            analyze(cfg, [subject], tmp_path)
    finally:
        weight.data.copy_(before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_an_lstm_without_information_samples_every_character_alike(tmp_path, value):
    (tmp_path / "text.txt").write_text("a few words of a text\nand a second line of it\n" * 40)
    words = ["model=lstm", "task=char_lm", f"task.path={tmp_path / 'text.txt'}", "model.width=8", "model.layers=1"]
    words += [f"task.{split}_size=null" for split in ("train", "valid", "test")]
    cfg = compose("analyze", "analysis=[samples]", *words)
    (subject,) = fresh_subjects(cfg, Machine.prepare(compose("analyze", "precision=fp64")))
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.fill_(value)
    table = ANALYSES["samples"].table(subject, options_of(cfg)["samples"])
    of_one_character = table.log_likelihood / table.characters
    assert of_one_character.to_numpy() == pytest.approx(-math.log(subject.task.num_outputs), rel=1e-12)

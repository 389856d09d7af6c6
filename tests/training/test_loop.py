"""rankbench.training.loop against a plain PyTorch loop, against itself interrupted, and the files that it leaves.

Shapes: S seed, B batch, N token.
"""

import copy
import csv
import dataclasses
import functools
import json
import logging
import math
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from breadth import some
from command_line import SMALLEST
from forked import fork
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupted import assert_same_run, contents, during_step, timeless

import rankbench.training.loop
from rankbench.analysing.runner import analyze_trained
from rankbench.analysing.subjects import subjects_of_run
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.model import build_model, initial_model, skeleton
from rankbench.model.dropout import dropout_masks
from rankbench.report.jobs import runs_in
from rankbench.runs import machine
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.seeds import generator_for, state_of, streams_of
from rankbench.tasks import build_task
from rankbench.tasks.task import majority_baselines
from rankbench.training import journal, seeds_side_by_side
from rankbench.training.compiling import compiled, kernels_of
from rankbench.training.forward import STATES_AT_A_TIME, seeds_at_a_time
from rankbench.training.loop import Interrupted, train
from rankbench.training.pieces import clipped
from rankbench.training.seeds_side_by_side import Training

# an epoch of 20 sequences is a batch of 8, one of 8 and one of 4
TINY = [*SMALLEST, "trainer.steps=20", "trainer.eval_every=4", "trainer.checkpoint_every=7", "optimizer.lr=0.01"]

# Two routes through the same float64 arithmetic differ by the order of sums: about 1e-16 a step. The rules that divide
# by a gradient's size can enlarge that a thousandfold and more; 1e-9 leaves room and is far below any real mistake.
SAME, EXACT = {"rtol": 1e-9, "atol": 1e-9}, {"rtol": 0, "atol": 0}


def config(*overrides):
    """A tiny run's config; later overrides win."""
    return copy.deepcopy(composed_once(*overrides))


@functools.cache
def composed_once(*overrides):
    return compose("train", *TINY, *overrides)


def trained(folder, *overrides):
    """A run in `folder`, trained to its end."""
    run = Run(Path(folder))
    train(config(*overrides), run)
    return run


def untrained(cfg, step=None):
    """A Training that nobody has moved yet."""
    seeds = list(range(cfg.seed, cfg.seed + cfg.replicas))
    return Training(cfg, build_task(cfg.task), Machine.prepare(cfg), seeds, step)


def rows_of(run, **wanted):
    """Rows of metrics.csv as dicts, those with the wanted values."""
    with (run.folder / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == str(value) for key, value in wanted.items())]


def one_seed(run, seed_index):
    """The final weights of one seed of a run."""
    return {name: weight[seed_index] for name, weight in run.weights().items()}


def send(kind):
    """Send ourselves this signal."""
    os.kill(os.getpid(), kind)


def stopped(run, cfg, step, kind=signal.SIGTERM):
    """The run, trained until a signal arrives while that step is computed."""
    with pytest.MonkeyPatch.context() as patch:
        during_step(patch, step, lambda: send(kind))
        with pytest.raises(Interrupted, match=f"stopped at step {step} of {cfg.trainer.steps}"):
            train(cfg, run)
    return run


def losses_of(run, **wanted):
    """Losses in metrics.csv, of the rows with the wanted values."""
    return [float(row["loss"]) for row in rows_of(run, **wanted)]


# --- seeds side by side ----------------------------------------------------------------------------------------------


def plain_training(cfg, seed):
    """One seed by nn.Module and torch.optim: (final weights, loss of every step, gradient norm of every step).

    From rankbench it takes the initial model, the generators and the dropout masks. The arithmetic is torch's own.
    """
    dtype = torch.float64 if cfg.precision == "fp64" else torch.float32
    task = build_task(cfg.task)
    model = initial_model(cfg.model, task, seed).to(dtype)
    rule, rates = cfg.optimizer, {"lr": cfg.optimizer.lr, "weight_decay": cfg.optimizer.weight_decay, "foreach": False}
    if rule.name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), momentum=rule.momentum, **rates)
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[rule.name]
        optimizer = kind(model.parameters(), betas=(rule.beta1, rule.beta2), **rates)
    data = task.sample(task.train_size, generator_for(seed, "train"))
    losses, norms = [], []
    for step in range(cfg.trainer.steps):
        epoch, batch_index = divmod(step, math.ceil(task.train_size / cfg.trainer.batch_size))
        order = torch.randperm(task.train_size, generator=generator_for(seed, "order", epoch))
        inputs, targets = (x[order.split(cfg.trainer.batch_size)[batch_index]] for x in (data.inputs, data.targets))
        masks = dropout_masks(model, *targets.shape, streams_of([state_of(seed, "dropout", step)]), dtype=dtype)
        masks = None if masks is None else {name: mask[0] for name, mask in masks.items()}
        loss = F.cross_entropy(model(inputs, masks).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
        norms.append(norm)
        if cfg.trainer.clip is not None and norm > cfg.trainer.clip:  # torch's own adds 1e-6 to the norm
            for parameter in model.parameters():
                parameter.grad *= cfg.trainer.clip / norm
        optimizer.step()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses, norms


VARIANTS = [
    ["optimizer=adam", "model.layers=2"],
    ["optimizer=adam", "model.dropout=0.2", "trainer.clip=0.5"],
    ["optimizer=adamw", "optimizer.weight_decay=0.1", "model.dropout=0.2"],
    ["optimizer=adamw", "trainer.clip=0.5", "model=transformer_pre_norm", "model.layers=2"],
    ["optimizer=sgd", "trainer.clip=0.05", "model=san", "model.layers=2"],
    ["optimizer=sgd", "model.dropout=0.2", "optimizer.weight_decay=0.1", "optimizer.momentum=0"],
    ["optimizer=adam", "model.dropout=0.2", "model.shared_layers=true", "model.layers=3"],
]


# fp32: rounding of 6e-8 a sum, enlarged by Adam where a gradient is small: 20 steps of 0.01 move a weight by 0.2, and
# 1e-4 is a two-thousandth of that. Without biases: a key bias has gradient zero, Adam makes its rounding steps.
FP64, FP32 = (["precision=fp64"], SAME), (["precision=fp32", "model.bias=false"], {"rtol": 1e-4, "atol": 1e-4})


@pytest.mark.parametrize(
    ("variant", "precision", "tolerance"),
    [
        *some(((variant, *FP64) for variant in VARIANTS), 2),
        *some(((variant, *FP32) for variant in VARIANTS[1:]), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_seeds_side_by_side_are_separate_runs_are_a_plain_loop(tmp_path, variant, precision, tolerance):
    overrides = [*variant, *precision, "seed=5", "trainer.steps=8"]  # two epochs, and two steps of a third
    together = trained(tmp_path / "together", *overrides, "replicas=2")
    for seed_index, seed in enumerate((5, 6)):
        alone = Run(tmp_path / f"alone{seed}")
        train(dataclasses.replace(config(*overrides, "replicas=2"), seed=seed, replicas=1), alone)
        torch.testing.assert_close(one_seed(together, seed_index), one_seed(alone, 0), **tolerance)
        for ours, theirs in zip(rows_of(together, seed=seed), rows_of(alone), strict=True):
            assert (ours["step"], ours["split"]) == (theirs["step"], theirs["split"])
            assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=tolerance["rtol"])

        weights, losses, norms = plain_training(config(*overrides), seed)
        torch.testing.assert_close(one_seed(together, seed_index), weights, **tolerance)
        means = [sum(losses[start : start + 4]) / 4 for start in (0, 4)]
        assert losses_of(together, seed=seed, split="train") == pytest.approx(means, rel=tolerance["rtol"])
        clip = config(*overrides).trainer.clip
        assert clip is None or max(norms) > clip, "the clip never acted: the test would not see it missing"


@pytest.mark.further
@pytest.mark.parametrize(("at_a_time", "sizes"), some([(1, [1] * 5), (2, [2, 1, 2]), (4, [2, 3]), (9, [5])], 2))
def test_seeds_in_groups_are_those_all_at_once(tmp_path, monkeypatch, at_a_time, sizes):
    words = ["model.dropout=0.2", "precision=fp64", "replicas=5"]
    monkeypatch.setitem(STATES_AT_A_TIME, "cpu", 1 << 40)
    together = trained(tmp_path / "together", *words)
    cfg = config(*words)
    of_a_seed = cfg.trainer.batch_size * cfg.task["length"] * cfg.model.width * cfg.model.layers
    monkeypatch.setitem(STATES_AT_A_TIME, "cpu", (at_a_time + 1) * of_a_seed - 1)
    taken, gradients = [], Training._gradients

    def counted(self, piece, *batch):
        taken.append(piece.seeds.stop - piece.seeds.start)
        return gradients(self, piece, *batch)

    monkeypatch.setattr(Training, "_gradients", counted)
    in_groups = trained(tmp_path / "in_groups", *words)
    assert taken == sizes * cfg.trainer.steps
    torch.testing.assert_close(in_groups.weights(), together.weights(), **SAME)
    assert losses_of(in_groups) == pytest.approx(losses_of(together), rel=SAME["rtol"])


@pytest.mark.parametrize(
    ("words", "device", "compiles", "many"),
    [
        ([], "cpu", False, True),
        ([], "cpu", True, True),
        (["model=lstm"], "cuda", False, False),
        (["task=char_lm", "model.mask=causal"], "cpu", False, False),
        (["task=char_lm", "model.mask=causal"], "cuda", False, True),
        (["task=char_lm", "model.mask=causal"], "cuda", True, False),
    ],
)
def test_one_seed_at_a_time_where_several_cannot_or_gain_nothing(words, device, compiles, many):
    cfg = compose("train", *words)
    task = build_task(cfg.task)
    at_a_time = seeds_at_a_time(cfg, task, skeleton(cfg.model, task).vectorised, device, compiles)
    assert (at_a_time > 1) == many


def test_a_schedule_moves_the_weights_by_the_rates_it_tells(tmp_path):
    overrides = ["optimizer=sgd", "optimizer.momentum=0", "precision=fp64", "trainer.eval_every=1", "trainer.steps=6"]
    run = trained(tmp_path / "run", *overrides, "optimizer.lr=0.5", "optimizer.warmup=4")
    rates = [float(row["learning_rate"]) for row in rows_of(run, split="train")]
    assert rates == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    # the first update by plain SGD at the first rate
    weights, _, _ = plain_training(config(*overrides, "trainer.steps=1", "optimizer.lr=0.125"), 0)
    first = trained(tmp_path / "first", *overrides, "trainer.steps=1", "optimizer.lr=0.5", "optimizer.warmup=4")
    torch.testing.assert_close(one_seed(first, 0), weights, **SAME)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.floats(0.01, 20))
def test_clipping_is_torch_clip_grad_norm_seed_by_seed(seed, num_seeds, largest):
    generator = torch.Generator().manual_seed(seed)
    sizes_S = torch.rand(num_seeds, generator=generator, dtype=torch.float64) * 4
    shapes = [(3, 2), (4,), (2, 2, 2)]
    gradients = tuple(
        torch.randn(num_seeds, *shape, generator=generator, dtype=torch.float64) * sizes_S.view(-1, *[1] * len(shape))
        for shape in shapes
    )
    ours = clipped(gradients, largest)
    assert torch.equal(clipped((torch.zeros(2, 3),), largest)[0], torch.zeros(2, 3))
    for seed_index in range(num_seeds):
        parameters = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient[seed_index].clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, largest).item()
        for clipped_gradient, parameter in zip(ours, parameters, strict=True):
            rtol = 2e-6 / min(norm, 1) + 1e-12  # torch divides by the norm plus 1e-6
            torch.testing.assert_close(clipped_gradient[seed_index], parameter.grad, rtol=rtol, atol=0)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.further
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "words",
    [
        ["replicas=2"],
        # where networks that are not compiled take the fused kernel: many tokens, heads of rank 1
        pytest.param(["replicas=1", "task.length=100", "task.alphabet=100"], marks=pytest.mark.slow),
        pytest.param(["replicas=2", "task.length=100", "task.alphabet=100"], marks=pytest.mark.slow),
        pytest.param(["replicas=2", "model=contractive_l2", "model.heads=8"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_compiled_run_is_traced_and_has_the_same_loss_curve(tmp_path, graphs, words):
    words = ["trainer.steps=4", "precision=fp64", *words]
    plain = trained(tmp_path / "plain", *words)
    assert graphs == []
    run = trained(tmp_path / "compiled", *words, "trainer.compile=true")
    assert len(graphs) == 3  # of 8 sequences, of the 4 at an epoch's end, and of the test set without gradients
    assert losses_of(run) == pytest.approx(losses_of(plain), rel=SAME["rtol"])


@pytest.mark.further
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_the_layers_and_seeds_of_a_corpus_share_their_graphs(graphs, monkeypatch, num_seeds):
    monkeypatch.setattr("rankbench.model.weightings.SHORT_ROW", 0)  # a GPU has no softmax of its own for short rows
    words = ["task=char_lm", "task.valid_size=8", "task.train_size=40", "trainer.batch_size=8", "optimizer=adam"]
    words += ["model=causal", "model.layers=3", "model.width=8", "model.dropout=0.1", "precision=fp64", "device=cpu"]
    cfg = compose("train", *words, f"replicas={num_seeds}")
    in_parts, plain = (untrained(cfg, "plain") for _ in range(2))
    in_parts.kernels = kernels_of("compiled graph", cfg, in_parts.task, in_parts.model)
    widths = set()
    for _ in range(5):
        widths.add(plain.batch().targets.shape[2])
        in_parts.update()
        plain.update()
    assert len(widths) > 1 and len(graphs) == 3  # of the dropout masks, of attention, of the MLP
    torch.testing.assert_close(in_parts.weights(), plain.weights(), **SAME)


@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (1 + 1e-10, True), (1.001, False), (math.nan, False)])
def test_kernels_with_other_gradients_are_not_used(monkeypatch, caplog, factor, is_kept):
    def compiles(forward, dynamic):
        def with_another_gradient(*arguments):
            scores = forward(*arguments)
            return scores._replace(loss=scores.loss.detach() + factor * (scores.loss - scores.loss.detach()))

        return with_another_gradient

    monkeypatch.setattr("rankbench.training.compiling.compiled", compiles)
    ours, plain = (untrained(config("precision=fp64", "replicas=2"), step) for step in ("torch.compile", "plain"))
    for _ in range(3):
        ours.update()
        plain.update()
    assert (ours.kernels is not ours.plain) == is_kept
    assert ("goes on uncompiled" in caplog.text) != is_kept
    torch.testing.assert_close(ours.weights(), plain.weights(), **(SAME if is_kept else EXACT))


@pytest.mark.further
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("model", ["causal", "causal_l2_tied", "causal_contractive_l2"])
def test_numbers_of_the_config_are_constants_in_compiled_kernels(graphs, model):
    words = ["task=char_lm", "task.valid_size=8", "task.train_size=40", "trainer.batch_size=8", "device=cpu"]
    cfg = compose("train", *words, f"model={model}", "model.layers=2", "model.width=8", "model.dropout=0.1")
    training = untrained(cfg, "plain")
    training.kernels = kernels_of("compiled graph", cfg, training.task, training.model)
    training.gradients(training.batch())
    values = [node.meta.get("example_value") for graph in graphs for node in graph.graph.nodes]
    assert any(isinstance(value, torch.SymInt) for value in values)
    assert not any(isinstance(value, torch.SymFloat) for value in values)


@pytest.mark.further
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_more_kinds_of_batches_than_torch_allows_by_itself_are_compiled(graphs):
    double = compiled(lambda x: 2 * x, dynamic=False)
    for size in range(2, 14):
        torch.testing.assert_close(double(torch.arange(size)), torch.arange(0, 2 * size, 2), rtol=0, atol=0)
    assert len(graphs) == 12 > torch._dynamo.config.recompile_limit


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_traced_is_an_error_and_not_run_as_it_is(graphs):
    breaks = compiled(lambda x: 2 * x if x.sum() > 0 else x, dynamic=False)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        breaks(torch.ones(2))
    assert graphs == []


def test_a_run_from_before_auto_is_read_and_continued(tmp_path):
    run = trained(tmp_path / "run", "trainer.steps=4", "trainer.compile=false")
    path = run.folder / "config.yaml"
    text = path.read_text()
    assert "compile: 'false'" in text
    path.write_text(text.replace("compile: 'false'", "compile: false"))
    assert run.config.trainer.compile == "false"
    assert run.step == "plain"
    assert json.loads((trained(run.folder, "trainer.steps=6").folder / "summary.json").read_text())["step"] == 6


def test_a_run_lengthened_with_other_code_records_both(tmp_path, monkeypatch, caplog):
    first, second = ({"commit": letter * 40, "dirty": False} for letter in "ab")
    monkeypatch.setattr(machine, "git_state", lambda: first)
    run = trained(tmp_path / "run", "trainer.steps=4")
    trained(run.folder, "trainer.steps=6")
    assert not (run.folder / "continued.json").exists()
    monkeypatch.setattr(machine, "git_state", lambda: second)
    caplog.set_level(logging.INFO)
    trained(run.folder, "trainer.steps=8")
    assert "continues with other code or on another machine (git)" in caplog.text
    assert json.loads((run.folder / "environment.json").read_text())["git"] == first
    [part] = json.loads((run.folder / "continued.json").read_text())
    assert (part["step"], part["git"]) == (6, second)
    trained(run.folder, "trainer.steps=8")  # nothing is left to do
    trained(run.folder, "trainer.steps=9")
    assert json.loads((run.folder / "continued.json").read_text()) == [part]
    assert (run.folder / "at_step_8" / "continued.json").exists()
    assert not (run.folder / "at_step_6" / "continued.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_run_that_is_stopped_ends_with_the_weights_of_one_that_is_not(tmp_path, monkeypatch):
    whole = trained(tmp_path / "whole", "trainer.compile=true", "replicas=2", "trainer.steps=8")
    torch._dynamo.reset()
    trained(tmp_path / "parts", "trainer.compile=true", "replicas=2", "trainer.steps=5")
    torch._dynamo.reset()
    parts = trained(tmp_path / "parts", "trainer.compile=true", "replicas=2", "trainer.steps=8")
    torch.testing.assert_close(parts.weights(), whole.weights(), **EXACT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_itself_gives_the_same_loss_curve(tmp_path):
    plain = trained(tmp_path / "plain", "replicas=2")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = trained(tmp_path / "compiled", "replicas=2", "trainer.compile=true")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert losses_of(run) == pytest.approx(losses_of(plain), rel=1e-4)  # fp32, as for the fp32 runs above


# --- interrupt and continue ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def epochs_config(tmp_path_factory):
    """Partial epochs, dropout, and a target that two of three seeds reach, at different steps."""
    overrides = ["replicas=3", "trainer.steps=46", "model.dropout=0.1", "optimizer=adamw", "trainer.clip=1.0"]
    free = trained(tmp_path_factory.mktemp("free"), *overrides)
    best = [max(float(row["accuracy"]) for row in rows_of(free, seed=seed, split="test")) for seed in range(3)]
    return config(*overrides, f"trainer.target_accuracy={sorted(best)[1]}")


@pytest.fixture(scope="module")
def fresh_config():
    """Fresh sequences at every step, momentum, a schedule, and no seed that leaves."""
    overrides = ["task.train_size=null", "optimizer=sgd", "optimizer.schedule=cosine", "optimizer.warmup=5"]
    return config(*overrides, "replicas=2", "trainer.steps=46")


def in_one_go(request, tmp_path_factory):
    """The config of the parameter's name, and its run, trained in one go."""
    cfg = request.getfixturevalue(request.param)
    run = Run(tmp_path_factory.mktemp(request.param) / "run")
    train(cfg, run)
    return cfg, run


uninterrupted = pytest.fixture(scope="module", params=["epochs_config", "fresh_config"])(in_one_go)


# Where the handling of a run is tested, not its numbers, one of the two configs will do.
ONCE = pytest.mark.parametrize("uninterrupted", ["epochs_config"], indirect=True)


@pytest.mark.further
def test_the_interrupted_runs_are_worth_interrupting(uninterrupted):
    cfg, run = uninterrupted
    assert cfg.trainer.checkpoint_every % cfg.trainer.eval_every
    if cfg.trainer.target_accuracy is not None:
        ended = [(seed["status"], seed["steps"]) for seed in run.summary()["seeds"]]
        assert [status for status, _ in ended].count("reached") == 2
        assert len({steps for _, steps in ended}) == 3
        assert min(steps for _, steps in ended) < 40


@pytest.mark.further
def test_muon_with_a_cap_side_by_side_alone_and_interrupted(tmp_path):
    words = ["optimizer=muon", "optimizer.lr=0.02", "optimizer.cap=0.9", "precision=fp64"]
    together = trained(tmp_path / "together", *words, "replicas=2")
    for seed_index, seed in enumerate((0, 1)):
        alone = trained(tmp_path / f"alone{seed}", *words, f"seed={seed}")
        torch.testing.assert_close(one_seed(together, seed_index), one_seed(alone, 0), **SAME)
        matrices = [w for name, w in alone.weights().items() if ".mlp." in name and w.ndim == 3]
        # some are at the cap, and none is above it
        assert max(torch.linalg.matrix_norm(w, 2).max().item() for w in matrices) == pytest.approx(0.9, rel=1e-12)
    run = stopped(Run(tmp_path / "run"), config(*words, "replicas=2"), 9)
    train(config(*words, "replicas=2"), run)
    assert_same_run(run, together)


@pytest.mark.further
def test_shared_layers_are_saved_once_and_go_on(tmp_path):
    """A run that is stopped and continued, and the network that analyses load, have the weights of one layer."""
    words = ["model.shared_layers=true", "model.layers=3", "replicas=2"]
    reference = trained(tmp_path / "reference", *words)
    run = stopped(Run(tmp_path / "run"), config(*words), 9)
    train(config(*words), run)
    assert_same_run(run, reference)
    one_layer = trained(tmp_path / "one", "model.layers=1", "trainer.steps=1")
    ours, wanted = ({name: w[0].shape for name, w in each.weights().items()} for each in (run, one_layer))
    assert ours == wanted
    last = rows_of(run, split="test", seed=1)[-1]
    subject = subjects_of_run(run, Machine.prepare(compose("analyze")), seeds=[1])[0]
    assert subject.network.num_layers == 3
    # trained and tested in float32: a few hundred losses, each rounded to 6e-8 of it
    assert subject.score(subject.test).mean_loss.item() == pytest.approx(float(last["loss"]), rel=1e-5)


@pytest.mark.further
def test_a_signal_stops_a_run_and_the_same_call_continues_it(tmp_path, uninterrupted):
    cfg, reference = uninterrupted
    run = Run(tmp_path / "run")
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    # 3 is before the first checkpoint, 7 is one; 8 an evaluation; 46 the last step
    for number, step in enumerate((1, 3, 7, 8, 20, 21, 33, 46)):
        stopped(run, cfg, step, (signal.SIGTERM, signal.SIGINT)[number % 2])
        assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)] == handlers
        assert run.status == "running" and run.state()[1]["step"] == step
        assert set(run.weights()) == set(reference.weights())
    train(cfg, run)
    assert_same_run(run, reference)


@pytest.mark.further
@ONCE
def test_the_warning_of_a_cluster_reaches_the_launcher_after_the_checkpoint(tmp_path, monkeypatch, uninterrupted):
    cfg, reference = uninterrupted
    run, at_the_warning = Run(tmp_path / "run"), []

    def queue_again_and_exit(*_):  # as submitit's handler does
        at_the_warning.append((run.status, run.state()[1]["step"]))
        raise SystemExit(-1)

    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    before = signal.signal(signal.SIGUSR2, queue_again_and_exit)
    try:
        with monkeypatch.context() as patch:
            during_step(patch, 9, lambda: send(signal.SIGUSR2))
            with pytest.raises(SystemExit):
                train(cfg, run)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert at_the_warning == [("running", 9)] and run.status == "running"
    train(cfg, run)
    assert_same_run(run, reference)


@ONCE
def test_training_works_outside_the_main_thread(tmp_path, uninterrupted):
    cfg, reference = uninterrupted
    run = Run(tmp_path / "run")
    thread = threading.Thread(target=train, args=(cfg, run))
    thread.start()
    thread.join()
    assert_same_run(run, reference)


@pytest.mark.parametrize(
    "uninterrupted", ["epochs_config", pytest.param("fresh_config", marks=pytest.mark.slow)], indirect=True
)
def test_a_killed_run_continues_to_the_same_numbers(tmp_path, uninterrupted):
    """Before the first checkpoint, later, and at new moments every time: that is the point. What a kill within an
    operation on the disk leaves, a power cut could leave, too: see tests/test_disk.py."""
    cfg, reference = uninterrupted
    chance = random.Random(int.from_bytes(os.urandom(4), "big"))
    for number, step in enumerate((4, 18, None, None)):
        run = Run(tmp_path / f"run{number}")
        with pytest.MonkeyPatch.context() as patch:
            during_step(patch, step, lambda: send(signal.SIGKILL))
            with fork(functools.partial(train, cfg, run), at=tmp_path, errors=tmp_path / "errors.txt") as process:
                if step is None:
                    time.sleep(chance.uniform(0, 0.2))
                    process.kill()
                code = process.wait()
        assert not process.took_too_long, process.last_line
        assert code == -signal.SIGKILL or (code, step) == (0, None), process.last_line
        assert step is None or (run.state() is None) == (step == 4)
        train(cfg, run)
        assert_same_run(run, reference)


@pytest.mark.further
@pytest.mark.parametrize(
    "uninterrupted", ["epochs_config", pytest.param("fresh_config", marks=pytest.mark.slow)], indirect=True
)
def test_rows_after_the_checkpoint_and_half_a_line_are_dropped(tmp_path, uninterrupted):
    cfg, reference = uninterrupted
    stopped(Run(tmp_path / "stopped"), cfg, 14)
    # the last one is the beginning of a 16, and as a step it would lie before the checkpoint
    for number, half in enumerate(("16,1,tra", "16,1,train,9.5,0.1,0.01,0.1,", "1")):
        run = Run(shutil.copytree(tmp_path / "stopped", tmp_path / str(number)))
        metrics = run.folder / "metrics.csv"
        before = metrics.read_text()
        # two whole rows of a step that the checkpoint does not know, and one that a kill cut off
        metrics.write_text(before + "16,0,train,9.5,0.1,0.01,0.1,5\n16,0,test,9.5,0.1,,0.1,\n" + half)
        train(cfg, run)
        assert metrics.read_text().startswith(before)
        assert_same_run(run, reference)


# --- more steps ------------------------------------------------------------------------------------------------------


def of_length(cfg, steps):
    """The config with another number of steps."""
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, steps=steps))


@pytest.fixture(scope="module")
def watched_config():
    """Rows of layers.csv at steps of their own, and rates that change from step to step."""
    overrides = ["optimizer.schedule=inverse_sqrt", "optimizer.warmup=3", "model.dropout=0.1", "trainer.steps=23"]
    return config(*overrides, "trainer.dynamics_every=3", "trainer.dynamics_sequences=2", "replicas=2")


# of configs whose rates do not depend on the number of steps
long = pytest.fixture(scope="module", params=[pytest.param("epochs_config", marks=pytest.mark.slow), "watched_config"])(
    in_one_go
)


@pytest.fixture(scope="module")
def short(long, tmp_path_factory):
    """The run's first 18 steps, as a finished run; a test copies it."""
    run = Run(tmp_path_factory.mktemp("short") / "run")
    train(of_length(long[0], 18), run)
    return run


# 0 and 3 are before the first evaluation, 12 is one of both kinds of rows, 16 one of metrics.csv, 18 one of layers.csv,
# 22 none. 14 is a checkpoint.
@pytest.mark.further
def test_a_finished_run_with_more_steps_is_a_run_that_had_them_from_the_start(tmp_path, long):
    cfg, reference = long
    run, befores = Run(tmp_path / "run"), {}
    for steps in (0, 3, 12, 14, 16, 18, 22):
        train(of_length(cfg, steps), run)
        befores[steps] = contents(run.folder)
        rows = [row for row in timeless(reference)[1:] if int(row[0]) <= steps]
        assert timeless(run)[1 : len(rows) + 1] == rows
    train(cfg, run)
    assert_same_run(run, reference)
    for steps, before in befores.items():
        del before[".lock"], before["training_state.safetensors"]
        assert contents(run.folder / f"at_step_{steps}") == before  # the shorter run, as it was


def test_epochs_are_lengthened_too(tmp_path):
    words = ["trainer.steps=null", "replicas=2"]
    reference = trained(tmp_path / "reference", *words, "trainer.epochs=5.5")
    trained(tmp_path / "run", *words, "trainer.epochs=2.5")
    assert_same_run(trained(tmp_path / "run", *words, "trainer.epochs=5.5"), reference)


# at the first checkpoint of the longer run, before it, and at its end
@pytest.mark.further
@pytest.mark.parametrize("step", some([21, 19, 23], 3))
def test_a_lengthened_run_can_be_stopped(tmp_path, long, short, step):
    cfg, reference = long
    run = Run(shutil.copytree(short.folder, tmp_path / "run"))
    weights = (run.folder / "checkpoint.safetensors").read_bytes()
    stopped(run, cfg, step)
    assert run.status == "running"
    assert (run.folder / "at_step_18" / "checkpoint.safetensors").read_bytes() == weights
    train(cfg, run)
    assert_same_run(run, reference)


@pytest.mark.parametrize("killed_in", ["naming", "write_json", "write_text", "_opened"])
def test_a_lengthened_run_killed_before_its_first_step_loses_nothing(tmp_path, monkeypatch, long, short, killed_in):
    cfg, reference = long
    run = Run(shutil.copytree(short.folder, tmp_path / "run"))

    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        module = rankbench.training.loop if killed_in == "_opened" else rankbench.runs.run
        patch.setattr(module, killed_in, die)
        with pytest.raises(Killed):
            train(cfg, run)
    again = Run(tmp_path / "again")
    shutil.copytree(run.folder, again.folder)
    train(cfg, run)
    assert_same_run(run, reference)
    if killed_in != "_opened":  # not yet a run of more steps
        train(of_length(cfg, 18), again)
        assert_same_run(again, short)


@pytest.mark.further
def test_tables_of_other_weights_leave_a_lengthened_run(tmp_path, undrawn_here):
    words = ["analysis=[paths]", "claims=[paths_sum_to_output]"]
    run = trained(tmp_path / "run", *words)
    analyze_trained(config(*words), run)
    table = run.table("paths")
    (run.folder / "notes.csv").write_text("my own\n")
    trained(run.folder, *words, "trainer.steps=24")
    assert not list(run.folder.glob("paths*")) and not (run.folder / "verdicts.csv").exists()
    assert (run.folder / "notes.csv").exists()
    assert Run(run.folder / "at_step_20").table("paths").equals(table)
    analyze_trained(config(*words, "trainer.steps=24"), run)
    assert not run.table("paths").equals(table)
    assert runs_in(run.folder) == [run.folder]  # the shorter run is none of a sweep's jobs


@pytest.mark.parametrize(
    "words, message",
    [
        (["trainer.steps=24", "optimizer.schedule=cosine"], "on which the learning rates of optimizer.schedule=cosine"),
        (["trainer.steps=24", "optimizer.schedule=linear"], "on which the learning rates of optimizer.schedule=linear"),
        (["trainer.steps=19"], "trainer.steps=19: .* begun with trainer.steps=20; give the same command"),
        (["trainer.steps=24", "trainer.keep_state=false"], "begun with trainer.steps=20 and kept no training state"),
        (["trainer.steps=null", "trainer.epochs=99"], "trainer.epochs=99.0: .* begun with trainer.epochs=null"),
        (["trainer.steps=24", "seed=1"], "seed=1: .* begun with seed=0"),
    ],
)
def test_what_more_steps_would_change_is_refused(tmp_path, words, message):
    run = trained(
        tmp_path / "run", *(word for word in words if not word.startswith(("trainer.st", "trainer.ep", "seed")))
    )
    before = contents(run.folder)
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path / "run", *words)
    assert contents(run.folder) == before


# --- seeds that leave ------------------------------------------------------------------------------------------------


def spoil(monkeypatch, spoilt, how):
    """Begin those seeds with weights that give a loss of nan or of infinity."""

    def spoilt_model(cfg, task, seed):
        model = initial_model(cfg, task, seed)
        if seed in spoilt and how == "nan":
            model.read_out.weight.data.fill_(math.nan)
        elif seed in spoilt:
            # logits of +-3e38 are float32; their distance is not
            model.read_out.bias.data.copy_(torch.tensor([3e38, -3e38, -3e38, -3e38]))
        return model

    monkeypatch.setattr(seeds_side_by_side, "initial_model", spoilt_model)


@pytest.mark.parametrize("how", ["nan", "inf"])
def test_a_seed_that_diverges_leaves_the_others_alone(tmp_path, monkeypatch, how):
    # fp32: in fp64 a loss of 6e38 would still be a number. SGD, for Adam would enlarge its rounding.
    overrides = ["replicas=3", "optimizer=sgd"]
    healthy = trained(tmp_path / "healthy", *overrides)
    spoil(monkeypatch, {1}, how)
    run = trained(tmp_path / "run", *overrides)
    summary = run.summary()
    assert summary["status"] == "finished"
    assert [seed["status"] for seed in summary["seeds"]] == ["finished", "diverged", "finished"]
    assert [seed["steps"] for seed in summary["seeds"]] == [20, 4, 20]
    assert not math.isfinite(float(rows_of(run, seed=1, split="test")[0]["loss"]))
    assert summary["seeds"][1]["test_loss"] is None
    assert {row["step"] for row in rows_of(run, seed=1)} == {"0", "4"}
    for seed in (0, 2):
        # fp32, three seeds in one product against two: rounding of 6e-8 over 20 steps
        torch.testing.assert_close(one_seed(run, seed), one_seed(healthy, seed), rtol=1e-5, atol=1e-5)
        assert losses_of(run, seed=seed) == pytest.approx(losses_of(healthy, seed=seed), rel=1e-5)


def spoil_at(monkeypatch, step, spoilt):
    """Set the weights of that seed to nan once it has taken so many steps."""
    update = Training.update

    def spoil_and_update(self):
        if self.progress.step == step:
            for parameter in self.parameters.values():
                parameter.data[spoilt] = math.nan
        update(self)

    monkeypatch.setattr(Training, "update", spoil_and_update)


@pytest.mark.further
@pytest.mark.parametrize("step", [13, 16], ids=["between evaluations", "at an evaluation"])
def test_a_seed_diverges_at_the_step_where_its_loss_does(tmp_path, monkeypatch, caplog, step):
    healthy = trained(tmp_path / "healthy", "replicas=3")
    spoil_at(monkeypatch, step, 1)
    reference = trained(tmp_path / "reference", "replicas=3")
    assert f"seed 1 diverged: its loss is not finite from step {step} on" in caplog.text
    assert [seed.get("diverged_at") for seed in reference.summary()["seeds"]] == [None, step, None]
    noticed = reference.summary()["seeds"][1]["steps"]
    assert noticed == 4 * (step // 4 + 1)
    for seed in (0, 2):  # bit for bit while all three are in the stack; two in one product may round otherwise
        ours, theirs = ([line for line in timeless(run) if line[1] == str(seed)] for run in (reference, healthy))
        assert [line for line in ours if int(line[0]) <= noticed] == [x for x in theirs if int(x[0]) <= noticed]
    for stop in (10, 14, 18):
        run = stopped(Run(tmp_path / f"stopped{stop}"), config("replicas=3"), stop)
        assert_same_run(trained(run.folder, "replicas=3"), reference)


def test_a_run_whose_seeds_all_diverge_is_diverged(tmp_path, monkeypatch):
    spoil(monkeypatch, {0, 1}, "nan")
    run = trained(tmp_path / "run", "replicas=2")
    assert run.status == "diverged"
    assert run.summary()["step"] == 4
    assert [seed["status"] for seed in run.summary()["seeds"]] == ["diverged", "diverged"]
    monkeypatch.setattr(Training, "update", lambda self: pytest.fail("it trained again"))
    assert train(config("replicas=2"), run) == run.summary()


@pytest.mark.further
def test_a_seed_that_reaches_the_target_stops_there_and_the_others_go_on(tmp_path):
    overrides = ["replicas=3", "precision=fp64", "trainer.steps=40"]
    free = trained(tmp_path / "free", *overrides)
    accuracies = {
        seed: {int(row["step"]): float(row["accuracy"]) for row in rows_of(free, seed=seed, split="test")[1:]}
        for seed in range(3)
    }
    target = max(max(of_step.values()) for of_step in accuracies.values())  # the best seed's best
    expected = {
        seed: next((step for step, accuracy in of_step.items() if accuracy >= target), None)
        for seed, of_step in accuracies.items()
    }
    reached = [seed for seed, step in expected.items() if step is not None]
    assert 0 < len(reached) < 3, "choose another seed: this target parts nobody"
    run = trained(tmp_path / "run", *overrides, f"trainer.target_accuracy={target}")
    for seed, step in expected.items():
        row_of_seed = run.summary()["seeds"][seed]
        status, steps = ("reached", step) if seed in reached else ("finished", 40)
        assert (row_of_seed["status"], row_of_seed["steps"]) == (status, steps)
        assert row_of_seed["test_accuracy"] == accuracies[seed][steps]
        assert max(int(row["step"]) for row in rows_of(run, seed=seed)) == steps
        upto = trained(tmp_path / f"upto{step}", *overrides, f"trainer.steps={steps}") if seed in reached else free
        torch.testing.assert_close(one_seed(run, seed), one_seed(upto, seed), **SAME)


@pytest.mark.parametrize("steps", [4, 20])  # the target is reached at the last one, or long before it
def test_a_run_ends_when_every_seed_is_at_its_target(tmp_path, steps):
    run = trained(tmp_path / "run", "replicas=2", f"trainer.steps={steps}", "trainer.target_accuracy=0.0")
    assert run.summary()["step"] == 4  # the first evaluation after training began
    assert [seed["status"] for seed in run.summary()["seeds"]] == ["reached", "reached"]


def test_the_summary_has_the_accuracies_of_constant_answers(tmp_path):
    run, task = trained(tmp_path / "run", "replicas=2", "trainer.steps=1"), build_task(config().task)
    for row in run.summary()["seeds"]:
        drawn = (task.sample(size, generator_for(row["seed"], name)) for name, size in (("train", 20), ("test", 30)))
        for name, accuracy in majority_baselines(*drawn, num_classes=5).items():
            assert row[f"{name}_accuracy"] == pytest.approx(accuracy)
    regression = Run(tmp_path / "regression")
    train(compose("train", "task=retrieval", "model.layers=1", "model.width=8", "trainer.steps=1"), regression)
    assert "majority_accuracy" not in regression.summary()["seeds"][0]


# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, message",
    [
        ("model.heads=4", "model.heads=4: .* begun with model.heads=2"),
        ("trainer.clip=0.5", "trainer.clip=0.5: .* begun with trainer.clip=null"),
        ("task.alphabet=9", "task.alphabet=9: .* begun with task.alphabet=5"),
        ("seed=3", "seed=3: .* begun with seed=0"),
        ("optimizer.milestones=[3]", r"optimizer.milestones=\[3\]: .* begun with optimizer.milestones=\[\]"),
    ],
)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
def test_another_config_is_refused(tmp_path, finished, override, message):
    run = Run(tmp_path / "run")
    if finished:
        trained(run.folder, "trainer.steps=1")
    else:
        stopped(run, config("trainer.steps=5"), 2)
    before = contents(run.folder)
    with pytest.raises(ConfigError, match=message) as caught:
        trained(run.folder, f"trainer.steps={1 if finished else 5}", override)
    assert "\n" not in str(caught.value)
    assert str(run.folder) in str(caught.value)
    assert contents(run.folder) == before


def test_a_trained_run_is_not_trained_again(tmp_path, monkeypatch):
    run = trained(tmp_path / "run", "trainer.steps=3")
    before = contents(run.folder)
    monkeypatch.setattr(Training, "update", lambda self: pytest.fail("it trained again"))
    free = ["out=elsewhere", "+analysis.residual.chunk=3", "claims=[paths_sum_to_output]"]
    assert train(config("trainer.steps=3", *free), run) == run.summary()
    after = contents(run.folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"config.yaml"}
    assert run.config.out == "elsewhere"


def test_a_run_that_keeps_no_state_has_none_even_if_it_was_killed_just_before_its_last_move(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Run, "drop_state", lambda self: None)
        run = trained(tmp_path / "run", "trainer.keep_state=false")
    assert run.state() is not None
    assert trained(tmp_path / "run", "trainer.keep_state=false").state() is None
    assert trained(tmp_path / "another", "trainer.keep_state=false").state() is None


@ONCE
def test_a_run_continues_with_other_free_keys(tmp_path, uninterrupted):
    cfg, reference = uninterrupted
    run = stopped(Run(tmp_path / "run"), cfg, 10)
    train(dataclasses.replace(cfg, out="elsewhere", analysis={"residual": {}}, claims=["x"]), run)
    assert_same_run(run, reference)


def test_no_step_is_a_run_as_well(tmp_path):
    run = trained(tmp_path / "run", "trainer.steps=0", "replicas=2")
    assert run.status == "finished"
    assert [row["step"] for row in rows_of(run)] == ["0", "0"]
    for seed in range(2):
        cfg = config()
        initial = dict(initial_model(cfg.model, build_task(cfg.task), seed).named_parameters())
        assert all(torch.equal(weight, initial[name]) for name, weight in one_seed(run, seed).items())


def test_a_state_whose_seeds_have_all_ended_is_restored(tmp_path):
    ended, again = (untrained(config("replicas=2")) for _ in range(2))
    ended.update()
    ended.retire(ended.evaluate(), last=True)
    ended.save(Run(tmp_path))
    again.restore(*Run(tmp_path).state())
    assert again.progress.training == []
    torch.testing.assert_close(again.weights(), ended.weights(), rtol=0, atol=0)


# --- batches ---------------------------------------------------------------------------------------------------------


def batches_of(training, num_steps):
    for step in range(num_steps):
        training.progress.step = step
        yield training.batch()


def as_rows(batch, seed_index):
    """The sequences of one seed with their targets, as hashable rows."""
    both = torch.cat([batch.inputs[seed_index], batch.targets[seed_index]], -1)
    return [tuple(row) for row in both.tolist()]


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 15), st.integers(1, 17))
def test_an_epoch_visits_every_training_sequence_once(train_size, batch_size):
    sizes = [f"task.train_size={train_size}", f"trainer.batch_size={batch_size}"]
    training = untrained(config(*sizes, "replicas=2", "trainer.steps=null", "trainer.epochs=3"))
    per_epoch = training.data.batches_per_epoch
    assert training.num_steps == 3 * per_epoch
    batches = list(batches_of(training, training.num_steps))
    assert all(batch.targets.shape[1] == min(batch_size, train_size) for batch in batches[0:1])
    for seed_index in range(2):
        everything = sorted(as_rows(training.data.train, seed_index))
        for epoch in range(3):
            of_epoch = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert sorted(row for batch in of_epoch for row in as_rows(batch, seed_index)) == everything


def test_every_epoch_and_every_seed_has_its_own_order_and_data():
    training = untrained(config("replicas=2", "task.alphabet=50", "trainer.batch_size=20"))
    first, second = batches_of(training, 2)  # two epochs of one batch
    assert as_rows(first, 0) != as_rows(second, 0)
    assert sorted(as_rows(first, 0)) == sorted(as_rows(second, 0))
    assert not set(as_rows(first, 0)) & set(as_rows(first, 1))
    assert not set(as_rows(training.data.test, 0)) & set(as_rows(training.data.train, 0))
    assert not set(as_rows(training.data.test, 0)) & set(as_rows(training.data.test, 1))


def test_fresh_data_is_fresh_at_every_step_and_for_every_seed():
    # 1000^4 possible sequences: two of the 130 drawn here agree with a chance below 1e-8
    training = untrained(config("replicas=2", "task.train_size=null", "task.alphabet=1000"))
    drawn = [row for batch in batches_of(training, 5) for seed_index in range(2) for row in as_rows(batch, seed_index)]
    drawn += [row for seed_index in range(2) for row in as_rows(training.data.test, seed_index)]
    assert len(drawn) == 2 * (5 * 8 + 30)
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("epochs, steps", [(2, 6), (0.5, 2), (0, 0)])
def test_epochs_are_counted_in_whole_batches(epochs, steps):
    assert untrained(config("trainer.steps=null", f"trainer.epochs={epochs}")).num_steps == steps


# --- randomness ------------------------------------------------------------------------------------------------------


def test_training_neither_uses_nor_moves_global_randomness(tmp_path):
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        runs.append(trained(tmp_path / str(seed), "model.dropout=0.1", "trainer.steps=6"))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert_same_run(*runs)


# --- metrics.csv -----------------------------------------------------------------------------------------------------


def test_metrics_say_what_the_final_weights_do(tmp_path):
    # more test sequences than go into one forward pass, and no multiple of that
    overrides = ["replicas=2", "precision=fp64", "task.test_size=1300", "trainer.steps=6"]
    run = trained(tmp_path / "run", *overrides)
    cfg = run.config
    task = build_task(cfg.task)
    header, *rows = (run.folder / "metrics.csv").read_text().splitlines()
    assert header == "step,seed,split,loss,accuracy,learning_rate,seconds,tokens_per_second"
    steps = [(row["step"], row["seed"], row["split"]) for row in rows_of(run)]
    assert len(steps) == len(rows)
    later = [(step, seed, split) for step in ("4", "6") for seed in ("0", "1") for split in ("train", "test")]
    assert steps == [("0", "0", "test"), ("0", "1", "test"), *later]
    for seed in range(2):
        model = initial_model(cfg.model, task, seed).double()
        model.load_state_dict(one_seed(run, seed))  # strict: every weight is there
        test = task.sample(1300, generator_for(seed, "test"))
        with torch.no_grad():
            outputs = model(test.inputs).flatten(0, 1)
        last = rows_of(run, seed=seed, split="test", step=6)[0]
        assert float(last["loss"]) == pytest.approx(F.cross_entropy(outputs, test.targets.flatten()).item(), rel=1e-12)
        right = (outputs.argmax(-1) == test.targets.flatten()).double().mean().item()
        assert float(last["accuracy"]) == pytest.approx(right, rel=1e-12)
        row_of_seed = run.summary()["seeds"][seed]
        assert row_of_seed["test_loss"] == float(last["loss"])
        assert row_of_seed["test_accuracy"] == float(last["accuracy"])


def test_the_clock_counts_all_work_and_the_speed_the_steps_alone_also_of_a_continued_run(tmp_path, monkeypatch):
    """A step takes a second; the test, a look at the layers and a checkpoint take a hundred."""
    now = [0.0]

    def takes(seconds, owner, name):
        call = getattr(owner, name)

        def timed(*arguments):
            now[0] += seconds
            return call(*arguments)

        monkeypatch.setattr(owner, name, timed)

    for module in (journal, seeds_side_by_side):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    takes(1, Training, "update")
    for owner, name in ((Training, "_score"), (Training, "save"), (journal, "dynamics")):
        takes(100, owner, name)
    cfg = config("replicas=2", "trainer.steps=6", "trainer.eval_every=3", "trainer.dynamics_every=2")
    run = stopped(Run(tmp_path / "run"), cfg, 4)
    train(cfg, run)
    # an epoch of 20 sequences of 4 tokens for two seeds in 3 seconds, in partial batches, too
    assert {row["tokens_per_second"] for row in rows_of(run, split="train")} == {str(round(20 * 4 * 2 / 3))}
    # until step 3 a test and two looks; until step 4 a test and a look, and until step 6 a checkpoint
    assert [row["seconds"] for row in rows_of(run, split="test", seed=1)] == ["0.0", "303.0", "606.0"]


def test_a_regression_trains_on_the_squared_error(tmp_path):
    """Of points that are their own nearest ones."""
    words = ["task=nearest_neighbor", "task.dimension=2", "task.points=4", "task.test_size=20", "model.layers=1"]
    words += ["model.width=8", "precision=fp64", "replicas=2", "trainer.steps=60", "optimizer.lr=0.03"]
    cfg = compose("train", *words)
    summary = train(cfg, Run(tmp_path / "run"))
    rows = pd.read_csv(tmp_path / "run" / "metrics.csv").query("split == 'test'")
    assert rows.accuracy.isna().all()  # regression has none
    first, last = (rows[rows.step == step].loss.mean() for step in (0, 60))
    assert last < first / 4  # an untrained read-out is off by about the numbers themselves
    task = build_task(cfg.task)
    for index, row in enumerate(summary["seeds"]):
        model = build_model(cfg.model, task).to_empty(device="cpu").double()
        model.load_state_dict(one_seed(Run(tmp_path / "run"), index))
        test = task.sample(20, generator_for(row["seed"], "test"))
        error = torch.nn.MSELoss()(model(test.inputs), test.targets).item()
        assert row["test_loss"] == pytest.approx(error, rel=1e-12)  # the same sums in another order, float64

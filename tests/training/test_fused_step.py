"""rankbench.training.fused_step and rankbench.training.library: the compiled step against autograd and torch's
optimisers, whole trainings against uncompiled ones, and libraries that cannot be made.

Shapes: S seed, B batch, N token, C output.
"""

import dataclasses
import gc
import json
import logging
import os
import shutil
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from breadth import some
from command_line import python
from torch.func import functional_call

from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.model import build_model
from rankbench.model.dropout import dropout_masks
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.seeds import state_of, streams_of
from rankbench.tasks import Batch, build_task
from rankbench.training import compiling, fused_step
from rankbench.training import library as libraries
from rankbench.training.compiling import choose_step
from rankbench.training.library import NoLibraryError, Source, library
from rankbench.training.loop import train
from rankbench.training.seeds_side_by_side import Training

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the fused step needs g++")

# One set of sizes, so that one library for each number type serves almost every test; no size is another one, a
# multiple of eight, or the number of heads times something.
SIZES = ["model.layers=2", "model.width=6", "model.heads=2", "model.head_width=4", "model.mlp_ratio=1.5"]
SORTING = ["task.length=5", "task.alphabet=7", "task.train_size=40", "task.test_size=20"]
NEAREST = ["task=nearest_neighbor", "task.queries=separate", "task.points=4", "task.dimension=5", "task.train_size=40"]
NEAREST += ["task.test_size=20"]  # coordinates and numbers; only the last token's target is scored
MEMORIZATION = ["task=memorization", "task.length=5", "task.classes=5", "task.vocabulary=7", "task.train_size=40"]
TEXT = ["task=char_lm", "task.length_limit=23", "task.train_size=70", "task.valid_size=10", "task.test_size=10"]
TEXT += ["task.pad_to=4", "model.mask=causal"]
LONG_TEXT = [*TEXT, "task.length_limit=90"]  # attention in parts of 32 queries
CURRICULUM = ["task=linear_regression", "task.points=8", "task.dimension=3", "task.start_points=2"]
CURRICULUM += ["task.start_dimension=1", "task.curriculum_every=4", "task.test_size=8", "model.mask=causal"]
CONTRACTIVE = ["model.attention=contractive_l2", "model.tied_qk=true", "model.contraction=0.9"]
BARE_ENDS = ["task.dimension=6", "model.read_in=identity", "model.read_out=identity", "model.positions=none"]
LENGTHS = ["trainer.batch_size=30", "trainer.steps=12", "trainer.eval_every=4", "trainer.checkpoint_every=5"]
TOGGLES = {
    "post-norm": [],
    "pre-norm": ["model.norm=pre"],
    "no norm": ["model.norm=none"],
    "peri-norm": ["model.norm=peri"],
    "ngpt": ["model.norm=ngpt"],
    "rmsnorm": ["model.norm_kind=rmsnorm"],
    "l2norm": ["model.norm_kind=l2norm"],
    "l2norm without weights": ["model.norm_kind=l2norm", "model.norm_affine=false", "model.norm=peri"],
    "norms without weights": ["model.norm_affine=false"],
    "norms scaled by depth": ["model.norm=pre", "model.norm_scale=depth"],
    "embedding norm": ["model.embedding_norm=true"],
    "relu": ["model.activation=relu"],
    "no MLP": ["model.mlp=false"],
    "no skips": ["model.skips=false", "model.norm=none"],
    "factors of skip and branch": ["model.skip_scale=0.5", "model.branch_scale=0.3", "model.norm=pre"],
    "causal": ["model.mask=causal"],
    "window": ["model.mask=window", "model.window=1"],
    "others": ["model.mask=others"],
    "temperature": ["model.temperature=0.5"],
    "no biases": ["model.bias=false"],
    "sinusoidal positions": ["model.positions=sinusoidal"],
    "no positions": ["model.positions=none"],
    "dropout": ["model.dropout=0.3"],
    "dropout, pre-norm and causal": ["model.dropout=0.3", "model.norm=pre", "model.mask=causal"],
    "numbers": NEAREST,
    "absent tokens": MEMORIZATION,
    "absent tokens and a window": [*MEMORIZATION, "model.mask=window", "model.window=1", "model.positions=none"],
    "fresh sequences": ["task.train_size=null"],
    "a curriculum": CURRICULUM,
    "shared layers": ["model.shared_layers=true"],
    "l2": ["model.attention=l2"],
    "l2, whose queries are keys": ["model.attention=l2", "model.tied_qk=true", "model.dropout=0.3"],
    "contractive l2": [*CONTRACTIVE, "model.mask=window", "model.window=1"],
    "contractive l2 and absent tokens": [*MEMORIZATION, *CONTRACTIVE],
    "the mean of copies of heads": ["model.head_reduction=mean", "model.dropout=0.3"],
    "contractive l2, the mean of copies": [*CONTRACTIVE, "model.head_reduction=mean"],
    "many heads": ["model.heads=300", "model.head_width=3", "model.value_width=6", "model.layers=1"],
    "values of another width": ["model.value_width=3", "model.mask=causal"],
    "l2, values of another width": ["model.attention=l2", "model.value_width=3", "model.tied_qk=true"],
    "contractive l2, values of another width": [*CONTRACTIVE, "model.value_width=5"],
    "an MLP that reads in": [*NEAREST, "model.read_in=mlp", "model.embedding_norm=true"],
    "relu, an MLP that reads in": [*NEAREST, "model.read_in=mlp", "model.activation=relu", "model.bias=false"],
    "the first coordinates": [*NEAREST, "model.read_out=identity", "model.norm=pre"],
    "no maps at the ends": [*NEAREST, *BARE_ENDS],
    "queries that are keys": ["model.tied_qk=true", "model.mask=causal"],
    "a text": TEXT,
    "a text, l2 and dropout": [*TEXT, "model.attention=l2", "model.tied_qk=true", "model.dropout=0.3"],
    "a long text": [*LONG_TEXT, "model.dropout=0.3"],
    "a long text, l2, whose queries are keys": [*LONG_TEXT, "model.attention=l2", "model.tied_qk=true"],
    "many tokens and a window": ["task.length=70", "model.mask=window", "model.window=3", "model.tied_qk=true"],
    "many tokens and the others": ["task.length=65", "model.mask=others", "model.dropout=0.3"],
    "a text, contractive l2": [*TEXT, *CONTRACTIVE, "model.contraction_keys=23"],
}
# Of float32: the gradients of a few hundred tokens are sums of numbers rounded to 6e-8.
TOLERANCES = {"fp32": 1e-6, "fp64": 1e-12}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """A cache folder of libraries that the processes of one pytest share."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Batches of 30 sequences in chunks of 8, 8, 8 and 6."""
    monkeypatch.setattr(fused_step, "TOKENS_AT_A_TIME", 44)


def config(*words):
    task = [] if any(word.startswith("task=") for word in words) else SORTING
    return compose("train", *SIZES, *LENGTHS, "replicas=2", *task, *words)


def training(cfg, step, threads=1):
    machine = dataclasses.replace(Machine.prepare(cfg), threads=threads)
    return Training(cfg, build_task(cfg.task), machine, list(range(cfg.replicas)), step)


def gradients_by_autograd(of, batch, seed):
    """Loss per scored token and its gradients in float64, by autograd through the tables of attention."""
    model = build_model(of.cfg.model, of.task)
    weights = {name: weight[seed].double().requires_grad_() for name, weight in of.parameters.items()}
    masks = dropout_masks(
        model, *batch.targets.shape[1:3], streams_of([state_of(seed, "dropout")]), dtype=torch.float64
    )
    masks = None if masks is None else {name: mask[0] for name, mask in masks.items()}
    inputs, targets = batch.inputs[seed], batch.targets[seed]
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    outputs_BNC = functional_call(model, weights, (inputs, masks), {"kernel": "table"})
    if targets.is_floating_point():
        scored_BN = ~targets.isnan().any(-1)
        loss = F.mse_loss(outputs_BNC[scored_BN], targets[scored_BN].double())
    else:
        loss = F.cross_entropy(outputs_BNC.flatten(0, 1), targets.flatten(), ignore_index=-1)
    return loss.detach(), torch.autograd.grad(loss, list(weights.values()))


def assert_gradients(of, batch, tolerance):
    scores, gradients = of.gradients(batch)
    for seed in range(of.cfg.replicas):
        loss, by_autograd = gradients_by_autograd(of, batch, seed)
        torch.testing.assert_close(scores.mean_loss[seed], loss, rtol=tolerance, atol=0)
        largest = max(gradient.abs().max() for gradient in by_autograd)
        for ours, theirs in zip(gradients, by_autograd, strict=True):
            torch.testing.assert_close(ours[seed].double(), theirs, rtol=0, atol=tolerance * largest.item())


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("toggle", some(TOGGLES, 2))
def test_gradients_are_those_of_autograd(toggle, precision):
    of = training(config(*TOGGLES[toggle], f"precision={precision}"), "fused")
    assert_gradients(of, of.batch(), TOLERANCES[precision])


def test_absent_targets_are_not_scored():
    of = training(config("precision=fp64"), "fused")
    batch = of.batch()
    targets = batch.targets.clone()
    targets[0, ::2] = targets[1, :, 1:3] = -1
    batch = Batch(batch.inputs, targets)
    assert_gradients(of, batch, TOLERANCES["fp64"])
    scores, _ = of.gradients(batch)
    plain, _ = training(of.cfg, "plain").gradients(batch)
    assert torch.equal(scores.tokens, plain.tokens.double()) and torch.equal(scores.right, plain.right)


DIVIDED = ["post-norm", "dropout, pre-norm and causal", "contractive l2 and absent tokens", "a text, l2 and dropout"]


# of the two seeds: one each, the sequences of each in halves, and in more parts than they fill
@pytest.mark.parametrize("threads", [2, 5, 100])
@pytest.mark.parametrize("toggle", DIVIDED)
def test_gradients_of_several_threads_are_those_of_autograd(toggle, threads):
    of = training(config(*TOGGLES[toggle], "precision=fp64"), "fused", threads)
    assert_gradients(of, of.batch(), TOLERANCES["fp64"])


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_rates_near_one_are_not_rounded(name):
    cfg, moved = config(f"optimizer.{name}=0.999999", "optimizer.lr=0.01"), []
    for step in ("plain", "fused"):
        of = training(cfg, step)
        before = of.weights()["read_out.weight"].clone()
        of.update()
        moved.append(of.weights()["read_out.weight"] - before)
    # 1 - beta of a beta in float32 would be wrong by .005 and .01
    torch.testing.assert_close(*moved, rtol=1e-4, atol=0)


TWO_TRAININGS = """
import sys, threading
sys.path.append("..")
import test_fused_step as tests
longer = ["task.length_limit=60", "trainer.batch_size=10", "model.norm=pre"]
trainings = [tests.training(tests.config(*tests.TEXT, *longer, "precision=fp64"), "fused") for _ in range(3)]
together = [threading.Thread(target=lambda of: [of.update() for _ in range(12)], args=[of]) for of in trainings[1:]]
for training in together: training.start()
for training in together: training.join()
for _ in range(12): trainings[0].update()
weights = [training.weights() for training in trainings]
print(all((weight == other[name]).all() for other in weights[1:] for name, weight in weights[0].items()))
"""


def test_trainings_of_two_threads_do_not_mix():
    done = python("-c", TWO_TRAININGS, at=Path(__file__).parent)  # they would end the process
    assert done.stdout == "True\n", done.stderr


def test_seeds_of_several_threads_have_the_same_bits():
    cfg = config(*TEXT, "model.dropout=0.2", "replicas=5", "trainer.clip=0.2")
    alone, divided = (training(cfg, "fused", threads) for threads in (1, 3))
    for _ in range(5):
        alone.update()
        divided.update()
    torch.testing.assert_close(divided.weights(), alone.weights(), rtol=0, atol=0)


OPTIMIZERS = {
    "adam, clipped": ["optimizer.weight_decay=0.1", "trainer.clip=0.2", "optimizer.schedule=cosine"],
    "adamw": ["optimizer=adamw", "optimizer.weight_decay=0.1", "optimizer.warmup=3"],
    "sgd": ["optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0.1", "optimizer.lr=0.1"],
    "momentum, clipped": ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1", "trainer.clip=0.2"],
    "dropout, in parts": ["model.dropout=0.2", "trainer.accumulate=4", "model.norm=pre"],
    "capped": ["optimizer.cap=0.5"],
    "an optimiser of torch's, clipped": ["optimizer=muon", "optimizer.weight_decay=0.1", "trainer.clip=0.2"],
    "a text": [*TEXT, "model.attention=l2", "model.dropout=0.2", "trainer.accumulate=3"],
    "a curriculum": [*CURRICULUM, "optimizer=sgd"],
}


def trained(folder, *words, **changes):
    run = Run(Path(folder))
    train(dataclasses.replace(config(*words), **changes), run)
    return run


@pytest.fixture
def always(monkeypatch):
    """Have auto take the fused step for trainings of any length."""
    monkeypatch.setattr(compiling, "REPAID_AFTER", 0)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("words", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_torch(words, threads):
    cfg = config("precision=fp64", "optimizer.lr=0.01", *words)
    plain, fused = training(cfg, "plain"), training(cfg, "fused", threads)
    for _ in range(cfg.trainer.steps):
        plain.update()
        fused.update()
    for sums in ("loss", "accuracy", "tokens"):
        ours, theirs = fused.sums[sums], plain.sums[sums].double()
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0, equal_nan=True)  # numbers have no accuracy
    # Adam divides by the size of a gradient, which enlarges differences of rounding
    torch.testing.assert_close(fused.weights(), plain.weights(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_seeds_leave_and_the_others_go_on_as_if_alone(optimizer, tmp_path, always):
    words = [f"optimizer={optimizer}", "optimizer.lr=0.02", "trainer.steps=60", "trainer.target_accuracy=0.45"]
    words += ["trainer.clip=0.5", "precision=fp64"]
    together = trained(tmp_path / "together", *words, replicas=3)
    last = [row["steps"] for row in together.summary()["seeds"]]
    assert len(set(last)) > 1 and together.step == "fused"
    seed = last.index(max(last))
    alone = trained(tmp_path / "alone", *words, replicas=1, seed=seed)
    assert alone.summary()["seeds"][0]["steps"] == last[seed]
    rounding = 0 if optimizer == "adam" else 1e-9  # torch rounds muon's products by the number of seeds
    ours = {name: weight[[seed]] for name, weight in together.weights().items()}
    torch.testing.assert_close(ours, alone.weights(), rtol=0, atol=rounding)


@pytest.mark.parametrize(
    "words",
    [
        *([], ["optimizer=sgd", "model.dropout=0.2"], ["optimizer=muon"]),
        *(["model.shared_layers=true", "model.layers=3"], TEXT),
    ],
    ids=str,
)
def test_a_run_in_parts_is_the_uninterrupted_run(words, tmp_path, always, monkeypatch):
    whole = trained(tmp_path / "whole", *words)
    trained(tmp_path / "parts", *words, "trainer.steps=7")
    monkeypatch.setattr(compiling, "REPAID_AFTER", 600)  # the step that a run began with stays
    parts = trained(tmp_path / "parts", *words)
    assert parts.step == "fused"
    torch.testing.assert_close(parts.weights(), whole.weights(), rtol=0, atol=0)
    tests = [run.table("metrics").query("split == 'test' and step == 12").loss for run in (parts, whole)]
    assert list(tests[0]) == list(tests[1])


def test_a_run_keeps_its_step_or_says_that_it_cannot(tmp_path, always, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    fused = trained(tmp_path / "fused", "trainer.steps=4")
    plain = trained(tmp_path / "plain", "trainer.steps=4", "trainer.compile=false")
    assert trained(fused.folder, "trainer.steps=6", "trainer.compile=false").step == "fused"
    assert "keeps the kind of step that it began with, fused, not plain" in caplog.text
    assert trained(plain.folder, "trainer.steps=6").step == "plain"
    monkeypatch.setenv("CXX", "no-such-compiler")
    libraries._library.cache_clear()
    with pytest.raises(ConfigError, match=r"was begun with the fused step, .*no C\+\+ compiler \(no-such-compiler"):
        trained(fused.folder, "trainer.steps=8")
    assert trained(tmp_path / "new", "trainer.steps=4").step == "plain"
    assert "not the fused step: there is no C++ compiler (no-such-compiler" in caplog.text
    record = fused.folder / "environment.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"step": "faster"}))
    with pytest.raises(ConfigError, match=r"step=faster: allowed are plain, torch\.compile, fused"):
        trained(fused.folder, "trainer.steps=8")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("words", [[], ["model.norm=none", "model.activation=relu"]], ids=str)
def test_a_number_that_is_not_finite_reaches_the_loss_of_its_seed_alone(number, words):
    losses = {}
    for step in ("plain", "fused"):
        of = training(config(*words), step)
        for name in ("blocks.0.attention.qkv.weight", "blocks.1.mlp.up.weight"):
            of.parameters[name].detach()[0, 0, 0] = number
        for _ in range(2):
            of.update()
        losses[step] = of.sums["loss"]
        assert not of.parameters["read_out.weight"][0].isfinite().any()
    assert not losses["fused"][0].isfinite() and not losses["plain"][0].isfinite()
    torch.testing.assert_close(losses["fused"][1], losses["plain"][1], rtol=1e-5, atol=0)


def test_a_diverging_seed_ends_as_it_does_with_torch(tmp_path, always):
    words = ["optimizer=sgd", "optimizer.lr=1000", "model.norm=none", "model.activation=relu", "trainer.eval_every=1"]
    runs = [trained(tmp_path / step, *words, f"trainer.compile={step}") for step in ("auto", "false")]
    statuses = [[(row["status"], row["diverged_at"]) for row in run.summary()["seeds"]] for run in runs]
    assert statuses[0] == statuses[1] and {status for status, _ in statuses[0]} == {"diverged"}


def test_the_smallest_numbers_are_not_rounded_to_zero():
    training(config("precision=fp64"), "fused").update()
    assert (torch.tensor(1e-310, dtype=torch.float64) / 2).item() > 0


def test_a_training_that_has_ended_is_not_kept():
    of = training(config(*TEXT), "fused")
    of.update()
    step = weakref.ref(of.fused)
    del of
    gc.collect()
    assert step() is None


# --- when it is taken -------------------------------------------------------------------------------------------------

LONG = ["trainer.steps=600"]


@pytest.mark.parametrize(
    ("words", "step", "reason"),
    [
        (LONG, "fused", None),
        ([*LONG, "model.shared_layers=true"], "fused", None),
        ([*LONG, "trainer.compile=false"], "plain", None),
        ([*LONG, "trainer.compile=true"], "torch.compile", None),
        (["trainer.steps=599"], "plain", "599 steps do not repay its compiling, 600 do"),
        (["trainer.steps=null", "trainer.epochs=300"], "fused", None),  # of two batches each
        (["trainer.steps=null", "trainer.epochs=299"], "plain", "598 steps"),
        ([*LONG, "model.attention=sigmoid"], "plain", "does not cover model.attention=sigmoid"),
        ([*LONG, "model.kv_groups=1"], "plain", "does not cover model.kv_groups=1"),
        ([*LONG, *NEAREST, "model.positions=concatenated"], "plain", "does not cover model.positions=concatenated"),
        ([*LONG, "model=lstm"], "plain", "does not cover model.kind=lstm"),
        ([*LONG, "optimizer=muon"], "fused", None),
        ([*LONG, "precision=bf16"], "plain", "does not cover precision=bf16"),
        ([*LONG, *MEMORIZATION, "model.mask=others"], "plain", "model.mask=others with task.name=memorization"),
        ([*LONG, *TEXT], "fused", None),
        ([*LONG, "model.attention=l2", "model.shared_layers=true"], "plain", "does not cover shared layers of l2"),
        ([*LONG, "task.length=513"], "plain", "does not cover 513 tokens, more than 512"),
        ([*LONG, "model.width=2050"], "plain", "does not cover states of 2050 numbers, more than 2048"),
        (
            [*LONG, "model.width=18", "model.mlp_ratio=1000"],
            "plain",
            "does not cover a map to 18000 numbers, more than 16384",
        ),
        ([*LONG, "model.head_width=3000"], "plain", "does not cover a map to 18000 numbers, more than 16384"),
        ([*LONG, "model.width=128", "model.head_width=1366"], "plain", "a map to 8196 numbers, more than 8192"),
    ],
    ids=str,
)
def test_the_step_follows_from_the_config_and_the_log_says_why_it_is_not_fused(words, step, reason, caplog):
    caplog.set_level(logging.INFO)
    cfg = compose("train", "model=lstm", *LONG) if "model=lstm" in words else config(*words)
    assert choose_step(cfg, build_task(cfg.task), Machine.prepare(cfg)) == step
    lines = [record.getMessage() for record in caplog.records if "trainer.compile" in record.getMessage()]
    assert len(lines) == (reason is not None) and (reason is None or reason in lines[0])


# --- libraries --------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small source and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "number.cpp"
    path.write_text('extern "C" long number() { return NUMBER; }')
    return path


def files(tmp_path):
    return sorted((tmp_path / "cache" / "rankbench" / "libraries").iterdir())


def test_a_library_is_compiled_once_for_all_that_it_is_made_from(source, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    assert [library(Source.read(source), {"NUMBER": number}).number() for number in (3, 4)] == [3, 4]
    libraries._library.cache_clear()  # as in another process
    assert library(Source.read(source), {"NUMBER": 3}).number() == 3
    assert len(files(tmp_path)) == 2 == caplog.text.count("compiling number.cpp")
    read_before = Source.read(source)
    source.write_text('extern "C" long number() { return -NUMBER; }')
    libraries._library.cache_clear()
    assert library(Source.read(source), {"NUMBER": 3}).number() == -3 and len(files(tmp_path)) == 3
    assert library(read_before, {"NUMBER": 5}).number() == 5  # a package that is replaced while a process runs
    for number, (name, other) in enumerate((("FLAGS", ("-shared", "-fPIC")), ("_target", str)), 5):
        monkeypatch.setattr(libraries, name, other)  # as with another processor, whose code this one may not run
        libraries._library.cache_clear()
        assert library(Source.read(source), {"NUMBER": 3}).number() == -3 and len(files(tmp_path)) == number


def test_an_interrupted_compilation_leaves_no_library(source, tmp_path, monkeypatch):
    run = libraries._run

    def interrupted(words):
        done = run(words)
        if "-o" in words:
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(libraries, "_run", interrupted)
        library(Source.read(source), {"NUMBER": 3})
    assert files(tmp_path) == []
    assert library(Source.read(source), {"NUMBER": 3}).number() == 3


def test_why_there_is_no_library_takes_one_line(source, tmp_path, monkeypatch):
    source.write_text("not C++\n")
    with pytest.raises(NoLibraryError, match=r"^\S*g\+\+ failed: \S*number.cpp:1:1: error: [^\n]*$"):
        library(Source.read(source), {})
    compiler = tmp_path / "compiler"
    monkeypatch.setenv("CXX", str(compiler))
    no_utf8 = b"#!/bin/sh\nprintf 'error: \344' >&2; exit 1"
    for script, reason in ((b"", r"cannot be run \(Exec format"), (no_utf8, "failed: error")):
        compiler.write_bytes(script)
        compiler.chmod(0o700)
        with pytest.raises(NoLibraryError, match=f"^{compiler} {reason}[^\n]*$"):
            library(Source.read(source), {})
    monkeypatch.delenv("CXX")
    folder = tmp_path / "cache" / "rankbench" / "libraries"
    folder.chmod(0o777)
    with pytest.raises(NoLibraryError, match="libraries is not this user's alone"):
        library(Source.read(source), {"NUMBER": 1})
    folder.rmdir()
    folder.write_text("")
    with pytest.raises(NoLibraryError, match="libraries cannot be made"):
        library(Source.read(source), {"NUMBER": 2})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoLibraryError, match=r"no C\+\+ compiler \(g\+\+"):
        library(Source.read(source), {"NUMBER": 3})


@pytest.mark.parametrize("others", [{"REAL": "float", "TOKENS": 5, "SHARED": 0}, {"REAL": "double", "SHARED": 1}])
def test_the_source_compiles_without_a_warning(others):
    words = ["g++", "-std=c++17", "-fsyntax-only", "-fopenmp-simd", "-Wall", "-Wextra", "-Werror"]
    macros = {"WIDTH": 6, "HEADS": 2, "HEAD_WIDTH": 4, "VALUE_WIDTH": 3, "HIDDEN": 9, "OUTPUTS": 5, **others}
    source = Path(fused_step.__file__).with_name(fused_step.SOURCE.name)
    subprocess.run([*words, *(f"-D{name}={value}" for name, value in macros.items()), source], check=True)

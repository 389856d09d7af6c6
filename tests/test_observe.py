"""Watching a training that is not ours: rankbench.observe."""

import errno
import gc
import logging
import math
import os
import random
import re
import shutil
import signal
import weakref
from collections import Counter
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import relative_residual
from command_line import ROOT, python
from forked import fork
from torch import nn

import rankbench as rb
from rankbench.observing.folder import Table
from rankbench.plots.training import FIGURES, OBSERVED_FIGURES
from rankbench.report.jobs import find_runs
from rankbench.report.report import gather
from rankbench.runs import files
from rankbench.runs.tables import read_table
from rankbench.training.journal import StepsFile

pytestmark = pytest.mark.usefixtures("unpainted", "rounded_once")
TABLES = ["states", "attention", "weights", "steps"]
LETTERS, TOKENS, WIDTH, HEADS = 7, 6, 8, 2


class Counting(nn.Module):
    """Buffers that every pass changes: running moments of a batch norm, and a counter also in eval mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x_BND):
        self.passes += 1
        return self.norm(x_BND.mT).mT * (1 + 0 * torch.rand(()))  # draws from the global generator, in eval mode too


class LanguageModel(nn.Module):
    """A causal language model of torch's own layers, with dropout."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.counting = Counting()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, ids_BN):
        num_tokens = ids_BN.shape[1]
        mask_NN = torch.full((num_tokens, num_tokens), -math.inf, dtype=self.head.weight.dtype).triu(1)
        return self.head(self.encoder(self.counting(self.embedding(ids_BN)), mask=mask_NN))


@pytest.fixture
def inputs():
    return torch.randint(LETTERS, (5, TOKENS), generator=torch.Generator().manual_seed(3))


def model_and_optimizer(seed=0):
    torch.manual_seed(seed)
    model = LanguageModel()
    model.encoder.layers[0].norm1.eval()  # as users freeze parts
    return model, torch.optim.Adam(model.parameters(), 1e-2)


def train(model, optimizer, steps):
    """Steps on data drawn from the global generator, which dropout uses, too."""
    for _ in range(steps):
        ids_BN = torch.randint(LETTERS, (4, TOKENS + 1))
        loss = nn.functional.cross_entropy(model(ids_BN[:, :-1]).flatten(0, 1), ids_BN[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def state(model):
    """All that a measurement could change."""
    grads = [None if x.grad is None else x.grad.clone() for x in model.parameters()]
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    return tensors, grads, [module.training for module in model.modules()], torch.get_rng_state()


def test_a_training_ends_in_the_same_bits_with_and_without_observe(tmp_path, inputs):
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 6)
    alone = state(model)
    model, optimizer = model_and_optimizer()
    buffers = dict(model.named_buffers())
    with rb.observe(model, inputs, optimizer, every=2, out=tmp_path / "a") as watch:
        train(model, optimizer, 6)
    torch.testing.assert_close(state(model), alone, rtol=0, atol=0)
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert watch.table("steps").step.tolist() == [0, 2, 4, 6]
    train(model, optimizer, 2)  # the optimiser is left alone again
    assert watch.table("steps").step.tolist() == [0, 2, 4, 6]


@pytest.mark.further
def test_a_call_of_step_is_the_same_as_an_optimiser(tmp_path, inputs):
    tables = []
    for name, watched in (("a", True), ("b", False)):
        model, optimizer = model_and_optimizer()
        with rb.observe(model, inputs, optimizer if watched else None, every=3, out=tmp_path / name, seed=4) as watch:
            for _ in range(3):
                train(model, optimizer, 1)
                if not watched:
                    watch.step()
        tables.append(watch.table("states").drop(columns="run"))
    pd.testing.assert_frame_equal(*tables)
    assert tables[0].columns[:4].tolist() == ["task", "model", "seed", "step"]
    assert set(tables[0].seed) == {4} and set(tables[0].model) == {"LanguageModel"}


def test_the_tables_are_what_the_model_is_at_that_step(tmp_path, inputs):
    """The same numbers by NumPy, from the layers called one by one."""
    model, optimizer = model_and_optimizer()
    probe = inputs.clone()
    with rb.observe(model, probe, optimizer, every=2, out=tmp_path / "a", sequences=3) as watch:
        probe.zero_()  # as a loader that fills the same tensor again
        train(model, optimizer, 2)
        copy = deepcopy(model).eval()
        train(model, optimizer, 1)
    mask_NN = torch.full((TOKENS, TOKENS), -math.inf).triu(1)
    with torch.no_grad():
        x_BND = copy.counting(copy.embedding(inputs[:3]))
        states, weights = [x_BND], []
        for layer in copy.encoder.layers:
            weights.append(layer.self_attn(x_BND, x_BND, x_BND, attn_mask=mask_NN, average_attn_weights=False)[1])
            x_BND = layer(x_BND, src_mask=mask_NN)
            states.append(x_BND)
    rows = watch.table("states").query("step == 2 and view == 'all'").set_index("layer")
    assert rows.index.tolist() == [0, 1, 2]
    for layer, x_BND in enumerate(states):
        x_BND = x_BND.double().numpy()
        residuals = [relative_residual(x_ND) for x_ND in x_BND]
        # the passes are of float32
        assert rows.relative_residual[layer] == pytest.approx(np.mean(residuals), rel=1e-5)
        assert rows.relative_residual_sd[layer] == pytest.approx(np.std(residuals, ddof=1), rel=1e-3)
        spectra = np.linalg.svd(x_BND, compute_uv=False)
        ranks = (spectra**2).sum(-1) / spectra[:, 0] ** 2
        assert rows.stable_rank[layer] == pytest.approx(ranks.mean(), rel=1e-5)
    heads = watch.table("attention").query("step == 2").set_index(["layer", "head"])
    assert len(heads) == 2 * HEADS
    for (layer, head), row in heads.iterrows():
        p_BNM = weights[layer - 1][:, head - 1].double().numpy()
        entropy_BN = -(p_BNM * np.log(np.where(p_BNM > 0, p_BNM, 1))).sum(-1)
        expected = (entropy_BN[:, 1:] / np.log(np.arange(2, TOKENS + 1))).mean()
        assert row.attention_entropy == pytest.approx(expected, rel=1e-5)
        assert row.sink_weight == pytest.approx(p_BNM.mean(1).max(-1).mean(), rel=1e-5)
    norms = watch.table("weights").query("step == 2").set_index("parameter").spectral_norm
    matrices = {name: weight for name, weight in copy.named_parameters() if weight.dim() == 2}
    assert norms.index.tolist() == list(matrices)
    for name, weight in matrices.items():
        assert norms[name] == pytest.approx(np.linalg.svd(weight.detach().double().numpy())[1][0], rel=1e-5)
        # an SVD with gradients has another driver: a few roundings of float32
        assert norms[name] == pytest.approx(torch.linalg.matrix_norm(weight, 2).item(), rel=1e-6)


def interrupted(folder, inputs, steps):
    """A training that is watched and stopped by an error; returns what goes on with it."""
    model, optimizer = model_and_optimizer()
    with pytest.raises(RuntimeError, match="out of memory"), rb.observe(model, inputs, optimizer, every=2, out=folder):
        train(model, optimizer, steps)
        raise RuntimeError("out of memory")
    return model, optimizer


def tables_of(watch):
    times = ["run", "seconds", "seconds_measuring"]
    return [watch.table(name).drop(columns=times, errors="ignore") for name in TABLES]


@pytest.mark.further
def test_a_killed_watch_continues_behind_its_last_whole_step(tmp_path, inputs):
    model, optimizer = model_and_optimizer()
    with rb.observe(model, inputs, optimizer, every=2, out=tmp_path / "whole") as whole:
        train(model, optimizer, 6)
    interrupted(tmp_path / "interrupted", inputs, 4)
    for torn, cut in ((["steps"], 1), (["states", "steps"], 40), (["attention", "weights", "steps"], 1)):
        folder = shutil.copytree(tmp_path / "interrupted", tmp_path / torn[0])
        for name in torn:  # a kill in the middle of the rows of step 4
            path = folder / f"observed_{name}.csv"
            path.write_bytes(path.read_bytes()[:-cut])
        killed = rb.Run(folder)
        assert killed.table("observed_steps").step.tolist() == [0, 2]
        assert killed.table("observed_weights").notna().spectral_norm.all() if "weights" in torn else True
        model, optimizer = model_and_optimizer()  # the user's own checkpoint of step 2
        train(model, optimizer, 2)
        with rb.observe(model, inputs, optimizer, every=2, out=folder) as watch:
            assert watch.num_steps == 2
            train(model, optimizer, 4)
        for ours, theirs in zip(tables_of(watch), tables_of(whole), strict=True):
            pd.testing.assert_frame_equal(ours, theirs)


@pytest.mark.further
def test_a_training_can_continue_from_an_earlier_step(tmp_path, inputs, caplog):
    interrupted(tmp_path / "a", inputs, 6)
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 3)
    with rb.observe(model, inputs, optimizer, every=2, out=tmp_path / "a", step=3) as watch:
        train(model, optimizer, 1)
        watch.measure()  # has been measured
    assert "rows after step 3 are dropped" in caplog.text
    for name in TABLES:
        assert watch.table(name).step.unique().tolist() == [0, 2, 4]
        assert watch.table(name).groupby("step").size().nunique() == 1


def test_a_half_line_is_no_row(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,seed,loss\n1,0,0.5\n2,0,0.2")
    assert read_table(path, grows=True).step.tolist() == [1]
    assert rb.Run(tmp_path).table("metrics").step.tolist() == [1]


# --- what watching does to a training ---------------------------------------------------------------------------------


class Wrapped(torch.optim.Optimizer):
    """As accelerate's: an optimiser around another one, which it calls, without the hooks of its class."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Holder:
    """As Lightning's: no optimiser, but with one inside."""

    def __init__(self):
        self.inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)])


class Touchy(nn.Module):
    """A layer of attention whose passes change all that a module can hold, its input, and all global generators."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH, max_norm=0.5)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.2, batch_first=True)
        self.calls, self.seen, self.moving = 0, [], torch.zeros(())
        self.generators = nn.Identity()
        self.generators.torch, self.generators.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.generators.python = random.Random(1)

    def forward(self, x_BND, ids_BN):
        self.calls += 1
        self.seen.append(len(ids_BN))
        self.moving += x_BND.detach().mean()
        own = self.generators
        drawn = random.random() + np.random.rand() + own.numpy.random() + own.python.random()
        drawn = drawn + torch.rand((), generator=own.torch)
        x_BND += self.position  # as the caller sees it
        # a result that differed from call to call would be refused
        return self.layer(x_BND + 0.1 * self.embedding(ids_BN) + 0 * drawn) + 0 * (self.calls + len(self.seen))


def touchy():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = Touchy()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def train_touchy(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, TOKENS, WIDTH), torch.randint(LETTERS, (2, TOKENS))).square().mean().backward()
        optimizer.step()


def state_of_touchy(model):
    own = model.generators
    generators = [np.random.get_state(), random.getstate(), own.numpy.bit_generator.state, own.python.getstate()]
    tensors = model.state_dict(), model.moving, torch.get_rng_state(), own.torch.get_state()
    return tensors, (model.calls, model.seen, str(generators))


def test_all_that_a_pass_changes_is_put_back(tmp_path):
    model, optimizer = touchy()
    train_touchy(model, optimizer, 6)
    alone, numbers = state_of_touchy(model)
    model, optimizer = touchy()
    x_BND, ids_BN = torch.ones(3, TOKENS, WIDTH), torch.zeros(3, TOKENS, dtype=torch.long)
    with rb.observe(model, (x_BND, ids_BN), optimizer, every=2, out=tmp_path / "a") as watch:
        train_touchy(model, optimizer, 6)
    torch.testing.assert_close(state_of_touchy(model)[0], alone, rtol=0, atol=0)
    assert state_of_touchy(model)[1] == numbers
    assert (x_BND == 1).all() and (watch.subject.example.args[0] == 1).all()
    assert watch.table("states").step.unique().tolist() == [0, 2, 4, 6]


@pytest.mark.further
def test_users_hooks_see_the_training_alone(tmp_path, inputs, caplog):
    """torch's own hooks, which make a weight, are called all the same: without them it would be out of date."""
    counts = Counter()

    def count(where):
        return lambda *_: counts.update([where])

    model, optimizer = model_and_optimizer()
    nn.utils.spectral_norm(model.head)
    model.encoder.register_forward_hook(count("after"))
    model.encoder.layers[0].register_forward_pre_hook(partial(count("before")))
    everywhere = nn.modules.module.register_module_forward_hook(count("all"))
    try:
        train(model, optimizer, 2)
        alone = Counter(counts)
        with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a") as watch:
            assert counts == alone
            train(model, optimizer, 2)
        assert {where: 2 * number for where, number in alone.items()} == counts
        message = "leave out the forward hooks of every module, encoder, encoder.layers.0; if these change what"
        assert message in caplog.text
    finally:
        everywhere.remove()
    norms = watch.table("weights").query("step == 2 and parameter == 'head.weight_orig'").spectral_norm
    assert norms.item() == pytest.approx(torch.linalg.matrix_norm(model.head.weight_orig, 2).item(), rel=1e-5)
    assert len(model.head._forward_pre_hooks) == 1


@pytest.mark.further
def test_a_hook_that_changes_the_states_counts_where_asked(tmp_path, inputs):
    model, _ = model_and_optimizer()
    model.encoder.layers[1].register_forward_hook(lambda module, args, output: torch.ones_like(output))
    residuals = []
    for hooks in (False, True):
        with rb.observe(model, inputs, out=tmp_path / str(hooks), hooks=hooks) as watch:
            residuals.append(watch.table("states").query("view == 'all' and layer == 2").relative_residual.item())
    assert residuals[0] > 0.1 and residuals[1] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it meets in torch
def test_a_compiled_training_is_compiled_once(tmp_path, inputs):
    """The whole step, with the optimiser in it."""
    numbers, ends = [], []
    for watched in (False, True):
        torch.compiler.reset()
        graphs = []
        model, optimizer = model_and_optimizer()
        backend = lambda graph, _, graphs=graphs: graphs.append(graph) or graph.forward  # noqa: E731
        compiled = torch.compile(partial(train, model, optimizer, 1), backend=backend)
        context = rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a") if watched else nullcontext()
        with context as watch:
            for _ in range(3):
                compiled()
        numbers.append(len(graphs))
        ends.append(state(model))
    assert numbers[0] == numbers[1] > 0
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    assert watch.table("steps").step.tolist() == [0, 1, 2, 3]


@pytest.mark.further
def test_an_optimizer_that_a_library_wraps_is_counted(tmp_path, inputs):
    model, optimizer = model_and_optimizer()
    wrapped = Wrapped(Wrapped(optimizer))
    with rb.observe(model, inputs, wrapped, every=2, out=tmp_path / "a") as watch:
        train(model, wrapped, 4)
    assert watch.table("steps").step.tolist() == [0, 2, 4]
    train(model, wrapped, 2)
    assert watch.num_steps == 4


def test_a_full_disk_is_logged_once_and_the_watch_recovers(tmp_path, inputs, caplog, monkeypatch):
    model, optimizer = model_and_optimizer()
    write = files.os.fsync

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a") as watch:
        train(model, optimizer, 1)
        add, calls = StepsFile.add, []
        # the second table of step 2 is cut off; from then on nothing can be written at all
        monkeypatch.setattr(StepsFile, "add", lambda *args: refuse() if calls else (calls.append(1), add(*args)))
        train(model, optimizer, 1)
        monkeypatch.setattr(files.os, "fsync", refuse)
        train(model, optimizer, 1)
        monkeypatch.setattr(StepsFile, "add", add)
        monkeypatch.setattr(files.os, "fsync", write)
        train(model, optimizer, 1)
        assert watch.table("steps").step.tolist() == watch.table("weights").step.unique().tolist() == [0, 1, 4]
        assert watch.table("states").step.unique().tolist() == [0, 1, 4]
        monkeypatch.setattr(files.os, "fsync", refuse)  # and at the end
    warnings = [record.message for record in caplog.records if "No space left" in record.message]
    assert ["step 2 is not written" in warnings[0], "the number of steps" in warnings[1]] == [True, True]
    assert len([text for text in warnings if "is not written, and" in text]) == 1


def test_a_removed_folder_ends_the_watch_alone(tmp_path, inputs, caplog):
    model, optimizer = model_and_optimizer()
    with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a"):
        shutil.rmtree(tmp_path / "a")
        train(model, optimizer, 2)
        (tmp_path / "a").mkdir()  # by another training, say
        train(model, optimizer, 2)
    assert list((tmp_path / "a").iterdir()) == []
    warnings = [record.message.partition(": ")[2] for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["the folder was removed, so nothing more is written; the training goes on"]


@pytest.mark.further
def test_another_working_folder_changes_nothing(tmp_path, inputs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, optimizer = model_and_optimizer()
    (tmp_path / "other").mkdir()
    with rb.observe(model, inputs, optimizer, every=1, out="a"):
        os.chdir("other")
        train(model, optimizer, 2)
    assert rb.Run(tmp_path / "a").table("observed_steps").step.tolist() == [0, 1, 2]
    assert list((tmp_path / "other").iterdir()) == [] and (tmp_path / "a" / "observed_states.png").exists()


def train_one_of_two(rank, place, out):
    """A process of a data-parallel training on the CPU. out: folder of its watch; None: it has none. Leaves its weights
    and the refusal of its watch, if there is one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    model, _ = model_and_optimizer()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer, watch = torch.optim.Adam(parallel.parameters(), 1e-2), nullcontext()
    torch.manual_seed(rank)
    if out is not None:
        try:
            watch = rb.observe(parallel, torch.arange(TOKENS).repeat(2, 1), optimizer, every=2, out=out)
        except rb.ConfigError as error:
            (place / f"refused {rank}").write_text(str(error))
    torch.distributed.barrier()
    with watch:
        train(parallel, optimizer, 6)
    torch.save(model.state_dict(), place / f"{rank}.pt")
    torch.distributed.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("outs", [("a", "b"), ("a", "a")], ids=["two folders", "one folder"])
def test_two_processes_of_one_training_with_a_watch_each(outs, tmp_path, monkeypatch):
    """They end as without; in one folder one of them writes, and the other is refused in a line."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    weights = {}
    for name in ("alone", "watched"):
        (place := tmp_path / name).mkdir()
        watched = [place / out if name == "watched" else None for out in outs]
        calls = [partial(train_one_of_two, rank, place, out) for rank, out in enumerate(watched)]
        with ExitStack() as stack:
            both = [fork(call, at=place, errors=place / f"errors {rank}") for rank, call in enumerate(calls)]
            for process in map(stack.enter_context, both):
                assert process.wait() == 0, process.last_line
        weights[name] = [torch.load(place / f"{rank}.pt") for rank in range(2)]
    torch.testing.assert_close(weights["watched"], weights["alone"], rtol=0, atol=0)
    refused = [path.read_text() for path in tmp_path.glob("watched/refused *")]
    tables = [pd.read_csv(tmp_path / "watched" / out / "observed_states.csv") for out in dict.fromkeys(outs)]
    assert [table.step.unique().tolist() for table in tables] == [[0, 2, 4, 6]] * len(tables)
    assert len(refused) == 2 - len(tables) and all("another process is writing there" in line for line in refused)


@pytest.mark.further
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_writes_nothing(tmp_path, inputs):
    model, optimizer = model_and_optimizer()
    watch = rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a")
    train(model, optimizer, 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    if (child := os.fork()) == 0:
        status = 1
        try:
            with watch:
                optimizer.step()  # a backward pass may wait for threads that a fork has not copied
                watch.measure()
                watch.draw()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    if (sleeper := os.fork()) == 0:  # as a worker of a loader that outlives the watch
        signal.pause()
    try:
        train(model, optimizer, 1)
        watch.close()
        with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a") as again:
            assert again.num_steps == 2
    finally:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)


@pytest.mark.further
def test_after_an_exception_the_steps_are_those_that_were_made(tmp_path, inputs):
    model, optimizer = interrupted(tmp_path / "a", inputs, 5)
    (row,) = rb.Run(tmp_path / "a").summary()["seeds"]
    assert row["steps"] == 5
    with rb.observe(model, inputs, optimizer, every=2, out=tmp_path / "a") as watch:
        assert watch.num_steps == 5
        train(model, optimizer, 1)
    assert watch.table("steps").step.tolist() == [0, 2, 4, 6]
    watch.step()  # after the end
    assert rb.Run(tmp_path / "a").table("observed_steps").step.tolist() == [0, 2, 4, 6]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"inputs": None}, "observe: inputs hold no tensor; give a tensor"),
        ({"every": 0}, "observe: every=0: out of range; allowed are whole numbers from 1"),
        ({"every": 2.5}, "observe: every=2.5"),
        ({"sequences": 0}, "observe: sequences=0"),
        ({"step": -1}, "observe: step=-1"),
        ({"measures": ["weight"]}, "measures=weight.*did you mean weights"),
        ({"optimizer": "adam"}, "observe: optimizer is a str, not a torch.optim.Optimizer; .* call watch.step"),
        (
            {"optimizer": Wrapped("adam")},
            "observe: optimizer is a Wrapped, without hooks; leave it out and call watch.step",
        ),
        ({"optimizer": Holder()}, r"optimizer is a Holder, not a torch.optim.Optimizer; give its \.inner, or leave it"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)},
            "observe: optimizer holds none of the model's parameters, so its steps do not train this model",
        ),
        ({"out": 3}, "observe: out=3: is of type int; give a text, a path or None"),
        ({"seed": "x"}, "observe: seed='x': is of type str; give a whole number"),
        ({"name": 3}, "observe: name=3: is of type int; give a text or None"),
        ({"measures": "states"}, "observe: measures='states': is of type str; give a list of texts"),
        ({"model": torch.ones(2)}, "observe: model is a Tensor; give a torch.nn.Module"),
        ({"model": nn.ReLU()}, "observe: ReLU has no parameters"),
        ({"inputs": torch.full((2, 3), LETTERS)}, "model=LanguageModel: does not run on inputs=probe .*index"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_a_line(tmp_path, inputs, arguments, message):
    arguments = {"model": LanguageModel(), "inputs": inputs, "out": tmp_path / "new"} | arguments
    with pytest.raises(rb.ConfigError, match=message) as caught:
        rb.observe(arguments.pop("model"), arguments.pop("inputs"), **arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_model_whose_output_cannot_be_read_is_watched_without_its_states(tmp_path, inputs, caplog):
    class Sparse(LanguageModel):
        def forward(self, ids):
            logits = super().forward(ids)
            return logits if self.training else logits.to_sparse()

    with rb.observe(Sparse(), inputs, out=tmp_path / "run") as watch:
        assert len(watch.table("weights"))
    assert "observed_states is left out: " in caplog.text and "observed_attention is left out: " in caplog.text


def test_a_model_that_runs_only_once_in_eval_mode_is_refused(tmp_path, inputs):
    class Once(LanguageModel):
        def forward(self, ids):
            logits = super().forward(ids)
            if not self.training:
                self.embedding = None
            return logits

    with pytest.raises(rb.ConfigError, match="does not run on inputs=probe"):
        rb.observe(Once(), inputs, out=tmp_path / "run")


class Scaled(nn.Linear):
    def forward(self, x, scale):
        return scale * super().forward(x)


def test_numbers_among_the_inputs_tell_watches_apart(tmp_path):
    watch = partial(rb.observe, Scaled(2, 2), measures=["weights"], out=tmp_path / "a")
    watch({"x": torch.ones(2, 3, 2), "scale": torch.tensor(1.0)}).close()
    with pytest.raises(rb.ConfigError, match=r"was begun with observe\.inputs="):
        watch({"x": torch.ones(2, 3, 2), "scale": torch.tensor(2.0)})


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused(tmp_path):
    with pytest.raises(rb.ConfigError, match="TorchScript, which cannot be followed"):
        rb.observe(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), torch.ones(2, 2), out=tmp_path / "new")


@pytest.mark.further
def test_a_folder_of_something_else_is_refused(tmp_path, inputs):
    folder = tmp_path / "a"
    interrupted(folder, inputs, 2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for inputs_now, keys, message in (
        (inputs + 0, {"seed": 1}, r"out=.*: was begun with seed=0, not 1"),
        (inputs + 0, {"sequences": 2}, "was begun with observe.sequences=5, not 2"),
        (1 - inputs.clamp(max=1), {}, "was begun with observe.inputs="),
        (inputs, {"name": "other"}, "was begun with model.name=LanguageModel, not other"),
    ):
        with pytest.raises(rb.ConfigError, match=message):
            rb.observe(LanguageModel(), inputs_now, out=folder, **keys)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("task: {name: sorting}\n")
    with pytest.raises(rb.ConfigError, match="run: a run of another kind; give a new folder"):
        rb.observe(LanguageModel(), inputs, out=tmp_path / "run")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("")
    with pytest.raises(rb.ConfigError, match="holds files of something other than a watched"):
        rb.observe(LanguageModel(), inputs, out=tmp_path / "thesis")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]
    with rb.observe(LanguageModel(), inputs, out=folder), pytest.raises(rb.ConfigError, match="another process"):
        rb.observe(LanguageModel(), inputs, out=folder)
    assert all((folder / name).read_bytes() == text for name, text in before.items() if name.endswith(".csv"))


def test_a_folder_with_hidden_files_alone_is_a_new_one(tmp_path):
    (tmp_path / ".DS_Store").write_text("")
    rb.observe(nn.Linear(3, 3), torch.ones(2, 3), measures=["weights"], out=tmp_path).close()
    assert rb.Run(tmp_path).status == "finished"


def test_a_table_takes_the_columns_that_later_rows_add(tmp_path):
    table = Table(tmp_path / "observed_states.csv", upto=-1)
    table.add([{"step": 0, "a": 1.5}])
    table.add([{"step": 1, "a": 2.5, "b": 3.5}])
    assert read_table(table.path).fillna(0).to_dict("list") == {"step": [0, 1], "a": [1.5, 2.5], "b": [0, 3.5]}


# --- what is measured ------------------------------------------------------------------------------------------------


class OneModule(nn.Module):
    """Two attentions without a submodule of their own."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, x_BND):
        for weight in self.maps:
            q = (x_BND @ weight)[:, None]
            x_BND = x_BND + nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]
        return x_BND


def test_without_layers_attention_and_weights_are_measured(tmp_path, caplog):
    with rb.observe(OneModule(), torch.randn(2, 3, WIDTH), every=1, out=tmp_path / "a") as watch:
        watch.step()
        watch.step()
    assert [record.message for record in caplog.records if "left out" in record.message] == [
        "observed_states is left out: OneModule: the attention calls of depth 1 have no submodule of their own that "
        "returns states of the same shape (B, N, D) as its input; put each layer into a submodule; name its layers: "
        "layers=[<submodule>,...]"
    ]
    assert not (tmp_path / "a" / "observed_states.csv").exists()
    assert watch.table("attention").groupby("step").size().tolist() == [2, 2, 2]
    assert set(watch.table("weights").parameter) == {"maps.0", "maps.1"}
    with rb.observe(nn.Linear(3, 3), torch.ones(2, 3), out=tmp_path / "b") as watch:
        assert len(watch.table("weights")) == 1


@pytest.mark.further
def test_a_training_that_diverges_goes_on(tmp_path, inputs, caplog):
    model, optimizer = model_and_optimizer()
    with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a") as watch:
        train(model, optimizer, 1)
        with torch.no_grad():
            model.embedding.weight.fill_(math.nan)
        train(model, optimizer, 1)
    assert watch.table("states").step.max() == 1 and watch.table("steps").step.max() == 2
    assert "step 2 has no rows in observed_states: NotFinite: x_BND: got" in caplog.text
    norms = watch.table("weights").query("step == 2").set_index("parameter").spectral_norm
    assert math.isnan(norms["embedding.weight"])


def test_a_measurement_that_fails_does_not_end_the_training(tmp_path, inputs, caplog):
    def fail(module, args):
        if not module.training:
            raise RuntimeError("no memory")

    model, optimizer = model_and_optimizer()
    with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a", hooks=True) as watch:
        hook = model.encoder.register_forward_pre_hook(fail)
        train(model, optimizer, 1)
        hook.remove()
        train(model, optimizer, 1)
    assert "step 1 has no rows in observed_states: RuntimeError: no memory" in caplog.text
    assert watch.table("states").step.unique().tolist() == [0, 2]
    assert model.training and not model.encoder.layers[0].norm1.training
    model.encoder.register_forward_pre_hook(fail)
    with pytest.raises(rb.ConfigError, match="does not run on inputs=probe"):  # before it begins, it is refused
        rb.observe(model, inputs, out=tmp_path / "b", hooks=True)


def test_no_activation_is_held(tmp_path, inputs):
    model, optimizer = model_and_optimizer()
    alive = []

    def hold(module, args, output):
        alive.extend(weakref.ref(x) for x in (output if isinstance(output, tuple) else (output,)) if x is not None)

    with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a", hooks=True) as watch:
        for module in model.modules():
            module.register_forward_hook(hold)
        watch.step()
        gc.collect()
        assert alive and not [x for x in alive if x() is not None]
        kept = [x for x in watch.subject.example.tensors]
        assert [x.untyped_storage().nbytes() for x in kept] == [inputs.nbytes]  # the inputs alone


def test_the_batch_behind_the_probe_is_not_held(tmp_path):
    batch = torch.randint(LETTERS, (1000, TOKENS))
    watch = rb.observe(LanguageModel(), {"ids_BN": batch}, out=tmp_path / "a", sequences=2)
    assert [x.untyped_storage().nbytes() for x in watch.subject.example.tensors] == [2 * TOKENS * 8]
    watch.close()


@pytest.mark.further
def test_weights_in_bfloat16_are_measured_in_float32(tmp_path, inputs):
    model, _ = model_and_optimizer()
    tables = {}
    for name, network in (("full", model), ("half", deepcopy(model).bfloat16())):
        with rb.observe(network, inputs, out=tmp_path / name) as watch:
            tables[name] = watch.table("states"), watch.table("attention")
    (full, heads), (half, heads_of_half) = tables["full"], tables["half"]
    assert set(half.dtype) == {"bfloat16"}
    np.testing.assert_allclose(half.relative_residual, full.relative_residual, rtol=0.05)  # 8 bits through two layers
    np.testing.assert_allclose(heads_of_half.attention_entropy, heads.attention_entropy, rtol=0.02)
    assert (half.relative_noise_floor > 2**-8).all() and (full.relative_noise_floor < 1e-4).all()


@pytest.mark.further
def test_compiled_and_wrapped_models_are_measured_as_they_are(tmp_path, inputs):
    calls = []

    def counting(graph, _):
        calls.append(graph)
        return graph.forward

    model, _ = model_and_optimizer()
    plain = rb.observe(model, inputs, out=tmp_path / "plain")
    compiled = rb.observe(torch.compile(model, backend=counting), inputs, out=tmp_path / "compiled")
    wrapped = rb.observe(nn.DataParallel(model), inputs, out=tmp_path / "wrapped")
    assert not calls
    for watch in (compiled, wrapped):
        for name in TABLES[:3]:
            pd.testing.assert_frame_equal(watch.table(name).iloc[:, 1:], plain.table(name).iloc[:, 1:])
    for watch in (plain, compiled, wrapped):
        watch.close()


# --- the folder afterwards -------------------------------------------------------------------------------------------


@pytest.mark.further
def test_a_report_draws_watched_trainings(tmp_path, inputs, monkeypatch):
    facets = []
    for name, figure in OBSERVED_FIGURES.items():
        monkeypatch.setitem(
            FIGURES, name, lambda rows, facet=None, draw=figure: facets.append(facet) or draw(rows, facet)
        )
    for seed in (0, 1):
        model, optimizer = model_and_optimizer(seed)
        with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / f"runs/{seed}", seed=seed):
            train(model, optimizer, 2)
    gather(find_runs(str(tmp_path / "runs")), tmp_path)
    assert facets[-3:] == [None, None, None]  # one configuration, two seeds
    interrupted(tmp_path / "runs/2", inputs, 2)
    assert {path.name for path in (tmp_path / "runs/0").glob("*.png")} == {f"{name}.png" for name in OBSERVED_FIGURES}
    (tmp_path / "report").mkdir()
    lines = gather(find_runs(str(tmp_path / "runs")), tmp_path / "report")
    assert lines[0] == "3 jobs, 2 finished, 1 interrupted"
    assert facets[-3:] == ["run", "run", "run"]  # run 2 has the seed of run 0 and may differ in what no config says
    for name in OBSERVED_FIGURES:
        assert any((tmp_path / "report").glob(f"{name}*.svg"))
        joined = read_table(tmp_path / "report" / f"{name}.csv")
        assert joined.groupby("run").step.max().tolist() == [2, 2, 2]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "observed_attention.csv" in page


def test_a_watched_training_is_no_run_to_analyse(tmp_path, inputs):
    interrupted(tmp_path / "a", inputs, 2)
    for read in (rb.load, rb.analyze):
        with pytest.raises(rb.ConfigError, match=r"watched by .*, whose network is not here; `rankbench report runs="):
            read(tmp_path / "a")
    assert rb.load_sweep(tmp_path / "a").table("observed_weights").step.max() == 2


def test_the_tables_of_a_watch_are_drawn_as_the_command_draws_them(tmp_path, inputs):
    interrupted(tmp_path / "a", inputs, 2)
    watched = rb.Run(tmp_path / "a")
    for name, figure in OBSERVED_FIGURES.items():
        labels, wanted = (
            [axes.get_ylabel() for axes in drawn.axes]
            for drawn in (rb.plot(watched.table(name)), figure(watched.table(name)))
        )
        assert labels == wanted
    with pytest.raises(rb.ConfigError, match=r"^analysis=observed_steps: has no figure; allowed are .*observed_states"):
        rb.plot(watched.table("observed_steps"))


@pytest.mark.further
def test_watching_loads_neither_hydra_nor_the_compiler_nor_transformers():
    """Nor do random rounding, which every measurement does, and what reads pretrained checkpoints: each of the three
    takes a second."""
    program = """
import sys, torch, rankbench
from rankbench.measures.rounding import RandomRounding

rankbench.observe
with RandomRounding(torch.Generator()):
    torch.ones(2).exp()
print([name for name in ("hydra", "torch._dynamo") if name in sys.modules])
import rankbench.model.pretrained
print("transformers" in sys.modules)
"""
    assert python("-c", program).stdout == "[]\nFalse\n"


def test_measuring_that_costs_much_is_a_warning(tmp_path, inputs, caplog):
    model, optimizer = model_and_optimizer()
    with rb.observe(model, inputs, optimizer, every=1, out=tmp_path / "a"):
        train(model, optimizer, 2)
    (record,) = [record for record in caplog.records if "measuring took" in record.message]
    assert record.levelno == logging.WARNING and "every=1, sequences=5" in record.message


# --- the examples of the documents -----------------------------------------------------------------------------------


def blocks():
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "PYTHON.md").read_text(), re.DOTALL | re.MULTILINE)[2:]


def test_the_documented_loop_runs(tmp_path, monkeypatch, inputs):
    monkeypatch.chdir(tmp_path)
    model, optimizer = model_and_optimizer()
    batches = [(torch.randint(LETTERS, (4, TOKENS)), torch.randint(LETTERS, (4, TOKENS))) for _ in range(3)]
    names = {"rb": rb, "model": model, "inputs": inputs, "optimizer": optimizer, "batches": batches}
    names["loss_of"] = lambda outputs, targets: nn.functional.cross_entropy(outputs.mT, targets)
    exec(blocks()[0].replace("every=100", "every=1"), names)
    assert rb.Run(Path("outputs/observe/mine")).table("observed_steps").step.tolist() == [0, 1, 2, 3]


@pytest.mark.further
def test_the_documented_callback_watches_a_trainer(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    monkeypatch.chdir(tmp_path)
    config = transformers.BertConfig(
        vocab_size=LETTERS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    ids_BN = torch.randint(LETTERS, (32, TOKENS))
    names = {"rb": rb, "inputs": {"input_ids": ids_BN[:4], "attention_mask": torch.ones_like(ids_BN[:4])}}
    exec(blocks()[1].replace("every=100", "every=2"), names)
    for last, resumed in ((4, None), (8, "trained/checkpoint-4")):
        settings = {"max_steps": last, "save_steps": 4, "per_device_train_batch_size": 4, "report_to": []}
        arguments = transformers.TrainingArguments("trained", use_cpu=True, disable_tqdm=True, **settings)
        texts = [{"input_ids": ids_N, "labels": ids_N} for ids_N in ids_BN]
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, callbacks=[names["Watch"]()])
        trainer.train(resume_from_checkpoint=resumed)
    run = rb.Run(Path("outputs/observe/bert"))
    assert run.table("observed_steps").step.tolist() == [0, 2, 4, 6, 8]
    layers = [f"bert.encoder.layer.{number}" for number in (0, 1)]
    assert run.table("observed_states").submodule.dropna().unique().tolist() == layers

"""Training, analyses and benchmarks on a device that is not the CPU: a pretend one, and where there is one a GPU.

A test that takes `device` runs on both; `pytest -m gpu` (`make test-gpu`) runs the latter. On the pretend device the
numbers are the CPU's own, and what is tested is where tensors lie and when the host waits.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import test_combinations as combinations
import torch
from benchmarks import bench, card, check
from benchmarks.config import config_of
from interrupted import contents, during_step
from pretend_device import Counts, pretending, registered

import rankbench.model.weightings
from rankbench.analyses import ANALYSES
from rankbench.analysing.runner import check_analyses, options_of
from rankbench.analysing.subjects import fresh_subjects, subjects_of_run
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.model.linear import largest_pair
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.tasks import build_task
from rankbench.training.compiling import choose_step
from rankbench.training.layers import dynamics
from rankbench.training.loop import train
from rankbench.training.pieces import clipped
from rankbench.training.seeds_side_by_side import SUMS, Training

pytestmark = pytest.mark.pretend

needs_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu"),
)
TINY = ["model.layers=2", "model.width=6", "model.heads=2", "task.length=4", "task.train_size=32", "task.test_size=16"]
TINY += ["trainer.batch_size=8", "trainer.steps=6", "trainer.eval_every=3", "trainer.checkpoint_every=2", "replicas=2"]
CLOCKS = ["seconds", "seconds_dot", "tokens_per_second", "microseconds_per_token"]
# Of the analyses: differences of numbers that agree up to rounding, and what depends on the order of near ties.
NOISE = ["disagreement", "log10_measured", "remainder", "information_ksg", "below_floor", "noise_floor"]
EXACT = {"rtol": 1e-9, "atol": 1e-9}  # float64: some thousand roundings of 1e-16, enlarged by cancellation


@pytest.fixture(params=["pretended", pytest.param("real", marks=needs_gpu)])
def device(request, monkeypatch) -> Callable[[], contextlib.AbstractContextManager]:
    """A context manager in which device=cuda computes on the device."""
    # the CPU's own softmax of short rows rounds otherwise
    monkeypatch.setattr(rankbench.model.weightings, "SHORT_ROW", 0)
    if request.param == "real":
        return contextlib.nullcontext
    registered()  # autograd counts the devices when a process first asks for a gradient
    return pretending


def same(table: pd.DataFrame, wanted: pd.DataFrame, tolerance: dict = EXACT, leave_out: list[str] = CLOCKS) -> None:
    """Compare two tables without their clocks."""
    tables = [rows.reset_index(drop=True).drop(columns=leave_out, errors="ignore") for rows in (table, wanted)]
    pd.testing.assert_frame_equal(*tables, check_dtype=False, **tolerance)


def trained(folder, *words: str, where: str = "cuda") -> Run:
    run = Run(folder / where)
    train(compose("train", *TINY, *words, f"device={where}"), run)
    return run


# --- the pretend device itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda x: x + torch.ones(3), "two devices"),
        (lambda x: torch.ones(3).add_(x), "two devices"),
        (lambda x: torch.stack([x, torch.ones(3)]), "two devices"),
        (lambda x: torch.vmap(lambda row: row + torch.ones(3))(x[None]), "two devices"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: np.asarray(x), "numpy"),
        (lambda x: x.uniform_(generator=torch.Generator()), "generator"),
        (lambda x: x[None].long() @ x.long()[:, None], "int64"),
    ],
)  # fmt: skip
def test_what_cuda_refuses_is_refused(work, why):
    with pretending(), pytest.raises((RuntimeError, TypeError, NotImplementedError), match=why):
        work(torch.ones(3, device="cuda"))


def test_its_tensors_are_cudas_and_compute():
    with pretending():
        x = torch.arange(3.0, device="cuda", requires_grad=True)
        assert x.device == torch.device("cuda:0") and x.is_cuda and not x.cpu().is_cuda
        (gradient,) = torch.autograd.grad((x * torch.tensor(2.0) + torch.ones_like(x)).square().sum(), x)
        assert gradient.tolist() == [4.0, 12.0, 20.0]
        assert torch.func.jacrev(torch.square)(x).diagonal().tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("work", "waits"),
    [
        (lambda x: x * 2, 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: bool((x > 0).all()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x[[0, 1]], 1),
        (lambda x: x.cpu(), 1),
        (lambda x: torch.ones(3).to("cuda"), 1),
        (lambda x: torch.ones(3).to("cuda", non_blocking=True), 0),
        (lambda x: torch.tensor([1.0], device="cuda"), 1),
        (lambda x: torch.linalg.svdvals(x[None]), 1),
    ],
)
def test_waits_are_counted(work, waits):
    with pretending() as counts:
        x = torch.ones(3, device="cuda")
        work(x)
    assert counts.waits.total() == waits


# --- training --------------------------------------------------------------------------------------------------------

CORPUS = ["task=char_lm", "task.length_limit=8", "task.valid_size=4", "model.mask=causal", "~task.length"]
STEPS = {
    "dropout": ["model.positions=sinusoidal", "model.dropout=0.1", "trainer.accumulate=2", "trainer.clip=0.5"],
    "fresh sequences": ["task.train_size=null"],
    "contractive, padded": ["task=memorization", "model=contractive_l2", "task.vocabulary=9", "~task.test_size"],
    "corpus": CORPUS,
}
START = ["task.start_points=4", "task.start_dimension=3", "task.curriculum_every=null", "model.mask=causal"]
MORE_STEPS = {
    "lstm": ["model=lstm", "~model.heads"],
    "contractive": ["model=contractive_l2"],
    "sigma": ["model.weight_norm=sigma"],
    "causal": ["model=causal"],
    "window": ["model.mask=window", "model.window=1"],
    "others": ["model.mask=others"],
    "no norm": ["model=transformer_no_norm"],
    "rms": ["model.norm_kind=rmsnorm"],
    "l2norm": ["model.norm_kind=l2norm"],
    "cosine": ["model=cosine"],
    "l2": ["model=l2"],
    "mix": ["model.mix_identity=0.1", "model.mix_uniform=-0.5"],
    "groups": ["model.kv_groups=1"],
    "latent": ["model.latent_width=3"],
    "long": ["task.length=100"],
    "heads of width 1": ["model.head_width=1"],
    "sgd": ["optimizer=sgd"],
    "embedding norm": ["model.embedding_norm=true"],
    "padded": ["task=memorization", "task.vocabulary=9", "~task.test_size"],
    "regression": ["task=linear_regression", "~task.length", "task.points=4", "task.dimension=3", *START],
    "nearest": ["task=nearest_neighbor", "~task.length", "task.points=4", "task.dimension=6", "model.read_in=identity"],
}  # fmt: skip


def step_words(name: str) -> list[str]:
    words = {**STEPS, **MORE_STEPS}[name]
    gone = {word[1:] for word in words if word[0] == "~"}
    return [word for word in TINY if word.partition("=")[0] not in gone] + [word for word in words if word[0] != "~"]


def training_of(*words: str, step: str | None = None) -> Training:
    cfg = compose("train", *words, "device=cuda", "trainer.batch_size=8")
    return Training(cfg, build_task(cfg.task), Machine.prepare(cfg), list(range(cfg.replicas)), step)


def counts_of_a_step(*words: str, step: str | None = None) -> Counts:
    """What the third step costs: the first ones also draw the epoch's order and build the optimizer's state, and a
    graph is recorded."""
    with pretending() as counts:
        training = training_of(*words, step=step)
        for _ in range(3):
            counts.operations.clear()
            counts.waits.clear()
            training.update()
    return counts


@pytest.mark.parametrize("name", [*STEPS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_STEPS)])
def test_a_step_never_waits_for_the_device(name):
    counts = counts_of_a_step(*step_words(name))
    assert counts.operations.total() > 50
    assert not counts.waits


def test_a_step_costs_the_same_operations_for_any_number_of_seeds():
    operations = {
        (seeds, rate): counts_of_a_step(*TINY, f"replicas={seeds}", f"model.dropout={rate}").operations.total()
        for seeds in (2, 9)
        for rate in (0.0, 0.1)
    }
    assert operations[2, 0.0] == operations[9, 0.0] and operations[2, 0.1] == operations[9, 0.1]
    # a mask costs a product forward and one backward; all masks are drawn by a score of operations
    assert operations[9, 0.1] - operations[9, 0.0] < 60


# float32 has these digits exactly, as the learning rate of a graph is a float32
EXACT_RATE = ["optimizer.lr=0.0009765625", "precision=fp64"]


def graph_beside_plain(*words: str) -> tuple[Training, Training]:
    """The same training by graphs and kernel by kernel."""
    return training_of(*words, *EXACT_RATE, step="graph"), training_of(*words, *EXACT_RATE, step="plain")


def same_training(graph: Training, plain: Training) -> None:
    for name, weight in plain.weights().items():
        torch.testing.assert_close(graph.weights()[name], weight, **EXACT)
    for key in SUMS:
        torch.testing.assert_close(graph.sums[key], plain.sums[key], equal_nan=True, **EXACT)


@pytest.mark.parametrize("name", [*STEPS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_STEPS)])
def test_a_graph_takes_the_same_steps(device, name):
    with device():
        graph, plain = graph_beside_plain(*step_words(name), "optimizer.schedule=linear")
        for _ in range(5):  # of one shape: as it is, recorded, and three times replayed
            graph.update()
            plain.update()
        assert not graph.graphs.refused and len(graph.graphs._graphs) == 1
        same_training(graph, plain)


def test_each_shape_of_batch_has_its_graph(device):
    with device():
        graph, plain = graph_beside_plain(*TINY, "task.train_size=20")  # batches of 8, 8 and 4
        for _ in range(9):
            graph.update()
            plain.update()
        assert len(graph.graphs._graphs) == 2
        same_training(graph, plain)


def test_seeds_that_leave_take_their_graphs_along(device):
    with device():
        graph, plain = graph_beside_plain(*TINY, "replicas=3", "trainer.steps=20")
        for training in (graph, plain):
            for step in range(8):
                if step == 4:
                    training.evaluate()
                    training.retire([{"seed": 1, "split": "test", "loss": float("nan"), "accuracy": 0.0}])
                training.update()
        assert graph.progress.training == [0, 2] and len(graph.graphs._graphs) == 1
        same_training(graph, plain)


def test_a_replayed_step_launches_a_score_of_kernels_and_waits_for_none():
    counts = counts_of_a_step(*TINY, *EXACT_RATE, "model.dropout=0.1", step="graph")
    assert counts.operations.total() < 20 and not counts.waits


def test_work_that_waits_is_done_without_a_graph(caplog, device, monkeypatch):
    def waits(x_SOI: torch.Tensor, largest: float) -> torch.Tensor:
        return clipped(x_SOI, largest if x_SOI[0].sum().item() else 0.0)

    monkeypatch.setattr("rankbench.training.seeds_side_by_side.clipped", waits)
    with device(), caplog.at_level("INFO"):
        graph, plain = graph_beside_plain(*TINY, "trainer.clip=0.5")
        for _ in range(4):
            graph.update()
            plain.update()
        same_training(graph, plain)
    assert graph.graphs.refused
    assert caplog.text.count("launched kernel by kernel, as CUDA cannot record them") == 1


@pytest.mark.parametrize(
    ("words", "step", "why"),
    [
        (["trainer.steps=600"], "graph", ""),
        (["trainer.steps=599"], "plain", "599 steps do not repay"),
        (["trainer.steps=600", "trainer.compile=false"], "plain", ""),
        (["trainer.compile=true"], "compiled graph", ""),
        (["trainer.steps=600", "optimizer=muon"], "plain", "does not cover optimizer.name=muon"),
        (["trainer.steps=600", "optimizer.cap=1.0"], "plain", "does not cover optimizer.cap=1.0"),
        (["trainer.compile=true", "optimizer.cap=1.0"], "torch.compile", ""),
    ],
)
def test_long_trainings_there_replay_graphs(words, step, why, caplog):
    with pretending(), caplog.at_level("INFO"):
        cfg = compose("train", *TINY, *words, "device=cuda")
        assert choose_step(cfg, build_task(cfg.task), Machine.prepare(cfg)) == step
    assert why in caplog.text


def test_an_evaluation_copies_once_and_a_checkpoint_each_tensor_once(tmp_path):
    with pretending() as counts:
        training = training_of(*TINY)
        training.update()
        counts.waits.clear()
        training.evaluate()
        assert counts.waits == {"synchronize": 1, "to the host": 1}
        counts.waits.clear()
        training.save(Run(tmp_path))
        copied = len(training.parameters) * 4 + 4  # weight, two moments and a number of steps; the sums
        assert counts.waits == {"to the host": copied}


@pytest.mark.slow
def test_a_look_copies_each_weight_and_all_its_numbers_once():
    with pretending() as counts:
        training = training_of(*TINY)
        counts.waits.clear()
        assert len(dynamics(training)) == 2 * (1 + 2 * (2 + 2))  # seeds: input, and of two layers two heads and states
    assert counts.waits["to the host"] == len(training.parameters) + 1


@pytest.mark.parametrize(
    "name", ["dropout", pytest.param("corpus", marks=pytest.mark.slow), pytest.param("lstm", marks=pytest.mark.slow)]
)
def test_training_there_gives_the_numbers_of_the_cpu(device, name, tmp_path):
    there, here = Run(tmp_path / "there"), Run(tmp_path / "here")
    watched = ["trainer.dynamics_every=3"] if name == "corpus" else []
    cfg = compose("train", *step_words(name), *watched, "precision=fp64", "device=cpu")
    train(cfg, here)
    with device():
        train(dataclasses.replace(cfg, device="cuda"), there)
    for table in ("metrics", *(["layers"] if watched else [])):
        tables = [run.table(table) for run in (there, here)]
        same(*tables, leave_out=[name for name in tables[0] if name in CLOCKS or "floor" in name or "rounding" in name])
    for name, weight in there.weights().items():
        torch.testing.assert_close(weight, here.weights()[name], **EXACT)


def test_a_run_continues_there_as_if_it_had_not_stopped(device, tmp_path, monkeypatch):
    words = ["model.dropout=0.1", "optimizer=adamw", "precision=fp64"]
    whole, stopped = Run(tmp_path / "whole"), Run(tmp_path / "stopped")
    cfg = compose("train", *TINY, *words, "device=cuda")
    with device():
        train(cfg, whole)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            during_step(patch, 4, Mock(side_effect=KeyboardInterrupt))
            train(cfg, stopped)
        assert stopped.state() is not None
        train(cfg, stopped)
    same(stopped.table("metrics"), whole.table("metrics"))
    for name, weight in stopped.weights().items():
        torch.testing.assert_close(weight, whole.weights()[name], **EXACT)


def test_a_run_is_not_continued_on_another_device(tmp_path, monkeypatch):
    cfg = compose("train", *TINY, "device=auto")
    run = Run(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        during_step(patch, 1, Mock(side_effect=KeyboardInterrupt))  # the first evaluation is written
        train(cfg, run)
    before = contents(run.folder)
    with (
        pretending(),
        pytest.raises(ConfigError, match=r"^device=auto: cuda here, but .* was begun on cpu.*out=<folder>$"),
    ):
        train(cfg, run)
    assert contents(run.folder) == before
    train(cfg, run)
    with pretending():
        train(cfg, run)  # it is finished


# --- analyses --------------------------------------------------------------------------------------------------------

FAST = ("path_mass", "curves", "attention")


def tables(task: str, model: str, names: tuple[str, ...], run: Run, where: str) -> dict[str, pd.DataFrame]:
    (subject,) = subjects_of_run(run, Machine.prepare(compose("analyze", f"device={where}", "precision=fp64")))
    assert subject.device.type == where
    options = options_of(combinations.config(task, model))
    return {name: ANALYSES[name].table(subject, options[name]) for name in names}


# Of a state whose residual is smaller than this part of it, rounding leaves few digits of the residual's directions.
# The residual of single sequences can be another 10^5 times smaller than the mean.
COLLAPSED = 1e-5


def without_directions_of_collapsed(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the metrics of centred tokens only where enough of the residual is left."""
    if "relative_residual" not in table:
        return table
    centred = [column for column in table if "_centred" in column]
    return table.assign(**table[centred].where(table.relative_residual >= COLLAPSED))


@pytest.mark.parametrize(
    ("task", "model", "only"),
    [
        pytest.param("sorting", "causal_contractive_l2", FAST, marks=pytest.mark.further),
        *(
            pytest.param(task, model, None, marks=pytest.mark.slow)
            for task, model in (
                *((task, "transformer") for task in combinations.TASK_WORDS if task != "sorting"),
                *(("nearest_neighbor" if model[:5] == "amsel" else "sorting", model) for model in combinations.MODELS),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_an_analysis_there_gives_the_table_of_the_cpu(device, task, model, only, tmp_path):
    cfg = dataclasses.replace(combinations.config(task, model), precision="fp64", device="cpu")
    names = []
    for name in only or cfg.analysis:
        with contextlib.suppress(ConfigError):
            alone = dataclasses.replace(cfg, analysis={name: cfg.analysis[name]})
            check_analyses(alone, alone)
            names.append(name)
    run = Run(tmp_path / "run")
    train(dataclasses.replace(cfg, analysis={}), run)
    here = tables(task, model, tuple(names), run, "cpu")
    with device():
        there = tables(task, model, tuple(names), run, "cuda")
    for name in names:
        left_out = [column for column in here[name] if column in CLOCKS or column.removesuffix("_sd") in NOISE]
        same(*map(without_directions_of_collapsed, (there[name], here[name])), leave_out=left_out)


FRESH_LAYERS = {
    "lipschitz": ["layer=l2", "tokens=[4]", "steps=2", "starts=3"],
    "invertibility": ["attentions=[dot,contractive_l2]", "tokens=[4]", "widths=[4]", "iterations=3", "heads=2"],
}
FRESH_LAYERS["invertibility"] += ["sequences=2", "coefficients=[0.5]", "ranges=[[0,1]]"]


@pytest.mark.parametrize("name", FRESH_LAYERS)
def test_fresh_layers_are_measured_there(device, name):
    words = [f"analysis=[{name}]", *(f"analysis.{name}.{word}" for word in FRESH_LAYERS[name])]
    cfg, measured = compose("analyze", *TINY[:6], *words, "precision=fp64", "replicas=1"), {}
    for where, context in (("cpu", contextlib.nullcontext), ("cuda", device)):
        with context() as counts:
            (subject,) = fresh_subjects(cfg, Machine.prepare(dataclasses.replace(cfg, device=where)))
            launched = Counts() if counts is None else dataclasses.replace(counts, operations=counts.operations.copy())
            measured[where] = ANALYSES[name].table(subject, options_of(cfg)[name])
        if counts is not None:
            assert (counts.operations - launched.operations).total() > 50
    same(measured["cuda"], measured["cpu"])


def test_the_largest_singular_value_there_is_the_decompositions(device):
    generator = torch.Generator().manual_seed(0)
    drawn_MOI = torch.randn(5, 6, 4, generator=generator, dtype=torch.float64)
    alike_MOI = torch.linalg.qr(drawn_MOI).Q  # all singular values are 1
    close_MOI = alike_MOI * (1 + 1e-7 * torch.arange(4.0, dtype=torch.float64))  # they nearly agree
    for w_MOI in (drawn_MOI, drawn_MOI.mT, alike_MOI, close_MOI, drawn_MOI[:, :, :1]):
        with device():
            left_MO, right_MI = (x.cpu() for x in largest_pair(w_MOI.to("cuda")))
        sigma_M = (left_MO * (w_MOI @ right_MI[..., None]).squeeze(-1)).sum(-1)
        torch.testing.assert_close(sigma_M, torch.linalg.matrix_norm(w_MOI, 2), rtol=3e-10, atol=0)
        torch.testing.assert_close(left_MO.norm(dim=1), torch.ones(5, dtype=torch.float64))


# --- benchmarks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmarks_complete_there(device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(card, "LARGE", 64)
    names = ["paths", "training", "attention", "card"]
    with device():
        cfg = config_of([*TINY, "repeats=2", "sequences=8", "device=cuda", f"out={tmp_path}"])
        check(names, cfg)
        bench(names, cfg, Machine.prepare(cfg))
    for name in names:
        table = pd.read_csv(tmp_path / f"bench_{name}.csv")
        seconds = [column for column in table if column.startswith("seconds_")]
        assert len(table) and (table[seconds].stack().dropna() > 0).all()
        assert "device" not in table or set(table.device) == {"cuda"}
    assert "ratio_side_by_side" in capsys.readouterr().out

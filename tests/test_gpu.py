"""What only a CUDA device can show: its kernels, its number types, its waiting. tests/test_device.py has the rest.

`make test-gpu` runs both. Without a device these tests are skipped.
"""

import dataclasses

import pytest
import torch
from test_device import CLOCKS, EXACT, TINY, needs_gpu, same, step_words, training_of

from rankbench.commands.compose import compose
from rankbench.model import build_model, initial_model
from rankbench.model.attention import visible_keys
from rankbench.model.fused import MOST_SEQUENCES, fused_mixing
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.seeds import generator_for, random_bits, state_of, streams_of
from rankbench.tasks import build_task
from rankbench.training.forward import per_seed
from rankbench.training.loop import train
from rankbench.training.seeds_side_by_side import Training

pytestmark = list(needs_gpu)

# float32: 6e-8 a rounding, some thousand of them in other orders, enlarged by ten steps of Adam
CLOCKS_AND_TIES = [*CLOCKS, "accuracy"]  # a rounding can turn a single answer
FLOAT32 = {"rtol": 1e-3, "atol": 1e-4}


def metrics_of(folder, *words: str):
    cfg = compose("train", *TINY, *words)
    run = Run(folder)
    train(cfg, run)
    return run.table("metrics")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["dropout", "fresh sequences", "contractive, padded", "corpus", "sigma", "long"])
def test_torch_sees_no_wait_in_a_step(name):
    training = training_of(*step_words(name))
    training.update()
    training.update()
    try:
        torch.cuda.set_sync_debug_mode("error")
        training.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_bits_of_dropout_are_those_of_the_cpu():
    streams_S2 = streams_of([state_of(seed, "dropout", 2) for seed in range(5)])
    assert torch.equal(random_bits(streams_S2.to("cuda"), 100_000).cpu(), random_bits(streams_S2, 100_000))


def test_fp32_follows_the_cpu_and_bf16_only_roughly(tmp_path):
    here = metrics_of(tmp_path / "cpu", "device=cpu")
    same(metrics_of(tmp_path / "fp32", "device=cuda"), here, FLOAT32, CLOCKS_AND_TIES)
    rough = metrics_of(tmp_path / "bf16", "device=cuda", "precision=bf16")
    assert rough.loss.to_numpy() == pytest.approx(here.loss.to_numpy(), rel=0.05)  # 4e-3 a product
    assert rough.loss.to_numpy() != pytest.approx(here.loss.to_numpy(), rel=1e-5)  # or it was no bfloat16


# those of torch's compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("words", [[], ["model.mask=causal", "model.dropout=0.1"]], ids=["plain", "causal, dropout"])
def test_a_compiled_training_is_the_same_training(words, tmp_path):
    plain = metrics_of(tmp_path / "plain", "device=cuda", *words)
    same(
        metrics_of(tmp_path / "compiled", "device=cuda", "trainer.compile=true", *words),
        plain,
        FLOAT32,
        CLOCKS_AND_TIES,
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_corpus_is_the_same_training():
    words = [*step_words("corpus"), "model.dropout=0.1", "model.layers=3", "precision=fp64"]
    compiled, plain = (training_of(*words, step=step) for step in ("compiled graph", "plain"))
    for _ in range(6):
        compiled.update()
        plain.update()
    assert not compiled.graphs.refused and compiled.kernels is not compiled.plain
    for name, weight in plain.weights().items():
        torch.testing.assert_close(compiled.weights()[name], weight, **FLOAT32)


@pytest.mark.parametrize("words", [[], ["model.dropout=0.2"], ["task.length=100"]], ids=["plain", "dropout", "long"])
def test_seeds_side_by_side_are_the_seeds_alone(words):
    together = training_of(*TINY, "precision=fp64", "replicas=3", *words)
    for _ in range(3):
        together.update()
    for seed in range(3):
        cfg = dataclasses.replace(together.cfg, seed=seed, replicas=1)
        alone = Training(cfg, build_task(cfg.task), together.machine, [seed])
        for _ in range(3):
            alone.update()
        for name, weight in alone.weights().items():
            torch.testing.assert_close(together.weights()[name][seed], weight[0], **EXACT)


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_fused_kernels_give_the_table(mask, dtype):
    generator = generator_for(0, "test")
    q, k, v = (torch.randn(2, 3, 40, 8, generator=generator).to("cuda", dtype) for _ in range(3))
    seen_NM = visible_keys(mask, 3, 40, q.device)
    scores = 0.5 * q.double() @ k.double().mT
    scores = scores if seen_NM is None else scores.masked_fill(~seen_NM, float("-inf"))
    fused = fused_mixing(q, k, v, None if mask == "causal" else seen_NM, mask == "causal", 0.5)
    digits = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(fused.double(), scores.softmax(-1) @ v.double(), rtol=digits, atol=digits)


def test_more_sequences_than_a_launch_takes():
    x = torch.randn(MOST_SEQUENCES + 3, 1, 4, 8, generator=generator_for(0, "test")).to("cuda")
    fused = fused_mixing(x, x, x, None, False, 1.0)
    for rows in (slice(0, 2), slice(-5, None)):
        torch.testing.assert_close(fused[rows], fused_mixing(x[rows], x[rows], x[rows], None, False, 1.0))


def test_an_lstm_in_fp32_has_its_digits():
    cfg = compose("train", "model=lstm", "model.width=128", "task.length=16", "device=cuda")
    task, machine = build_task(cfg.task), Machine.prepare(cfg)
    model = initial_model(cfg.model, task, 0)
    inputs = task.sample(8, generator_for(0, "test")).inputs
    with torch.no_grad():
        wanted = model.double()(inputs)
        outputs = model.to("cuda", machine.dtype)(inputs.to("cuda"))
    # TF32 has ten bits: its error is 1e-3
    torch.testing.assert_close(outputs.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_clock_is_read_when_the_device_has_finished():
    training = training_of(*TINY, "model.width=256", "task.length=64", "trainer.batch_size=8", "replicas=8")
    forward, batch = per_seed(build_model(training.cfg.model, training.task)), training.batch()
    training.sums["steps"] = 1
    event = torch.cuda.Event()
    for _ in range(20):
        forward(training.parameters, batch.inputs, batch.targets, None)
    event.record()
    with training.paused():
        assert event.query()

"""rankbench.analysing.module_runs: which targets fit a module's output, and how those that do are scored.

Shapes: B sequence, N token, C class or output dimension.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from readers import D, reader
from refusals import refusal

import rankbench

B, N = 6, 7
NUMBERS = "allowed are floating-point numbers of that shape"


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("outputs", "pooled", "sequences", "shape", "output"),
    [
        (1, True, B, (B,), (B, 1)),  # would broadcast to (B, B)
        (1, False, N, (N, N), (N, N, 1)),  # as many sequences as tokens
        (3, False, B, (N, 3), (B, N, 3)),
        (3, False, B, (B, N, 1), (B, N, 3)),
        (3, False, 9, (B, N, 3), (9, N, 3)),
    ],
)
def test_targets_that_would_broadcast_are_refused(generator, outputs, pooled, sequences, shape, output):
    inputs = {"x": torch.zeros(sequences, N, D), "targets": torch.zeros(shape, dtype=torch.float64)}
    message = refusal(rankbench.analyze, reader(generator, outputs, pooled), inputs, "paths")
    begins = f"targets of torch.float64 and shape {shape} do not fit an output of shape {output}, sequences first; "
    assert f"{begins}{NUMBERS}, or classes (whole numbers) of shape {output[:-1]}; reshape" in message


def test_classes_need_an_axis_of_classes(generator):
    inputs = {"x": torch.randn(B, N, D, generator=generator), "targets": torch.ones(B, N, dtype=torch.int64)}
    message = refusal(rankbench.analyze, reader(generator, None), inputs, "spectrum")
    assert f"targets of torch.int64 and shape {(B, N)} do not fit an output of shape {(B, N)}," in message
    assert f"{NUMBERS}; reshape" in message


@pytest.mark.parametrize("wrong", [-100, 5])
def test_classes_that_the_output_has_not_are_refused_with_what_means_unscored(generator, wrong):
    targets = torch.zeros(B, N, dtype=torch.int64)
    targets[:, -2:] = wrong
    inputs = {"x": torch.zeros(B, N, D), "targets": targets}
    message = refusal(rankbench.analyze, reader(generator, 5), inputs, "spectrum")
    assert f"targets from {min(wrong, 0)} to {max(wrong, 0)}; allowed are classes from 0 to 4, and -1 for" in message
    assert "in place of torch's -100" in message and "shape" not in message


@pytest.mark.parametrize("analysis", ["spectrum", "paths", "path_mass"])
def test_targets_of_the_output_are_no_targets_of_a_submodule(generator, analysis):
    x, targets = torch.randn(B, N, D, generator=generator), torch.full((B, N), D)
    message = refusal(
        rankbench.analyze, reader(generator, 2 * D), {"x": x, "targets": targets}, analysis, output="encoder"
    )
    assert f"targets from {D} to {D}; allowed are classes from 0 to {D - 1}," in message
    rankbench.analyze(reader(generator, 2 * D), {"x": x, "targets": targets}, "residual", output="encoder")


@pytest.mark.parametrize("batch_first", [True, False])
def test_targets_that_fit_are_scored_as_by_torch(generator, batch_first):
    module = reader(generator, 5, batch_first=batch_first)
    x = torch.randn(B, N, D, generator=generator, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    output = module(x) if batch_first else module(x).transpose(0, 1)
    classes = torch.randint(5, (B, N), generator=generator)
    classes[:, -2:] = -100
    numbers = torch.randn(B, N, 5, generator=generator, dtype=torch.float64)
    right = (output.argmax(-1) == classes)[:, :-2].double().mean().item()
    scored = [
        (F.cross_entropy(output.flatten(0, 1), classes.flatten()), right, classes.clamp(min=-1)),
        (F.mse_loss(output, numbers), math.nan, numbers),
    ]
    for loss, accuracy, targets in scored:
        tables = rankbench.analyze(module, {"x": x, "targets": targets}, "spectrum", "paths", "path_mass")
        for table in tables.values():
            assert table.whole_loss.to_numpy() == pytest.approx(loss.item(), rel=1e-12)  # rounding of double precision
            assert table.whole_accuracy.to_numpy() == pytest.approx(accuracy, rel=1e-12, nan_ok=True)

"""rankbench.analysing.module_runs: which targets fit a module's output, and how those that do are scored.

Shapes: B sequence, N token, C class or output dimension.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal
from torch import nn

import rankbench

B, N, D = 6, 7, 8
SCORING = ("spectrum", "paths", "path_mass")


class Reader(nn.Module):
    """An encoder of torch's whose tokens have `outputs` numbers each, or one if `outputs` is None."""

    def __init__(self, outputs, batch_first=True):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(D, 2, 16, batch_first=batch_first)
        self.read_out = nn.Linear(D, outputs or 1)
        self.squeezed = outputs is None

    def forward(self, x):
        y = self.read_out(self.encoder(x))
        return y.squeeze(-1) if self.squeezed else y


class Pooled(Reader):
    def forward(self, x):
        return self.read_out(self.encoder(x).mean(1))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def made(generator):
    """Gives a reader of a kind with drawn weights and states for it, in double precision."""

    def make(kind, outputs, sequences=B, **how):
        module = kind(outputs, **how).double().eval().requires_grad_(False)
        for weight in module.parameters():
            weight.normal_(0, 0.3, generator=generator)
        x = torch.randn(sequences, N, D, generator=generator, dtype=torch.float64)
        return module, x if how.get("batch_first", True) else x.transpose(0, 1).contiguous()

    return make


NUMBERS = "allowed are floating-point numbers of that shape"


@pytest.mark.parametrize(
    ("kind", "outputs", "sequences", "shape", "output"),
    [
        (Pooled, 1, B, (B,), (B, 1)),  # would broadcast to (B, B)
        (Reader, 1, N, (N, N), (N, N, 1)),  # as many sequences as tokens
        (Reader, 3, B, (N, 3), (B, N, 3)),
        (Reader, 3, B, (B, N, 1), (B, N, 3)),
        (Reader, 3, 9, (B, N, 3), (9, N, 3)),
    ],
)
def test_targets_that_would_broadcast_are_refused(made, kind, outputs, sequences, shape, output):
    module, x = made(kind, outputs, sequences)
    message = refusal(rankbench.analyze, module, {"x": x, "targets": torch.zeros(shape, dtype=torch.float64)}, "paths")
    begins = f"targets of torch.float64 and shape {shape} do not fit an output of shape {output}, sequences first; "
    assert f"{begins}{NUMBERS}, or classes (whole numbers) of shape {output[:-1]}; reshape" in message


def test_classes_need_an_axis_of_classes(made):
    module, x = made(Reader, None)
    labels = torch.ones(B, N, dtype=torch.int64)
    message = refusal(rankbench.analyze, module, {"x": x, "targets": labels}, "spectrum")
    assert f"targets of torch.int64 and shape {(B, N)} do not fit an output of shape {(B, N)}," in message
    assert f"{NUMBERS}; reshape" in message


@pytest.mark.parametrize("wrong", [-100, 5])
def test_classes_that_the_output_has_not_are_refused_with_what_means_unscored(made, wrong):
    module, x = made(Reader, 5)
    targets = torch.zeros(B, N, dtype=torch.int64)
    targets[:, -2:] = wrong
    message = refusal(rankbench.analyze, module, {"x": x, "targets": targets}, "spectrum")
    assert re.search(
        rf"targets from {min(wrong, 0)} to {max(wrong, 0)}; allowed are classes from 0 to 4, and -1", message
    )
    assert "in place of torch's -100" in message and "shape" not in message


@pytest.mark.parametrize("batch_first", [True, False])
def test_targets_that_fit_are_scored_as_by_torch(made, generator, batch_first):
    module, x = made(Reader, 5, batch_first=batch_first)
    output = module(x) if batch_first else module(x).transpose(0, 1)
    classes = torch.randint(5, (B, N), generator=generator)
    classes[:, -2:] = -100
    numbers = torch.randn(B, N, 5, generator=generator, dtype=torch.float64)
    scored = {
        F.cross_entropy(output.flatten(0, 1), classes.flatten()): classes.clamp(min=-1),
        F.mse_loss(output, numbers): numbers,
    }
    for loss, targets in scored.items():
        tables = rankbench.analyze(module, {"x": x, "targets": targets}, *SCORING)
        for table in tables.values():
            assert table.whole_loss.to_numpy() == pytest.approx(loss.item(), rel=1e-12)  # rounding of double precision

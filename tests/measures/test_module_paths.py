"""rankbench.measures.module_paths: outputs without tokens or without channels, against sums that are taken by hand.

Shapes: K path length, B sequence, N token, C class.
"""

import pytest
import torch
import torch.nn.functional as F
from readers import D, reader
from refusals import refusal
from torch import nn

import rankbench
from rankbench.tape import record

B, N = 5, 7
ROUNDING = 1e-10  # of double precision, magnified by a division by the smallest sum


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(1)


@pytest.fixture
def x(generator):
    return torch.randn(B, N, D, generator=generator, dtype=torch.float64)


def tables(module, **inputs):
    """The rows of lengths of the output."""
    every = rankbench.analyze(module, inputs, "spectrum", "paths", "path_mass")
    spectrum, mass = every["spectrum"], every["path_mass"]
    spectrum = spectrum[(spectrum.of == "output") & (spectrum.part == "length")]
    return spectrum, every["paths"], mass[mass.part == "length"]


def close(numbers):
    return pytest.approx(torch.stack(list(numbers)).tolist(), rel=ROUNDING, abs=1e-14)  # of sums of size one


def test_paths_of_a_classifier_of_sequences(generator, x):
    module, classes = reader(generator, 4, pooled=True), torch.randint(4, (B,), generator=generator)
    S_KBC, whole = record(module, x).sums().by_length_KBND, module(x)
    _, paths, _ = tables(module, x=x, targets=classes)
    assert paths.loss.tolist() == close(F.cross_entropy(S_BC, classes) for S_BC in S_KBC)
    assert paths.accuracy.tolist() == close((S_BC.argmax(-1) == classes).double().mean() for S_BC in S_KBC)
    assert paths.whole_loss.tolist() == close([F.cross_entropy(whole, classes)] * len(S_KBC))
    norms_KB = S_KBC.norm(dim=-1)
    assert paths.norm_share.tolist() == close((norms_KB / norms_KB.sum(0)).mean(1))
    assert (paths.relative_residual == 0).all() and (paths.below_floor == 1).all()  # one token has no other


@pytest.mark.parametrize("padded", [False, True])
def test_one_number_per_token(generator, x, padded):
    module, inputs = reader(generator, None), {"x": x}
    present = torch.arange(N) < (torch.tensor([N, 3, 5, 2, 6])[:, None] if padded else N)
    if padded:
        inputs["absent"] = ~present
    numbers = torch.randn(B, N, generator=generator, dtype=torch.float64)
    targets = numbers.masked_fill(~present, torch.nan)
    S_KBN, whole = record(module, **inputs).sums().by_length_KBND * present, module(**inputs) * present
    present = present.expand(B, N)

    def loss(x_BN):
        return F.mse_loss(x_BN[present], numbers[present])

    def loss_of_sequences(x_BN):
        return torch.stack([F.mse_loss(x_BN[b][present[b]], numbers[b][present[b]]) for b in range(B)]).mean()

    spectrum, paths, mass = tables(module, **inputs, targets=targets)
    for table in (spectrum, mass):
        assert table.mass.tolist() == close((S_BN.norm(dim=1) / whole.norm(dim=1)).mean() for S_BN in S_KBN)
    assert spectrum.loss_upto.tolist() == close(map(loss_of_sequences, S_KBN.cumsum(0)))
    assert spectrum.whole_loss.tolist() == close([loss_of_sequences(whole)] * len(S_KBN))
    assert paths.loss.tolist() == close(map(loss, S_KBN)) and paths.whole_loss.tolist() == close([loss(whole)] * 2)
    assert mass.loss_without.tolist() == close(loss(whole - S_BN) for S_BN in S_KBN)
    without = tables(module, **inputs)
    for table, alone in zip((spectrum, paths, mass), without, strict=True):
        sizes = [name for name in ("mass", "norm_share", "relative_residual") if name in table]
        assert alone[sizes].to_numpy() == pytest.approx(table[sizes].to_numpy())


def test_one_number_per_sequence(generator, x):
    module = reader(generator, None, pooled=True)
    numbers = torch.randn(B, generator=generator, dtype=torch.float64)
    S_KB, whole = record(module, x).sums().by_length_KBND, module(x)
    spectrum, paths, mass = tables(module, x=x, targets=numbers)
    for table in (spectrum, mass):
        assert table.mass.tolist() == close((S_B / whole).abs().mean() for S_B in S_KB)
    assert spectrum.loss_upto.tolist() == close(F.mse_loss(S_B, numbers) for S_B in S_KB.cumsum(0))
    assert paths.loss.tolist() == close(F.mse_loss(S_B, numbers) for S_B in S_KB)
    assert mass.loss_without.tolist() == close(F.mse_loss(whole - S_B, numbers) for S_B in S_KB)
    slope = 2 * (whole - numbers) / B
    assert mass.gradient_mass.tolist() == close((slope * S_B).sum() for S_B in S_KB)


def test_one_number_per_token_is_no_logits_of_tokens(generator, x):
    """As of an ELECTRA that says which tokens were replaced."""
    table = rankbench.analyze(reader(generator, None, named="logits"), {"x": x}, "spectrum")["spectrum"]
    assert set(table.of) == {"output"} and table.kl_upto.isna().all()
    table = rankbench.analyze(reader(generator, 3, named="logits"), {"x": x}, "spectrum")["spectrum"]
    assert "logits" in set(table.of) and table[table.part == "length"].kl_upto.notna().all()


class FirstSequence(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[:1]


@pytest.mark.parametrize("analysis", ["spectrum", "paths", "path_mass"])
def test_an_output_of_other_sequences_than_the_inputs_is_refused(generator, x, analysis):
    module = FirstSequence(reader(generator, 3))
    message = "output has shape (1, 7, 3) for 3 sequences; return a tensor with an axis of all sequences"
    assert message in refusal(rankbench.analyze, module, {"x": x}, analysis)

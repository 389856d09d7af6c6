"""rankbench.analyses.spectrum of sequences for which some numbers are undefined, against means over the others.

Shapes: K path length, B sequence, N token, C class.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from readers import D, reader

import rankbench
from rankbench.tape import record

B, N, C = 5, 9, 4
CLOSE = 0.01  # nats
OF_TARGETS = ["loss_upto", "excess_loss_upto", "accuracy_upto", "loss_settled_upto", "whole_loss", "whole_accuracy"]


def settled_by_hand(S_KBNC, whole):
    """The first length from which on each token's divergence is below CLOSE, (B, N)."""
    p = whole.softmax(-1)
    divergence = torch.stack([(p * (p.log() - upto.log_softmax(-1))).sum(-1) for upto in S_KBNC.cumsum(0)])
    K = len(divergence)
    return torch.stack([(divergence[k:] >= CLOSE).any(0) for k in range(K)]).sum(0)


def test_sequences_without_a_scored_target_are_left_out():
    generator = torch.Generator().manual_seed(10)
    module, x = reader(generator, C, scale=0.6), torch.randn(B, N, D, generator=generator, dtype=torch.float64)
    classes = torch.randint(C, (B, N), generator=generator)
    classes[0] = -1  # no loss
    classes[1, 2:] = -1  # a loss, but no third
    table = rankbench.analyze(module, {"x": x, "targets": classes}, "spectrum")["spectrum"]
    table = table[(table.of == "output") & (table.part == "length")]
    S_KBNC, whole = record(module, x).sums().by_length_KBND, module(x)

    def losses(x_BNC):
        return F.cross_entropy(x_BNC.mT, classes, ignore_index=-1, reduction="none")

    def of_sequence(x_BN, b):
        return x_BN[b][classes[b] >= 0].double().mean().item()

    size_B = whole.flatten(1).norm(dim=1)
    errors_KB = (whole - S_KBNC.cumsum(0)).flatten(2).norm(dim=2) / size_B
    shares_KB = (S_KBNC * whole).flatten(2).sum(2) / size_B**2
    for name, wanted_KB in {"error_upto": errors_KB, "share": shares_KB}.items():
        assert table[name].tolist() == pytest.approx(wanted_KB.mean(1).tolist(), rel=1e-12, abs=1e-14), name
    rest = range(1, B)
    loss_K = [np.mean([of_sequence(losses(upto), b) for b in rest]) for upto in S_KBNC.cumsum(0)]
    right = [np.mean([of_sequence(upto.argmax(-1) == classes, b) for b in rest]) for upto in S_KBNC.cumsum(0)]
    whole_loss = np.mean([of_sequence(losses(whole), b) for b in rest])
    assert table.loss_upto.tolist() == pytest.approx(loss_K, rel=1e-12)  # rounding of double precision
    assert table.excess_loss_upto.tolist() == pytest.approx(np.subtract(loss_K, whole_loss), abs=1e-12)
    assert table.accuracy_upto.tolist() == pytest.approx(right, rel=1e-12)
    assert table.whole_loss.tolist() == pytest.approx([whole_loss] * len(table), rel=1e-12)
    close = [(losses(upto) - losses(whole)).abs() < CLOSE for upto in S_KBNC.cumsum(0)]
    stays = [torch.stack(close[k:]).all(0) for k in range(len(close))]
    assert table.loss_settled_upto.tolist() == pytest.approx(
        [np.mean([of_sequence(of_length, b) for b in rest]) for of_length in stays], rel=1e-12
    )
    assert table[[name for name in table if name.startswith(tuple(OF_TARGETS))]].notna().all(axis=None)
    settled, third, later = settled_by_hand(S_KBNC, whole), N // 3, []
    assert table.settled_upto.tolist() == pytest.approx([(settled <= k).double().mean().item() for k in (0, 1)])
    for b in range(2, B):
        in_order = settled[b][losses(whole)[b].argsort()].double()
        later.append((in_order[-third:].mean() - in_order[:third].mean()).item())
    assert table.hard_tokens_later.tolist() == pytest.approx([np.mean(later)] * len(table), abs=1e-12)
    assert np.ptp(later) > 0 and abs(np.mean(later)) > 0.1  # so that a sign would be seen
    assert (table.num_sequences == B).all() and (table.num_undefined == 0).all()


def test_sequences_of_two_tokens_have_no_last_third():
    generator = torch.Generator().manual_seed(7)
    module = reader(generator, C, scale=0.6, named="logits")
    x = torch.randn(B, N, D, generator=generator, dtype=torch.float64)
    lengths = [N, 2, 5, N, 3]
    absent = torch.arange(N) >= torch.tensor(lengths)[:, None]
    table = rankbench.analyze(module, {"x": x, "absent": absent}, "spectrum")["spectrum"]
    inputs = {"x": x, "absent": absent}
    whole = module(**inputs)["logits"]
    settled, later = settled_by_hand(record(module, **inputs).sums().by_length_KBND, whole), []
    for of_tokens, length in zip(settled.double(), lengths, strict=True):
        if third := length // 3:
            later.append((of_tokens[length - third : length].mean() - of_tokens[:third].mean()).item())
    assert len(later) == B - 1 and np.mean(later) != 0
    assert table.last_tokens_later.dropna().tolist() == pytest.approx([np.mean(later)] * len(table), abs=1e-12)


def test_without_any_scored_target_there_is_no_loss():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(B, N, D, generator=generator, dtype=torch.float64)
    table = rankbench.analyze(reader(generator, C), {"x": x, "targets": torch.full((B, N), -1)}, "spectrum")["spectrum"]
    assert table[[*OF_TARGETS, "hard_tokens_later"]].isna().all(axis=None)
    assert table[table.part == "length"].kl_upto.notna().all()

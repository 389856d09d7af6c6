"""rankbench.measures.partial_outputs against torch's own divergence and loss, and against loops.

Shapes: K path lengths, B sequence, N token, C class.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from rankbench.measures.partial_outputs import beside_whole, first_within, last_third_later, stays_within
from rankbench.tasks.task import ABSENT


@pytest.fixture
def logits():
    """Logits of four lengths, (K, B, N, C), the last of which is the whole."""
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(4, 2, 5, 7, generator=generator, dtype=torch.float64)


def test_divergence_and_excess_are_those_of_torch(logits):
    targets = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))
    targets[1, 3:] = ABSENT  # whose losses are 0
    beside = beside_whole(logits, logits[-1], targets)
    log_q, log_p = logits.log_softmax(-1), logits[-1].log_softmax(-1).expand_as(logits)
    assert torch.allclose(beside.divergence, F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))
    losses = torch.stack([F.cross_entropy(x.mT, targets, reduction="none", ignore_index=ABSENT) for x in logits])
    assert torch.allclose(beside.excess, losses - losses[-1])
    assert torch.allclose(beside.whole_loss, losses[-1])
    assert torch.equal(beside.agrees, logits.argmax(-1) == logits[-1].argmax(-1))
    assert beside.agrees[-1].all() and (beside.divergence[-1] == 0).all() and (beside.divergence[:-1] > 0).all()


def test_without_tokens_and_without_targets(logits):
    beside = beside_whole(logits[:, :, 0], logits[-1, :, 0], None)
    assert beside.excess is None and beside.whole_loss is None
    assert torch.equal(beside.divergence, beside_whole(logits, logits[-1], None).divergence[:, :, 0])


def test_a_class_that_the_whole_excludes_adds_nothing():
    whole = torch.tensor([[[0.0, 0.0, -math.inf]]])
    partial = torch.tensor([[[0.0, math.log(3), 1.0]]])
    q = partial.softmax(-1)
    wanted = -0.5 * (math.log(2 * q[..., 0]) + math.log(2 * q[..., 1]))
    assert beside_whole([partial], whole, None).divergence.item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "first"),
    [([0.0, 0.0], 0), ([1.0, 0.1, 0.0], 1), ([0.0, 1.0, 0.0], 2), ([0.0, 0.0, 1.0], 3), ([math.nan, 0.0], 1)],
)
def test_a_size_that_grows_again_has_not_stayed(sizes, first):
    sizes_K = torch.tensor(sizes)
    assert first_within(sizes_K, 0.5).item() == first
    assert stays_within(sizes_K, 0.5).tolist() == [number >= first for number in range(len(sizes))]


def test_the_last_third_against_the_first_of_the_counted_tokens():
    lengths = torch.tensor([[1, 2, 3, 4, 5, 6, 9], [5, 5, 5, 1, 1, 1, 0]])
    order = torch.tensor([[0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]])
    counted = torch.ones(2, 7, dtype=torch.bool)
    counted[0, 6] = counted[1, 3:] = False
    # 6, 5 first and 2, 1 last; of three tokens one each
    assert last_third_later(lengths, order, counted).tolist() == [-4.0, 0.0]
    counted[1, 2] = False
    assert last_third_later(lengths, order, counted)[1].isnan()
    alone = (x[:, 0] for x in (lengths, order, counted))  # a sequence of one token, without an axis for it
    assert last_third_later(*alone).isnan().all()
    in_images = (x.view(2, 1, 7) for x in (lengths, order, counted))  # however the tokens lie
    assert last_third_later(*in_images)[0] == -4.0

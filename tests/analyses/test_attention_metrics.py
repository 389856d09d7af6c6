"""The attention of others' networks, against the same numbers from the weights that the network itself keeps.

Shapes: B sequence, G group, H head, N query token, M key token.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks_of_others import MaskedAttention
from torch import nn

import rankbench
from rankbench.analyses import ANALYSES
from rankbench.analyses.attention import ENTROPIES
from rankbench.measures.entropy_bound import of_heads


@torch.no_grad()
def rows_of(module, *inputs):
    """The table, in double precision, of a module that then keeps what it computed on these inputs."""
    module.double()(*inputs)
    return rankbench.analyze(module, inputs, "attention")["attention"]


@pytest.mark.parametrize("fill", [-math.inf, -1e9, -1e4, None, "weights"])
@pytest.mark.parametrize("of", ["heads", "documents"])
def test_each_query_has_the_keys_of_its_own_head_and_sequence(of, fill):
    torch.manual_seed(0)
    module, x = MaskedAttention(fill), torch.randn(5, 9, 16, dtype=torch.double)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    if of == "heads":  # two see a window of three tokens
        sees = torch.stack([causal & ~causal.tril(-3)] * 2 + [causal] * 2).expand(5, -1, -1, -1).clone()
    else:  # one behind the other, of other lengths in each sequence
        document = torch.randint(2, (5, 9)).cumsum(1)
        sees = (causal & (document[:, :, None] == document[:, None]))[:, None]
    table = rows_of(module, x, sees)
    sees = sees.expand(5, 4, 9, 9)
    entropy = torch.special.entr(module.p).sum(-1) / sees.sum(-1).double().log()
    entropy = entropy.where(sees.sum(-1) > 1, math.nan).nanmean(-1)
    uniform = sees / sees.sum(-1, keepdim=True, dtype=torch.double)
    expected = {
        "attention_entropy": entropy,
        "distance_to_uniform": (module.p - uniform).flatten(2).norm(dim=-1) / 3,
        "largest_logit": module.logits.where(sees, 0).abs().amax((2, 3)),
    }
    for name, by_head in expected.items():
        assert table[name].to_numpy() == pytest.approx(by_head.nanmean(0).numpy(), rel=1e-12), name


class Cross(nn.Module):
    """Tokens that read a text; it keeps P."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, text):
        self.p = (self.q(x) @ self.k(text).mT).softmax(-1)
        return x + self.p @ self.v(text)


def test_of_more_queries_than_keys_all_count():
    torch.manual_seed(0)
    module = Cross()
    row = rows_of(module, torch.randn(3, 12, 8).double(), torch.randn(3, 4, 8).double()).iloc[0]
    p = module.p.numpy()
    values = np.linalg.svd(p, compute_uv=False)
    share = values / values.sum(-1, keepdims=True)
    assert row.attention_effective_rank == pytest.approx(np.exp(-(share * np.log(share)).sum(-1)).mean(), rel=1e-12)
    assert row.attention_gap_singular == pytest.approx((values[:, 0] - values[:, 1]).mean(), rel=1e-12)
    assert row.attention_entropy == pytest.approx(-(p * np.log(p)).sum(-1).mean() / math.log(4), rel=1e-12)


class Groups(nn.Module):
    """Two values that each of two groups of heads reads, as head r G + g. It keeps P and the values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 2, 4)).permute(0, 2, 3, 1, 4)
        k, self.values = (map(x).unflatten(-1, (2, 4)).transpose(1, 2) for map in (self.k, self.v))
        self.p = (q @ k[:, None].mT / 2).softmax(-1)
        return x + self.out((self.p @ self.values[:, None]).permute(0, 3, 1, 2, 4).flatten(2))


def test_heads_in_groups_have_the_values_that_they_read():
    torch.manual_seed(0)
    module = Groups()
    table = rows_of(module, torch.randn(5, 7, 16).double())
    values = module.values[:, None].expand(-1, 2, -1, -1, -1)
    cosine = F.cosine_similarity(module.p @ values, values, dim=-1).mean((0, 3)).flatten()
    assert table.value_cosine.to_numpy() == pytest.approx(cosine.numpy(), rel=1e-12)


def test_entropies_and_their_bounds_are_means_over_sequences(random_subject):
    subject = random_subject(kinds=("trained",))
    table = ANALYSES["attention"].table(subject, ANALYSES["attention"].options(sequences=5))
    of_sequences = [[values for _, values in of_heads(subject.network, ids_N)] for ids_N in subject.test.inputs[:5]]
    for name in ENTROPIES:
        wanted = torch.stack([torch.cat([values[name] for values in layers]) for layers in of_sequences]).mean(0)
        assert table[name].to_numpy() == pytest.approx(wanted.numpy(), rel=1e-12)


def test_the_distance_to_uniform_is_of_the_precision_of_p():
    torch.manual_seed(0)
    module = MaskedAttention(-math.inf)
    module.qkv.weight.data[:32] *= 1e-6
    module.qkv.bias.data[:32] = 0  # P is uniform but for 1e-12
    sees = torch.ones(9, 9, dtype=torch.bool)[None]
    table = rows_of(module, torch.randn(5, 9, 16).double(), sees)
    exact = (module.p - 1 / 9).flatten(2).norm(dim=-1).mean(0) / 3
    # 1/9 and P are rounded to 1e-16 of their size
    assert table.distance_to_uniform.to_numpy() == pytest.approx(exact.numpy(), abs=1e-15)
    assert exact.max() < 1e-9


def test_attention_whose_queries_begin_at_zero_is_to_its_own_tokens():
    """As with muP: no touch moves them."""
    torch.manual_seed(0)
    module = MaskedAttention(-math.inf)
    for part in (module.qkv.weight, module.qkv.bias):
        part.data[:16] = 0
    table = rows_of(module, torch.randn(5, 9, 16).double(), torch.ones(9, 9, dtype=torch.bool)[None])
    assert (table.kind == "softmax").all() and (table.own_weight - 1 / 9).abs().max() < 1e-15

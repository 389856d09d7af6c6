"""Designs of public packages that were misread or stopped with an error, written anew: windows that look back, class
tokens whose heads are mixed, keys in chosen blocks, slots of experts, axial attention behind a convolution.

Shapes: B sequence, N token, D width, H head, K head width, W window, E expert, S slot.
"""

import pytest
import torch
import torch.nn.functional as F
from networks_of_others import (
    MLP,
    Along,
    Attention,
    B,
    D,
    H,
    N,
    Sequence,
    by_kernel,
    drawn,
    heads_of,
    joined,
    random,
    states,
    written_out,
)
from refusals import refusal
from torch import nn

from rankbench.measures.module_reading import read_module
from rankbench.model.modules import Example
from rankbench.tape import record

SIZE = 2  # tokens of a window


def looking_back(q, k, v, _):
    """Causal attention of windows to themselves and the one before, with heads in the batch. In front of the first
    window stands one that all queries hide."""
    q, *read_RWNK = (x.flatten(0, 1).unflatten(1, (-1, SIZE)) for x in (q, k, v))
    before_RWNK = [F.pad(x, (0, 0, 0, 0, 1, 0), value=-1.0)[:, :-1] for x in read_RWNK]
    k, v = (torch.cat(windows, 2) for windows in zip(before_RWNK, read_RWNK, strict=True))
    place_WN = torch.arange(q.shape[1] * SIZE).unflatten(0, (-1, SIZE))
    of_keys_WM = torch.cat([place_WN - SIZE, place_WN], 1)
    hidden_WNM = (of_keys_WM[:, None] > place_WN[..., None]) | (of_keys_WM[:, None] < 0)
    p = (q @ k.mT).masked_fill(hidden_WNM, torch.finfo(q.dtype).min).softmax(-1)
    return (p @ v).flatten(1, 2).unflatten(0, (B, H))


def looking_back_by_a_mask(q, k, v, _):
    place = torch.arange(q.shape[2])
    first = place // SIZE * SIZE - SIZE
    hidden_NM = (place > place[:, None]) | (place < first[:, None])
    return (q @ k.mT).masked_fill(hidden_NM, -torch.inf).softmax(-1) @ v


def in_chosen_blocks(q, k, v, _):
    """Each query of each head reads the two blocks of keys whose means fit it best."""
    blocks_BHJSK = [x.unflatten(2, (-1, SIZE)) for x in (k, v)]
    chosen_BHNJ = (q @ blocks_BHJSK[0].mean(3).mT).topk(2, -1).indices
    each = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    k, v = (x[(*each, chosen_BHNJ)].flatten(3, 4) for x in blocks_BHJSK)
    return ((q[:, :, :, None] @ k.mT).softmax(-1) @ v).squeeze(3)


def in_chosen_blocks_by_a_mask(q, k, v, _):
    fits_BHNJ = q @ k.unflatten(2, (-1, SIZE)).mean(3).mT
    hidden = (fits_BHNJ < fits_BHNJ.topk(2, -1).values[..., -1:]).repeat_interleave(SIZE, -1)
    return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v


WRITTEN_TWICE = {
    "windows that look back": (looking_back, looking_back_by_a_mask),
    "chosen blocks": (in_chosen_blocks, in_chosen_blocks_by_a_mask),
}


@pytest.mark.parametrize("name", WRITTEN_TWICE)
def test_windows_and_blocks_of_keys_have_the_sums_of_a_mask(name):
    """Nothing of a window is padding of a sequence."""
    module, usual = (drawn(Sequence(*(Attention(mix) for _ in range(2)))) for mix in WRITTEN_TWICE[name])
    x = random("windows", B, 2 * N, D)
    read, same = (read_module(each, Example((x,))) for each in (module, usual))
    assert [call.lead.heads for call in read.heads] == [call.lead.heads for call in same.heads] == [H, H]
    assert read.mask == "" and read.reading.mixing == ()
    got, wanted = (each.sums(each.record(each.example)).by_length_KBND for each in (read, same))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12 * wanted.abs().max().item())


class ToBlocks(Attention):
    """Attention to a learned token and the means of blocks, whose values passed a map of (B H, K, 1, N) before."""

    def __init__(self):
        super().__init__(self.pooled)
        self.maps, self.learned = nn.ModuleList([nn.Conv2d(D // H, D // H, 1)]), nn.Parameter(torch.zeros(H, 1, D // H))

    def pooled(self, q, k, v, _):
        v = self.maps[0](v.flatten(0, 1).mT[:, :, None])[:, :, 0].mT.unflatten(0, (-1, H))
        means = [x.unflatten(2, (-1, SIZE)).mean(3) for x in (k, v)]
        k, v = (torch.cat([self.learned.expand(len(x), -1, -1, -1), x], 2) for x in means)
        return (q @ k.mT).softmax(-1) @ v


def test_tokens_stay_tokens_where_a_submodule_sees_them_alone():
    read = read_module(drawn(Sequence(ToBlocks(), ToBlocks())), Example((random("blocks", 3, 8, D),)))
    assert [call.lead.heads for call in read.heads] == [H, H]
    assert read.axes.tokens == (1,)


class OfAClass(nn.Module):
    """A class token that reads itself and all tokens, with heads that are mixed before and behind the softmax."""

    def __init__(self):
        super().__init__()
        self.of_layers = nn.ModuleList(Attention(self.mixed) for _ in range(2))
        self.parts = nn.ModuleList(MLP() for _ in range(2))
        self.token, self.before, self.behind = (nn.Parameter(torch.zeros(*shape)) for shape in ((D,), (H, H), (H, H)))

    def mixed(self, q, k, v, _):
        scores = torch.einsum("bhnm,hg->bgnm", q @ k.mT, self.before)
        return torch.einsum("bhnm,hg->bgnm", scores.softmax(-1), self.behind) @ v

    def forward(self, x):
        token = self.token.expand(len(x), 1, D)
        for attention, part in zip(self.of_layers, self.parts, strict=True):
            token = token + attention(token, torch.cat([token, x], 1))
            token = token + part(token)
        return token[:, 0]


def test_heads_of_a_class_token_count_where_they_are_mixed():
    """Two heads each in a layer of tokens, a, and two of the class, b and c: paths b, c; ab, ac, bc; abc. The
    learned token begins one of no head."""
    tape = record(drawn(nn.Sequential(Sequence(Attention(written_out)), OfAClass())), states())
    assert tape.paths().by_length == [1, 4, 12, 8]
    assert tape.reading.mixing == ()


class LinearAttention(Attention):
    """Attention as q (k^T v), whose way out is in a list."""

    def __init__(self):
        super().__init__(lambda q, k, v, _: F.relu(q) @ (F.relu(k).mT @ v))
        self.out = nn.Sequential(nn.Linear(D, D), nn.Identity())


def test_what_mixes_all_tokens_is_named_beside_what_mixes_some():
    near = Along(nn.Conv1d(D, D, 3, padding=1))
    module = drawn(Sequence(Attention(written_out), LinearAttention(), near, Attention(by_kernel)))
    assert set(record(module, states()).reading.mixing) == {"parts.1", "parts.2"}


class ExpertsOfSlots(nn.Module):
    """Experts of two slots each, which read means of the tokens and whose results are mixed for each token."""

    def __init__(self, read):
        super().__init__()
        self.slots, self.maps = nn.Parameter(torch.zeros(3, 2, D)), nn.Parameter(torch.zeros(3, D, D))
        self.read = read

    def forward(self, x):
        scores_BNES = torch.einsum("bnd,esd->bnes", x, self.slots)
        made_BESD = self.read(x, scores_BNES.softmax(1)) @ self.maps
        weights_BNS = scores_BNES.flatten(2).softmax(-1)
        return torch.einsum("bsd,bns->bnd", made_BESD.flatten(1, 2), weights_BNS)


READ = {
    "einsum": lambda x, p_BNES: torch.einsum("bnd,bnes->besd", x, p_BNES),
    "experts in front": lambda x, p_BNES: torch.einsum("bnd,bnes->ebsd", x, p_BNES).transpose(0, 1),
    "matmul": lambda x, p_BNES: p_BNES.movedim(1, -1) @ x[:, None],
    "all slots": lambda x, p_BNES: (p_BNES.flatten(2).mT @ x).unflatten(1, (3, 2)),
}


@pytest.mark.parametrize("name", READ)
def test_slots_of_several_experts_are_no_tokens(name):
    module = drawn(Sequence(Attention(written_out), ExpertsOfSlots(READ[name]), Attention(by_kernel)))
    tape = record(module, states())
    reading = tape.reading
    assert [factor.why for factor in reading.factors] == [
        "sums over what weights without scores pooled, as channels of keys or slots of experts are"
    ]
    assert [call.lead.heads for call in reading.calls] == [H, 1, H]
    assert tape.paths().by_length == [1, 5, 8, 4]


def test_slots_of_one_expert_after_another_are_refused():
    def in_a_loop(x, p_BNES):
        return torch.stack([p_BNS.mT @ x for p_BNS in p_BNES.unbind(2)], 1)

    module = drawn(Sequence(ExpertsOfSlots(in_a_loop), Attention(by_kernel)))
    assert "slots of several experts, written as a loop" in refusal(record, module, states())


class Axial(nn.Module):
    """Attention along the rows of a grid, x (B, D, R, N), each in the batch with the heads, behind a convolution."""

    def __init__(self):
        super().__init__()
        self.near = nn.Conv2d(D, D, 3, padding=1)
        self.maps = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        rows = (x + self.near(x)).permute(0, 2, 3, 1)
        q, k, v = (heads_of(part(rows.flatten(0, 1))).flatten(0, 1) for part in self.maps)
        y = joined(((q @ k.mT).softmax(-1) @ v).unflatten(0, (-1, H)))
        return x + y.unflatten(0, rows.shape[:2]).permute(0, 3, 1, 2)


def test_rows_that_a_convolution_has_joined_are_not_taken_for_heads():
    """The touch of one token stands in three rows, each with all heads."""
    assert "give the heads an axis of their own" in refusal(record, drawn(Axial()), random("grid", B, D, 6, N))


class ToQueries(nn.Module):
    """Attention of queries that are given, for all sequences the same, to states."""

    def __init__(self):
        super().__init__()
        self.before, self.attention = Sequence(Attention(written_out)), Attention(by_kernel)

    def forward(self, x, queries):
        return self.attention(queries.expand(len(x), -1, -1), self.before(x))


def test_an_input_that_all_sequences_share_joins_none():
    example = Example((states(),), {"queries": random("queries", 4, D)})
    read = read_module(drawn(ToQueries()), example)
    assert [call.lead.heads for call in read.heads] == [H, H]
    assert read.axes.tokens == (1,)


class WithALoss(Sequence):
    """The states, and one number for all sequences."""

    def forward(self, x):
        return super().forward(x), x.new_zeros(1)


def test_a_result_of_one_number_is_read():
    read = read_module(drawn(WithALoss(Attention(written_out))), Example((states(),)))
    assert [output.shape for output in read.reading.outputs] == [(3, N, D), (1,)]  # of three sequences


def test_weights_may_be_multiplied_by_a_number():
    """As in the iteration for a pseudoinverse, which begins with the weights over their largest sums."""

    def scaled(q, k, v, _):
        p = (q @ k.mT).softmax(-1)
        return p * (p.sum(-2).amax() * p.amax()) @ v

    assert record(drawn(Sequence(Attention(scaled))), states()).paths().by_length == [1, H]


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_scores_over_the_size_of_their_sum_are_linear(least):
    """As in a retention (Sun et al. 2023)."""

    def over_sums(q, k, v, _):
        scores = q @ k.mT
        return scores / scores.abs().sum(-1, keepdim=True).clamp(min=least) @ v

    reading = record(drawn(Sequence(Attention(over_sums))), states()).reading
    assert [(call.kind, call.lead.heads) for call in reading.calls] == [("linear", H)]


class LearnsInside(Sequence):
    """Attention to which the gradient of a loss is added, as in a memory that learns."""

    def forward(self, x):
        return super().forward(x) + torch.func.grad(lambda y: super(LearnsInside, self).forward(y).square().sum())(x)


def test_gradients_by_torch_func_are_refused():
    assert "within torch.func" in refusal(record, drawn(LearnsInside(Attention(written_out))), states())

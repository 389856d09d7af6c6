"""torch's flex_attention, whose scores and masks are functions of indices: as the same attention written out.

Shapes: B sequence, N token, D width, H head.
"""

import itertools

import pandas as pd
import pytest
import torch
from every_path import NO_PATH
from networks_of_others import Attention, B, D, H, N, Sequence, drawn, random, states
from path_checks import TWO, assert_same_paths
from refusals import refusal
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import rankbench
from rankbench.tape import record, tap

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SLOPES = random("slopes", H).abs()  # of ALiBi
DOCUMENTS = (torch.arange(B)[:, None] + torch.arange(N)) // 3  # one after another in a sequence


def is_past(b, h, query, key):
    return query >= key


def is_of_document(b, h, query, key):
    return DOCUMENTS[b, query] == DOCUMENTS[b, key]


def with_slopes(score, b, h, query, key):
    return score - SLOPES[h] * (query - key).abs()


def capped(score, b, h, query, key):
    return 3 * (score / 3).tanh()


MASKS = {
    None: torch.ones(N, N, dtype=torch.bool),
    is_past: torch.ones(N, N, dtype=torch.bool).tril(),
    is_of_document: (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])[:, None],
}
CHANGES = {
    None: lambda scores: scores,
    with_slopes: lambda scores: scores - SLOPES[:, None, None] * (torch.arange(N)[:, None] - torch.arange(N)).abs(),
    capped: lambda scores: 3 * (scores / 3).tanh(),
}


def flexible(change, is_seen, function=flex_attention):
    """Mixing by torch's function, with a mask that is made when it is called."""

    def mix(q, k, v, _):
        mask = None if is_seen is None else create_block_mask(is_seen, B, None, N, N, device="cpu")
        return function(q, k, v, score_mod=change, block_mask=mask, enable_gqa=True)

    return mix


def written_out(change, is_seen):
    def mix(q, k, v, _):
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        scores = CHANGES[change](q @ k.mT / q.shape[-1] ** 0.5)
        return scores.masked_fill(~MASKS[is_seen], -torch.inf).softmax(-1) @ v

    return mix


def network(mix, **how):
    return drawn(Sequence(*[Attention(mix, **how) for _ in range(2)]))


@pytest.mark.parametrize(
    ("change", "is_seen", "groups"), [*itertools.product(CHANGES, MASKS, [H]), (with_slopes, is_of_document, 1)]
)
def test_paths_are_those_of_the_same_attention_written_out(change, is_seen, groups):
    one, other = (network(way(change, is_seen), groups=groups) for way in (flexible, written_out))
    assert_same_paths(one, other, states(), TWO)


def test_the_compiled_function_is_read_alike():
    compiled = torch.compile(flex_attention, backend="eager")
    one, other = (network(flexible(with_slopes, is_past, of)) for of in (compiled, flex_attention))
    assert_same_paths(one, other, states(), TWO)


@pytest.mark.parametrize("is_seen", MASKS)
def test_calls_show_weights_and_scores_of_the_same_attention_written_out(is_seen):
    found = []
    for way in (flexible, written_out):
        seen = []
        tap(
            network(way(with_slopes, is_seen)),
            lambda call, seen=seen: seen.append((call.weights, call.logits())),
            states(),
        )
        found.append(seen)
    for (p, logits), (p_out, logits_out) in zip(*found, strict=True):
        torch.testing.assert_close(p, p_out)
        torch.testing.assert_close(logits, logits_out)


class Sharpened(Attention):
    """Its function of indices reads a number that changes after each call."""

    def __init__(self):
        super().__init__(None)
        self.mix, self.sharpness = self._mix, 1.0

    def _mix(self, q, k, v, _):
        result = flex_attention(q, k, v, score_mod=lambda score, *_: score * self.sharpness)
        self.sharpness = 0.5
        return result

    def forward(self, x):
        self.sharpness = 2.0
        return super().forward(x)


def test_what_functions_of_indices_read_may_change_after_the_call():
    tape = record(drawn(Sequence(Sharpened())), states())
    assert tape.sums().remainder < NO_PATH


class Counted(nn.Module):
    """Activations by way of whole numbers that vmap turns into others."""

    def __init__(self):
        super().__init__()
        self.table, self.attention = nn.Embedding(D, D), Attention(flexible(None, None))

    def forward(self, x):
        largest = torch.vmap(lambda index: (index + 1) % D)(x.argmax(-1))
        return self.attention(x + self.table(largest))


def test_whole_numbers_that_activations_made_are_refused_within_vmap():
    assert "within torch.func" in refusal(record, drawn(Counted()), states())


@pytest.mark.parametrize("analysis", ["attention", "residual", "path_mass"])
def test_tables_are_those_of_the_same_attention_written_out(analysis):
    networks = [
        drawn(nn.Sequential(*[Attention(way(with_slopes, is_past)) for _ in range(2)]))
        for way in (flexible, written_out)
    ]
    numbers = [rankbench.analyze(x, states(), analysis)[analysis].select_dtypes("number") for x in networks]
    floors = [name for name in numbers[0] if name.endswith("noise_floor")]
    measured = numbers[0].columns.drop(floors)
    pd.testing.assert_frame_equal(*(x[measured] for x in numbers), rtol=1e-9, atol=1e-12)
    # rounding at random, once for torch's function and at each operation of what is written out
    ratios = numbers[0][floors].mean() / numbers[1][floors].mean()
    assert ((ratios > 0.5) & (ratios < 2)).all() and (floors or analysis == "path_mass")

"""Attention in unusual company or writing: once misread in silence, now right against every path, or refused.

Shapes: B sequence, N token, M key token, D width, H head, K head width.
"""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from every_path import NO_PATH
from networks_of_others import (
    LETTERS,
    MLP,
    Along,
    Attention,
    B,
    D,
    H,
    N,
    Of,
    Sequence,
    SequenceFirst,
    by_kernel,
    drawn,
    flattened,
    heads_of,
    joined,
    letters,
    random,
    states,
    written_out,
)
from path_checks import THREE, TWO, assert_every_path, assert_same_paths
from refusals import refusal
from torch import nn

from rankbench.measures.module_reading import Asked, read_module
from rankbench.model.modules import Example
from rankbench.tape import record
from rankbench.tape.probe import Touched
from rankbench.tape.read import read
from rankbench.tape.reading import Axes, Lead
from rankbench.tape.tags import Role, Verdict

# --- tokens mixed by something that is no attention, between two layers of attention ---------------------------------


class TokenMap(nn.Module):
    """A map of the token axis, as in MLP-Mixer; gated: times a sigmoid of the state, as in gMLP."""

    def __init__(self, gated=False):
        super().__init__()
        self.tokens, self.gate, self.gated = nn.Linear(N, N), nn.Linear(D, D), gated

    def forward(self, x):
        y = self.tokens(x.mT).mT
        return self.gate(x).sigmoid() * y if self.gated else y


def wide_convolution():
    """A convolution of the tokens for each number, whose kernel reaches all of them."""
    return Along(nn.Conv1d(D, D, 2 * N - 1, padding=N - 1, groups=D))


class AttentionFree(nn.Module):
    """A sum of values over the tokens, weighted number by number by a softmax, gated (Zhai et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        return self.q(x).sigmoid() * (self.k(x).softmax(1) * self.v(x)).sum(1, keepdim=True)


class VectorAttention(Attention):
    """Weights of each channel's own, made of the difference of a query and a key, as in Point Transformer."""

    def __init__(self):
        super().__init__(by_kernel)
        self.weights = nn.Linear(D, D)

    def forward(self, x):
        w_BNMD = self.weights(F.relu(self.q(x)[:, :, None] - self.k(x)[:, None])).softmax(2)
        return self.out((w_BNMD * self.v(x)[:, None]).sum(2))


class FeatureMaps(Attention):
    """Linear attention as q (k^T v), which sees all tokens."""

    def __init__(self):
        super().__init__(lambda q, k, v, _: F.elu(q) @ (F.elu(k).mT @ v))


# --- attention within windows and over fewer tokens ------------------------------------------------------------------


class Dilated(Attention):
    """Attention between every second token."""

    def forward(self, x):
        apart = x.unflatten(1, (-1, 2)).transpose(1, 2)  # (B, 2, N / 2, D)
        return super().forward(apart.flatten(0, 1)).unflatten(0, (-1, 2)).transpose(1, 2).flatten(1, 2)


class Shifted(Attention):
    """Attention within windows that are shifted by one token, as in Swin."""

    def forward(self, x):
        windows = x.roll(-1, 1).unflatten(1, (2, -1))
        return super().forward(windows.flatten(0, 1)).unflatten(0, (-1, 2)).flatten(1, 2).roll(1, 1)


class PooledKeys(Attention):
    """Attention to tokens that a convolution with a stride has joined in pairs."""

    def __init__(self):
        super().__init__(by_kernel)
        self.pool = nn.Conv1d(D, D, 2, stride=2)

    def forward(self, x):
        return super().forward(x, self.pool(x.mT).mT)


class SquaredReLU(Attention):
    """Weights relu(q k^T / sqrt(K) - 1)^2 / N: some queries see no key."""

    def __init__(self):
        super().__init__(lambda q, k, v, _: ((F.relu(q @ k.mT / q.shape[-1] ** 0.5 - 1) ** 2).clone() / N) @ v)


class Cached(Attention):
    """Attention to keys and values of earlier tokens, too. turned: which have their heads behind the tokens."""

    def __init__(self, mix, turned):
        super().__init__(mix)
        self.turned = turned

    def forward(self, x, past, mask):
        past = [y.transpose(1, 2) for y in past] if self.turned else past
        k, v = (torch.cat([old, heads_of(part(x))], 2) for old, part in zip(past, (self.k, self.v), strict=True))
        return self.out(joined(self.mix(heads_of(self.q(x)), k, v, mask < 0)))


class Continued(nn.Module):
    """Layers that read the new tokens of a sequence."""

    def __init__(self, mix, turned):
        super().__init__()
        self.tokens, self.layers = nn.Embedding(LETTERS, D), nn.ModuleList(Cached(mix, turned) for _ in range(2))

    def forward(self, x, pasts, mask):
        x = self.tokens(x)
        for layer, past in zip(self.layers, pasts, strict=True):
            x = x + layer(x, past, mask)
        return x


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("mix", [written_out, by_kernel])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_new_tokens_read_cached_keys_in_all_heads(new, mix, turned):
    shape = (B, 4, H, D // H) if turned else (B, H, 4, D // H)
    pasts = [[random(f"{name} {layer}", *shape) for name in "kv"] for layer in range(2)]
    mask = torch.full((B, 1, new, 4 + new), torch.finfo(torch.float64).min, dtype=torch.float64).triu(5)
    reading = record(drawn(Continued(mix, turned)), letters(new), pasts, mask).reading
    assert [(call.lead.heads, call.num_keys) for call in reading.calls] == [(H, 4 + new)] * 2
    assert reading.mixing == ()


def between(*mixers):
    """Layers of attention with something else between them."""
    parts = [Attention(by_kernel), *(part for mixer in mixers for part in (mixer, Attention(by_kernel)))]
    return drawn(Sequence(*parts))


# module(), numbers of paths by length, tokens, and how `Held` reads it: its weights, and the modules whose results it
# holds
DESIGNS = {
    "mean of the tokens": (lambda: between(Of(lambda x: x.mean(1, keepdim=True))), TWO, N, "softmax", ()),
    "token map": (lambda: between(TokenMap()), TWO, N, "softmax", ()),
    "gated token map": (lambda: between(TokenMap(gated=True), TokenMap()), THREE, N, "softmax", ()),
    "wide convolution": (lambda: between(wide_convolution(), MLP()), THREE, N, "softmax", ()),
    "attention-free": (lambda: between(AttentionFree()), TWO, N, "softmax", ()),
    "vector attention": (lambda: between(VectorAttention()), TWO, N, "softmax", ()),
    "linear attention": (lambda: between(FeatureMaps()), TWO, N, "softmax", ("q",)),
    "dilated": (lambda: drawn(Sequence(Dilated(by_kernel), Dilated(by_kernel))), TWO, 2 * B, "softmax", ()),
    "shifted windows": (lambda: drawn(Sequence(Shifted(by_kernel), Shifted(by_kernel))), TWO, 2 * B, "softmax", ()),
    "pooled keys": (lambda: drawn(Sequence(PooledKeys(), PooledKeys())), TWO, 2 * B, "softmax", ()),
}  # fmt: skip


@pytest.mark.parametrize("name", DESIGNS)
def test_paths_and_axes_are_read_behind_mixed_tokens_and_within_windows(name):
    build, num_paths, tokens, p, maps = DESIGNS[name]
    module, x = build(), states("states", tokens)
    held = [getattr(layer, part) for layer in module.modules() if isinstance(layer, FeatureMaps) for part in maps]
    tape = assert_every_path(module, {"x": x}, num_paths, p, held)
    assert {call.lead.heads for call in tape.reading.calls} == {H}
    assert tape.reading.outputs[0].axes == Axes(0, (1,))


SINGLE = {
    "softmax": lambda: Attention(written_out),
    "powers": lambda: Attention(lambda q, k, v, _: F.normalize((q @ k.mT) ** 4, 1, -1) @ v),
    "linear": lambda: Attention(lambda q, k, v, _: (q @ k.mT).tril() @ v / N),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_sequence_is_read_as_several_are(name):
    module = drawn(Sequence(Attention(by_kernel), SINGLE[name](), MLP(), Attention(written_out)))
    tape, several = (record(module, x=states()[:number]) for number in (1, B))
    assert tape.paths().by_length == several.paths().by_length
    assert [call.kind for call in tape.reading.calls] == [call.kind for call in several.reading.calls]
    assert tape.reading.mixing == () == several.reading.mixing


class Projected(Attention):
    """Keys and values are mapped along their tokens to a few slots, before or behind their own maps (Linformer)."""

    def __init__(self, mix, before=False, slots=4):
        super().__init__(mix)
        self.keys, self.values, self.before = nn.Linear(N, slots), nn.Linear(N, slots), before

    def forward(self, x):
        if self.before:
            q, k, v = self.q(x), self.k(self.keys(x.mT).mT), self.v(self.values(x.mT).mT)
            return self.out(joined(self.mix(heads_of(q), heads_of(k), heads_of(v), None)))
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        return self.out(joined(self.mix(q, self.keys(k.mT).mT, self.values(v.mT).mT, None)))


class WithMeans(Attention):
    """Attention to the tokens and what was made of all of them: their mean, running sums, a wide convolution."""

    def __init__(self, also):
        super().__init__(by_kernel)
        self.also, self.convolution = also, wide_convolution()

    def forward(self, x):
        return super().forward(x, self.also(self, x))


SLOTS = {
    "written out": lambda: Projected(written_out),
    "kernel": lambda: Projected(by_kernel),
    "before the maps": lambda: Projected(written_out, before=True),
    "as many slots as tokens": lambda: Projected(written_out, slots=N),
    "mean and tokens": lambda: WithMeans(lambda m, x: torch.cat([x.mean(1, keepdim=True), x], 1)),
    "running sums": lambda: WithMeans(lambda m, x: x.cumsum(1)),
    "wide convolution": lambda: WithMeans(lambda m, x: m.convolution(x)),
}


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("before", [0, 1])
def test_keys_that_are_made_of_all_tokens_are_read_and_their_mixing_is_named(name, before):
    module = drawn(Sequence(*[Attention(by_kernel)] * before, SLOTS[name](), MLP(), Attention(written_out)))
    (where,) = assert_every_path(module, {"x": states()}, [TWO, THREE][before]).reading.mixing
    assert where == f"parts.{before}" + (".convolution" if name == "wide convolution" else "")


@pytest.mark.parametrize("slots", [3, 4, N])
@pytest.mark.parametrize("sequences", [1, B])
def test_flattened_heads_of_slots_are_heads(slots, sequences):
    parts = [Projected(mix, slots=slots) for mix in (flattened, lambda q, k, v, _: (q @ k.mT).softmax(-1) @ v)]
    one, other = (drawn(Sequence(part, Attention(by_kernel))) for part in parts)
    assert_same_paths(one, other, states()[:sequences], TWO)


# --- heads that nothing joins before the next call --------------------------------------------------------------------


def several_steps(mix, sums):
    """A sum of values to which the heads were applied again and again, as in the diffusion of a graph."""

    def applied(q, k, v, _):
        once = mix(q, k, v, None)
        twice = mix(k, q, once, None)
        return v + once + twice if sums else twice

    return Attention(applied)


class HeadByHead(nn.Module):
    """Each head reads a part of the state, and adds to it."""

    def __init__(self, mix):
        super().__init__()
        self.mix, self.q, self.k, self.v = mix, *(nn.Linear(D // H, D // H) for _ in range(3))

    def forward(self, x):
        return x + joined(self.mix(*(part(heads_of(x)) for part in (self.q, self.k, self.v)), None))


APART = {
    "twice": (lambda mix: [several_steps(mix, False)], [1, 0, 2]),
    "powers": (lambda mix: [several_steps(mix, True)], [1, 2, 2]),
    "behind a layer": (lambda mix: [Attention(mix), several_steps(mix, False)], [1, 2, 2, 4]),
    "before a layer": (lambda mix: [several_steps(mix, False), Attention(mix)], [1, 2, 2, 4]),
    "a norm between": (lambda mix: [HeadByHead(mix), HeadByHead(mix)], [1, 4, 4]),
    "parts of the state": (lambda mix: [nn.Sequential(*(HeadByHead(mix) for _ in range(3)))], [1, 6, 6, 2]),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("mix", [written_out, by_kernel])
def test_heads_that_nothing_joins_lead_to_their_own_alone(name, mix):
    build, num_paths = APART[name]
    paths = assert_every_path(drawn(Sequence(*build(mix))), {"x": states()}, num_paths).paths()
    through = sum(paths.through.values()) * H  # every path, once for each head that it passes
    assert through == sum(length * count for length, count in enumerate(num_paths))


# --- the same network written in other ways --------------------------------------------------------------------------


# a sequence pooled by a softmax over its tokens, w (B, N, H) and x (B, N, H, K) to (B, H, K)
POOLINGS = {
    "matrices": lambda w, x: (w.mT[:, :, None] @ x.transpose(1, 2)).squeeze(2),
    "product and sum": lambda w, x: (w[..., None] * x).sum(1),
    "the same, swapped": lambda w, x: (x * w[..., None]).sum(1, keepdim=True).squeeze(1),
    "einsum": lambda w, x: torch.einsum("bnh,bnhk->bhk", w, x),
    "einsum, swapped": lambda w, x: torch.einsum("bnhk,bnh->bhk", x, w),
}


class Pooled(nn.Module):
    """Attention, and heads of one query that no input reaches."""

    def __init__(self, pool):
        super().__init__()
        self.body, self.scores, self.out, self.pool = Attention(by_kernel), nn.Linear(D, H), nn.Linear(D, D), pool

    def weights(self, y):
        return self.scores(y).softmax(1)

    def forward(self, x):
        y = x + self.body(x)
        return self.out(self.pool(self.weights(y), heads_of(y).transpose(1, 2)).flatten(1))


@pytest.mark.parametrize("name", POOLINGS)
@torch.no_grad()
def test_a_pooled_sequence_has_heads_however_it_is_written(name):
    """The sums by length of the states before it, pooled by the recorded weights, are longer by one."""
    module, x = drawn(Pooled(POOLINGS[name])), random("pooled", B, N, D)
    tape = record(module, x)
    assert tape.paths().by_length == [0, H, H * H]
    assert [(call.lead.heads, call.shape[-2:]) for call in tape.reading.calls][-1] == (H, (1, N))
    w_BHN1 = module.weights(x + module.body(x)).mT[..., None]
    before = record(lambda x: x + module.body(x), x).sums().by_length_KBND
    pooled = [(w_BHN1 * heads_of(part)).sum(2).flatten(1) for part in before]
    wanted = [module.out.bias.expand(B, D), *(part @ module.out.weight.T for part in pooled)]
    for got_BD, wanted_BD in zip(tape.sums().by_length_KBND, wanted, strict=True):
        torch.testing.assert_close(got_BD, wanted_BD)


# one query at a time, with the keys that it sees: w (B, H, N, J) and v (B, H, N, J, K) to (B, H, N, K)
WINDOWS = {
    "matrices": lambda w, v: (w[..., None, :] @ v).squeeze(-2),
    "product and sum": lambda w, v: (w[..., None] * v).sum(3),
    "einsum": lambda w, v: torch.einsum("bhnj,bhnjk->bhnk", w, v),
}


class Sliding(Attention):
    """Each token sees those up to `before` and `after` it: from windows of keys, or by a mask of all of them."""

    def __init__(self, mix, before, after, unfolded=False):
        super().__init__(written_out)
        self.mix, self.before, self.after, self.unfolded = mix, before, after, unfolded

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        here, size = torch.arange(x.shape[1]), self.before + self.after + 1
        if self.mix is None:
            apart_NM = here - here[:, None]
            hidden_NM = (apart_NM < -self.before) | (apart_NM > self.after)
            return self.out(joined((q @ k.mT).masked_fill(hidden_NM, -torch.inf).softmax(-1) @ v))
        seen_NJ = here[:, None] + torch.arange(size) - self.before
        keys, values = (F.pad(y, (0, 0, self.before, self.after)) for y in (k, v))
        if self.unfolded:
            keys, values = (y.unfold(2, size, 1).mT for y in (keys, values))
        else:
            keys, values = (y[:, :, seen_NJ + self.before] for y in (keys, values))
        scores = (q[..., None, :] * keys).sum(-1).masked_fill((seen_NJ < 0) | (seen_NJ >= len(here)), -torch.inf)
        return self.out(joined(self.mix(scores.softmax(-1), values)))


def chosen(mix):
    """Each token sees the three with the largest scores: gathered, or by a mask of all of them."""

    def attend(q, k, v, _):
        scores = q @ k.mT
        most = scores.topk(3, -1)
        if mix is None:
            return scores.masked_fill(scores < most.values[..., -1:], -torch.inf).softmax(-1) @ v
        each = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
        return mix(most.values.softmax(-1), v[(*each, most.indices)])

    return Attention(attend)


SEEN = {
    "both sides": lambda mix: Sliding(mix, 1, 1),
    "before": lambda mix: Sliding(mix, 2, 0),
    "after": lambda mix: Sliding(mix, 0, 1),
    "unfolded": lambda mix: Sliding(mix, 2, 1, unfolded=True),
    "chosen": chosen,
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("seen", SEEN)
def test_keys_that_are_gathered_for_each_query_are_keys(seen, name):
    """In three layers, and with the sums of the same attention by a mask."""
    module, usual = (drawn(Sequence(*(SEEN[seen](mix) for _ in range(3)))) for mix in (WINDOWS[name], None))
    tape, _ = assert_same_paths(module, usual, random("gathered", B, 2 * N, D), THREE)
    assert [call.lead.heads for call in tape.reading.calls] == [H] * 3


# P v of all heads together, p (B, H, N, N) and v (B, H, N, D) to (B, N, D)
SUMS_OF_HEADS = {
    "einsum": lambda p, v: torch.einsum("bhnm,bhmd->bnd", p, v),
    "einsum, heads after tokens": lambda p, v: torch.einsum("bnhm,bmhd->bnd", p.transpose(1, 2), v.transpose(1, 2)),
    "product and sum": lambda p, v: (p[..., None] * v[:, :, None]).sum((1, 3)),
}


class HeadsTogether(Attention):
    """Values that have passed the output's map of their head before they are mixed, and a sum over heads and keys."""

    def __init__(self, mix):
        super().__init__(written_out)
        self.mix = mix

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        of_heads_HKD = self.out.weight.T.unflatten(0, (H, -1))
        return self.mix((q @ k.mT / (D // H) ** 0.5).softmax(-1), v @ of_heads_HKD) + self.out.bias


@pytest.mark.parametrize("name", SUMS_OF_HEADS)
def test_heads_that_are_summed_with_their_keys_are_heads(name):
    module = drawn(Sequence(*(HeadsTogether(SUMS_OF_HEADS[name]) for _ in range(2))))
    usual = drawn(Sequence(*(Attention(written_out) for _ in range(2))))
    assert_same_paths(module, usual, random("together", B, N, D), TWO)


@pytest.mark.parametrize("swapped", [False, True])
def test_vectors_of_weights_are_rows(swapped):
    """A product for each head of one pooled sequence."""

    def by_vectors(w, x):
        rows = ((w[0, :, h], x[0, :, h]) for h in range(H))
        return torch.stack([x_NK.T @ w_N if swapped else w_N @ x_NK for w_N, x_NK in rows])[None]

    module, usual = drawn(Pooled(by_vectors)), drawn(Pooled(POOLINGS["matrices"]))
    assert_same_paths(module, usual, random("vectors", 1, N, D), [0, H, H * H])


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_what_torch_compiled_is_recorded_as_python_code():
    module, usual, x = between(MLP()), between(MLP()), states()
    module.parts[0].compile(backend="eager")
    module(x)
    assert_same_paths(module, usual, x)
    assert_same_paths(torch.compile(module, backend="eager"), usual, x)


class TiedRows(Attention):
    """Several rows of tokens, as in aligned sequences, whose heads have one P for all rows: x (B, R, N, D)."""

    def __init__(self, is_einsum):
        super().__init__(written_out)
        self.is_einsum = is_einsum

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (H, -1)) for part in (self.q, self.k, self.v))
        if self.is_einsum:
            p = torch.einsum("brnhk,brmhk->bhnm", q, k).softmax(-1)
            return self.out(torch.einsum("bhnm,brmhk->brnhk", p, v).flatten(3))
        q, k, v = (y.permute(0, 3, 2, 1, 4).flatten(3) for y in (q, k, v))
        mixed = (q @ k.mT).softmax(-1) @ v
        return self.out(mixed.unflatten(3, (x.shape[1], -1)).permute(0, 3, 2, 1, 4).flatten(3))


def test_rows_that_share_their_weights_have_heads_however_they_are_written():
    x = random("rows", 3, 4, 6, D)
    one, other = (drawn(Sequence(TiedRows(is_einsum), MLP(), TiedRows(is_einsum))) for is_einsum in (True, False))
    assert_same_paths(one, other, x, TWO)


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 4), (1, 7), (2, 2), (7, 7), (16, 3)])
def test_tokens_first_are_tokens_whatever_the_sizes(sequences, tokens):
    module = drawn(SequenceFirst(Sequence(Attention(by_kernel), MLP())))
    found = read_module(module, Example((random("tokens first", tokens, sequences, D),)))
    assert found.axes == Axes(1, (0,)) and found.example.num_sequences == sequences


class Beside(nn.Module):
    """Attention beside a convolution."""

    def __init__(self):
        super().__init__()
        self.attention, self.convolution = Attention(by_kernel), nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x):
        return self.attention(x) + self.convolution(x.mT).mT


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_convolution_beside_the_last_attention_is_named_whatever_the_number_of_sequences(sequences):
    tape = record(drawn(Sequence(Attention(by_kernel), Beside())), states()[:sequences])
    assert tape.reading.mixing == ("parts.1",)


class OfTheBatch(nn.Module):
    """Attention of the tokens of a sequence, and of the sequences at a token."""

    def __init__(self):
        super().__init__()
        self.tokens, self.sequences = Attention(by_kernel), Attention(by_kernel)

    def forward(self, x):
        of_tokens = self.tokens(x)
        return self.sequences(of_tokens.transpose(0, 1)).transpose(0, 1), of_tokens


def test_a_result_in_which_sequences_mix_is_not_measured():
    module, x = drawn(OfTheBatch()), states()
    assert [output.is_apart for output in read(module, (x,)).outputs] == [False, True]
    assert "holds changes 0 of others" in refusal(read_module, module, Example((x,)))
    assert read_module(module, Example((x,)), Asked(output="1")).target.name == "1"


def softmax_of_both(x):
    return x.flatten(-2).softmax(-1).view_as(x)


def exponentials_of_both(x):
    return x.exp() / x.exp().sum((-2, -1), keepdim=True)


class OfAGrid(Attention):
    """Queries and keys along two axes, x (B, R, N, D); softmax: over both axes of keys, else the grid is flattened."""

    def __init__(self, softmax=None):
        super().__init__(written_out)
        self.softmax = softmax

    def forward(self, x):
        if self.softmax is None:
            return super().forward(x.flatten(1, 2)).view_as(x)
        q, k, v = (part(x).unflatten(-1, (H, -1)) for part in (self.q, self.k, self.v))
        p = self.softmax(torch.einsum("brnhk,bsmhk->bhrnsm", q, k) / (D // H) ** 0.5)
        return self.out(torch.einsum("bhrnsm,bsmhk->brnhk", p, v).flatten(3))


@pytest.mark.parametrize("softmax", [softmax_of_both, exponentials_of_both])
def test_keys_along_two_axes_are_keys(softmax):
    x = random("grid", 3, 4, 5, D)
    one, other = (drawn(Sequence(OfAGrid(how), MLP(), OfAGrid(how))) for how in (softmax, None))
    tapes = assert_same_paths(one, other, x, TWO)
    assert [{call.shape for call in tape.reading.calls} for tape in tapes] == [{(3, H, 20, 20)}] * 2


class Rolled(nn.Module):
    """Windows of four tokens, which the second layer shifts by two; padded to whole windows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention(by_kernel) for _ in range(2))

    def forward(self, x):
        y = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
        for layer, shift in zip(self.layers, (0, 2), strict=True):
            windows = y.roll(shift, 1).unflatten(1, (-1, 4))
            y = (windows + layer(windows.flatten(0, 1)).view_as(windows)).flatten(1, 2).roll(-shift, 1)
        return y[:, : x.shape[1]]


def test_sequences_are_told_from_tokens_at_the_same_place_in_shifted_windows():
    reading = read(drawn(Rolled()), (states(),))
    assert reading.outputs[0].axes == Axes(0, (1,)) and reading.inputs[0].axes.batch == 0
    assert {call.lead.heads for call in reading.calls} == {H}


# what experts give, (B, N, E, D), summed with a router's weights w (B, N, E)
MIXTURES = {
    "matrices": lambda w, x: (w[:, :, None] @ x).squeeze(2),
    "matrices, tokens in the batch": lambda w, x: torch.bmm(w.flatten(0, 1)[:, None], x.flatten(0, 1)).view(B, N, D),
    "product and sum": lambda w, x: (w[..., None] * x).sum(2),
    "einsum": lambda w, x: torch.einsum("bne,bned->bnd", w, x),
    "experts first": lambda w, x: torch.einsum("bne,ebnd->bnd", w, x.permute(2, 0, 1, 3)),
}


class Sparse(nn.Module):
    """Experts that give zeros for tokens that the router does not send them."""

    def __init__(self, mix, most):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 4), nn.ModuleList(MLP() for _ in range(4))
        self.mix, self.most = mix, most

    def forward(self, x):
        scores = self.router(x)
        sent = scores >= scores.topk(self.most, -1).values[..., -1:]
        each = [expert(x) * sent[..., number, None] for number, expert in enumerate(self.experts)]
        return self.mix(scores.masked_fill(~sent, -torch.inf).softmax(-1), torch.stack(each, 2))


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_sparse_experts_are_no_heads_however_they_are_summed(name, most):
    module, written = (between(Sparse(MIXTURES[mix], most)) for mix in (name, "product and sum"))
    tape, _ = assert_same_paths(module, written, random("experts", B, N, D), TWO)
    assert len(tape.reading.calls) == 2


class Stacked(nn.Module):
    """Each token goes to its best two experts, whose weights lie in one tensor; experts run one after the other."""

    def __init__(self):
        super().__init__()
        self.router, self.weights = nn.Linear(D, 4), nn.Parameter(torch.zeros(4, D, D))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).topk(2, -1)
        shares, sent, result = scores.softmax(-1), F.one_hot(chosen, 4).permute(2, 1, 0), torch.zeros_like(tokens)
        for (expert,) in (sent.sum((-1, -2)) > 0).nonzero():
            rank, token = torch.where(sent[expert])
            result.index_add_(0, token, tokens[token] @ self.weights[expert] * shares[token, rank, None])
        return result.view_as(x)


def test_experts_whose_weights_lie_in_one_tensor_are_maps():
    tape = record(between(Stacked()), random("experts", B, N, D))
    assert tape.paths().by_length == TWO and not tape.reading.mixing
    assert tape.sums().remainder < NO_PATH


def in_wide_windows(q, k, v, _):
    """Windows of three blocks that slide over the tokens by one block; of two blocks of tokens each holds all."""
    tokens, size = q.shape[2], q.shape[2] // 2
    k, v = (F.pad(y, (0, 0, size, size)).unfold(2, 3 * size, size).mT for y in (k, v))
    is_token = F.pad(torch.ones(tokens, dtype=torch.bool), (size, size)).unfold(0, 3 * size, size)
    scores = q.unflatten(2, (2, size)) @ k.mT
    return (scores.masked_fill(~is_token[:, None], -torch.inf).softmax(-1) @ v).flatten(2, 3)


class BlocksAndGlobals(Attention):
    """Queries in blocks of two tokens that attend to learned queries' summaries of all tokens."""

    def __init__(self):
        super().__init__(written_out)
        self.summaries = nn.Parameter(torch.zeros(H, 3, D // H))

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        summed = (self.summaries @ k.mT).softmax(-1) @ v
        p = torch.einsum("bhwnk,bhgk->bhwng", q.unflatten(2, (-1, 2)), summed).softmax(-1)
        return self.out(joined(torch.einsum("bhwng,bhgk->bhwnk", p, summed).flatten(2, 3)))


@pytest.mark.parametrize(("build", "calls"), [(lambda: Attention(in_wide_windows), 1), (BlocksAndGlobals, 2)])
def test_windows_and_blocks_of_queries_are_no_heads(build, calls):
    found = read(drawn(Sequence(build(), build())), (states(tokens=6),)).calls
    assert [call.lead.heads for call in found] == [H] * 2 * calls


def keys_pooled_by_channel(has_softmax):
    """A softmax of each channel of keys over the tokens pools values, which queries read, with a softmax or without."""
    return Attention(lambda q, k, v, _: (q.softmax(-1) if has_softmax else q) @ (k.softmax(-2).mT @ v))


class SlotsOfMatrices(nn.Module):
    """An expert that reads means of the tokens, and whose results are mixed for each token (Puigcerver et al. 2024)."""

    def __init__(self, slots=3):
        super().__init__()
        self.slots, self.expert = nn.Parameter(torch.zeros(D, slots)), nn.Linear(D, D)

    def forward(self, x):
        scores = x @ self.slots
        return scores.softmax(2) @ self.expert(scores.softmax(1).mT @ x)


@pytest.mark.parametrize("slots", [2, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_slots_of_experts_are_told_whatever_the_numbers(slots, seed):
    """Where the touch moved the weights of one slot a hundred times less than those of another, they were heads."""
    module, x = drawn(Sequence(Attention(written_out), SlotsOfMatrices(slots), Attention(by_kernel))), states()
    for parameter in module.parameters():
        parameter += 0.1 * random(f"{seed} {tuple(parameter.shape)}", *parameter.shape)
    assert record(module, x=x).paths().by_length == [1, 5, 8, 4]


@pytest.mark.parametrize("has_softmax", [False, True])
def test_what_was_pooled_into_channels_is_no_sequence_of_tokens(has_softmax):
    """Its sum is a frozen factor, so that a path gets longer where tokens are pooled, and not once more."""
    tape = record(drawn(Sequence(*(keys_pooled_by_channel(has_softmax) for _ in range(2)))), x=states())
    assert tape.paths().by_length == TWO
    assert tape.sums().remainder < NO_PATH


class DecayedScan(Attention):
    """A scan by matrices, as in Mamba-2: scores of queries and keys times decays that the token says, no softmax."""

    def __init__(self, of_features=torch.clone, weights=torch.mul):
        super().__init__(written_out)
        self.decay, self.of_features, self.weights = nn.Linear(D, H), of_features, weights

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        passed_BHN = F.softplus(self.decay(x)).mT.cumsum(-1)
        ages_BHNM = (passed_BHN[..., None] - passed_BHN[..., None, :]).tril()
        scores_BHNM = self.of_features(q) @ self.of_features(k).mT
        return self.out(joined(self.weights(scores_BHNM, (-ages_BHNM).exp().tril()) @ v))


def test_a_scan_is_read_alike_before_and_behind_the_softmax_of_experts():
    """Of states that are known by their value alone, behind a function without a rule."""

    class Scaled(Sparse):
        def forward(self, x):
            return self.router(x).softmax(-1)[..., :1] * self.experts[0](x)

    def layers(number):
        return [part for _ in range(number) for part in (Of(torch.sinc), DecayedScan(), Scaled(None, 1))]

    calls = read(drawn(Sequence(*layers(2), Attention(written_out))), (states(),)).calls
    assert [(call.kind, call.lead.heads) for call in calls] == [("softmax", H)]


DECAYED = {
    "scores": (torch.mul, False),
    "scores over their sum": (lambda scores, decays: F.normalize(scores * decays, 1, -1), False),
    "exponentials of scores": (lambda scores, decays: decays * (0.1 * scores).exp(), True),
    "a difference of exponentials": (lambda scores, decays: (0.1 * scores).exp() - (-0.1 * scores).exp(), True),
}


@pytest.mark.parametrize("of_features", [torch.clone, torch.relu])
@pytest.mark.parametrize("name", DECAYED)
def test_scores_times_decays_are_factors_whatever_their_sign(name, of_features):
    weights, are_heads = DECAYED[name]
    reading = record(drawn(Sequence(Attention(by_kernel), DecayedScan(of_features, weights))), x=states()).reading
    assert [call.lead.heads for call in reading.calls] == ([H, H] if are_heads else [H])
    why = "scores times exponentials, as the decays of a scan are"
    assert [factor.why for factor in reading.factors] == ([] if are_heads else [why])


def test_layers_of_the_same_code_that_are_read_differently_are_refused(monkeypatch):
    verdict = Touched.verdict

    def forgetful(self, product):
        found = verdict(self, product)
        if found.role == Role.ATTENTION and "2" in self.where:
            found = self.roles[self.key_of(product.seen)] = Verdict(Role.FACTOR)
        return found

    monkeypatch.setattr(Touched, "verdict", forgetful)
    said = r"^torch.Tensor.matmul in .*[01].* and in .*2.*: the same code, .*alone"
    assert re.search(said, refusal(record, drawn(Sequence(*(Attention(written_out) for _ in range(3)))), states()))


def test_layers_of_the_same_code_with_other_numbers_of_heads_are_refused(monkeypatch):
    with_twin = Touched._with_twin

    def forgetful(self, call, *others):
        return with_twin(self, replace(call, lead=Lead(1)) if "2" in self.where else call, *others)

    monkeypatch.setattr(Touched, "_with_twin", forgetful)
    said = refusal(record, drawn(Sequence(*(Attention(written_out) for _ in range(3)))), states())
    assert f"the same code, and by the touch {H} and 1 heads in P of shape {(B, H, N, N)}" in said


@pytest.mark.parametrize("seed", range(4))
def test_weights_of_queries_that_see_no_key_are_weights(seed):
    module = drawn(Sequence(SquaredReLU(), SquaredReLU()))
    reading = record(module, x=random(f"sparse {seed}", B, N, D)).reading
    assert [(call.lead.heads, call.is_sure) for call in reading.calls] == [(H, True)] * 2


# --- refused ---------------------------------------------------------------------------------------------------------


class MixedInside(Attention):
    """Attention whose own submodule mixes all tokens first."""

    def __init__(self):
        super().__init__(written_out)
        self.mixer = wide_convolution()

    def forward(self, x):
        return super().forward(self.mixer(x))


class SharedKeys(nn.Module):
    """One head of keys and values for N heads of queries, by einsum."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(D, N * 4), nn.Linear(D, 4)

    def forward(self, x):
        q, k = self.q(x).unflatten(-1, (N, 4)), self.k(x)
        p = torch.einsum("bnhk,bmk->bnhm", q, k).softmax(-1)
        return torch.einsum("bnhm,bmk->bnhk", p, k).mean(2)


class RelativeValues(Attention):
    """Values of relative positions beside those of tokens (Shaw et al. 2018)."""

    def __init__(self):
        super().__init__(by_kernel)
        self.table = nn.Embedding(2 * N, D // H)

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        p = (q @ k.mT).softmax(-1)
        relative_NMK = self.table(torch.arange(N) - torch.arange(N)[:, None] + N)
        return self.out(joined(p @ v + torch.einsum("bhnm,nmk->bhnk", p, relative_NMK)))


def of_edges(form):
    """Keys and values that depend on the query, too, as where edges, or relative positions, are added to both."""

    def mix(q, k, v, _):
        edges_NMK = random("edges", N, N, D // H)
        k, v = k[:, :, None] + edges_NMK, v[:, :, None] + edges_NMK
        if form == "heads in the batch":
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if form == "einsum":
            p = torch.einsum("bhnk,bhnmk->bhnm", q, k).softmax(-1)
            return torch.einsum("bhnm,bhnmk->bhnk", p, v)
        p = (q[..., None, :] * k).sum(-1).softmax(-1)
        return (p[..., None] * v).sum(-2).view(B, H, N, -1)

    return mix


@pytest.mark.parametrize("form", ["einsum", "sum"])
def test_values_of_each_query_have_the_heads_of_others(form):
    module = drawn(Sequence(*[Attention(of_edges(form)) for _ in range(2)]))
    tape = assert_every_path(module, {"x": states()}, TWO)
    assert [call.words for call in tape.reading.calls] == ["softmax", "softmax"]
    folded = drawn(Sequence(*[Attention(of_edges("heads in the batch")) for _ in range(2)]))
    assert_same_paths(folded, module, states(), TWO)


def test_torch_names_some_functions_twice():
    def by_other_names(q, k, v, _):
        scores = torch.linalg.matmul(q, k.mT) * torch.special.expit(torch.tensor(0.3))
        return torch.linalg.matmul(torch.special.softmax(scores, -1), v)

    def mix(q, k, v, _):
        return (q @ k.mT * torch.tensor(0.3).sigmoid()).softmax(-1) @ v

    assert_same_paths(
        *(drawn(Sequence(*[Attention(x) for _ in range(2)])) for x in (by_other_names, mix)), states(), TWO
    )


class Alone(nn.Module):
    """One head of one sequence, without an axis for either."""

    def __init__(self):
        super().__init__()
        self.maps = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.maps(x).chunk(3, -1)
        return (q @ k.T).softmax(-1) @ v


def test_one_head_of_one_sequence_is_read():
    tape = record(drawn(Sequence(Alone(), Alone())), states()[0])
    assert tape.paths().by_length == [1, 2, 1]
    assert tape.sums().remainder < NO_PATH


class Mapped(Attention):
    """Attention of one sequence at a time by vmap."""

    def forward(self, x):
        return torch.func.vmap(lambda x: super(Mapped, self).forward(x[None])[0])(x)


class Scripted(nn.Module):
    """Attention before a part in TorchScript."""

    def __init__(self):
        super().__init__()
        self.attention, self.part = Attention(by_kernel), torch.jit.script(nn.ReLU())

    def forward(self, x):
        return self.part(self.attention(x))


class Cast(Attention):
    """Attention in bfloat16."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def in_blocks(q, k, v, _):
    """Causal linear attention of one block of tokens after another, which carries k^T v along."""
    outputs, state = [], 0
    for queries, keys, values in zip(*(x.split(2, 2) for x in (q, k, v)), strict=True):
        outputs.append((queries @ keys.mT).tril() @ values + (queries @ state if outputs else 0))
        state = state + keys.mT @ values
    return torch.cat(outputs, 2)


class InParts(nn.Module):
    """A module that reads some of the sequences after others."""

    def __init__(self, sizes):
        super().__init__()
        self.part, self.sizes = Sequence(Attention(by_kernel), MLP()), sizes

    def forward(self, x):
        return torch.cat([self.part(some) for some in x.split(self.sizes)])


def summed_over_queries(p, v):
    return torch.einsum("bhnm,bhmk->bhk", p, v)[:, :, None].expand_as(v)


def in_parts(parts):
    """Attention whose `mix` runs once for each of several parts (q, k, v)."""

    def mix(q, k, v, hidden):
        return torch.cat([written_out(*part, hidden) for part in parts(q, k, v)], 2)

    return lambda: Sequence(Attention(mix))


def _of_query(q_BHK, k, v):
    p_BHM = torch.einsum("bhk,bhmk->bhm", q_BHK, k).softmax(-1)
    return torch.einsum("bhm,bhmk->bhk", p_BHM, v)


def _summed(q, k, v):
    return ((q * k).sum(-1).softmax(-1)[..., None] * v).sum(2)


IN_A_LOOP = "attention of some queries or sequences after others, written as a loop"
REFUSED = {
    "sequence by sequence": (lambda: Sequence(InParts(1)), IN_A_LOOP),
    "sequences in two parts": (lambda: InParts(B - 2), IN_A_LOOP),
    "query by query": (in_parts(lambda q, k, v: [(row, k, v) for row in q.split(1, 2)]), IN_A_LOOP),
    "query by query, by einsum": (
        lambda: Sequence(Attention(lambda q, k, v, _: torch.stack([_of_query(x, k, v) for x in q.unbind(2)], 2))),
        IN_A_LOOP,
    ),
    "query by query, by a sum": (
        lambda: Sequence(Attention(lambda q, k, v, _: torch.stack([_summed(x, k, v) for x in q.split(1, 2)], 2))),
        IN_A_LOOP,
    ),
    "blocks of queries": (in_parts(lambda q, k, v: [(rows, k, v) for rows in q.split(3, 2)]), IN_A_LOOP),
    "queries with the keys so far": (
        in_parts(lambda q, k, v: [(q[:, :, [n]], k[:, :, : n + 1], v[:, :, : n + 1]) for n in range(N)]),
        IN_A_LOOP,
    ),
    "linear attention in blocks": (
        lambda: Sequence(Attention(in_blocks)),
        "attention in blocks of tokens, or sequence by sequence",
    ),
    "tokens mixed inside": (lambda: Sequence(Attention(by_kernel), MixedInside()), "has mixed all tokens"),
    "as many heads as tokens": (SharedKeys, "which axis counts heads and which tokens"),
    "relative values": (RelativeValues, "same weights in two arrangements"),
    "vmap": (lambda: Mapped(written_out), "within torch.func"),
    "queries summed with their keys": (
        lambda: Sequence(Attention(lambda q, k, v, _: summed_over_queries((q @ k.mT).softmax(-1), v))),
        "nothing shows how it applies attention weights",
    ),
    "weights times weights": (
        lambda: Sequence(Attention(lambda q, k, v, _: ((q @ k.mT).softmax(-1) @ (k @ q.mT).softmax(-1)) @ v)),
        "multiplies attention weights by other weights of attention",
    ),
    "autocast": (lambda: Sequence(Cast(written_out)), "within torch.autocast"),
    "TorchScript": (Scripted, "part: TorchScript"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_cannot_be_told_is_refused_in_one_line(name):
    build, message = REFUSED[name]
    assert message in refusal(record, drawn(build()), x=states())


class OfTextAndLayout(nn.Module):
    """A layer of a text and its layout side by side, whose scores are summed for both, as in LiLT."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.ModuleDict({name: nn.Linear(D, D) for name in "qkv"}) for _ in range(2))

    def forward(self, x, y):
        each = [[heads_of(maps[name](state)) for name in "qkv"] for maps, state in zip(self.maps, (x, y), strict=True)]
        scores, of_layout = (q @ k.mT / 3 for q, k, _ in each)
        read_y = (of_layout + scores).softmax(-1) @ each[1][2]
        read_x = (scores + of_layout).softmax(-1) @ each[0][2]
        return x + joined(read_x), y + joined(read_y)


class Layouts(nn.Module):
    """Layers of a text and its boxes (B, N, 4)."""

    def __init__(self, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(50, D), nn.Embedding(50, D)
        self.layers = nn.ModuleList(OfTextAndLayout() for _ in range(layers))

    def forward(self, ids, boxes):
        x, y = self.words(ids), self.places(boxes[..., 0]) + self.places(boxes[..., 2])
        for layer in self.layers:
            x, y = layer(x, y)
        return x


@pytest.mark.parametrize("layers", [1, 2])
def test_a_layout_beside_its_text_is_no_loop(layers):
    boxes = torch.randint(3, 49, (B, N, 4), generator=torch.Generator().manual_seed(0))
    tape = record(drawn(Layouts(layers)), letters(), boxes)
    assert [call.lead.heads for call in tape.reading.calls if call.twin is None] == [H] * layers
    assert tape.paths().by_length == (TWO if layers == 2 else [1, H])
    assert tape.sums().remainder < NO_PATH


class BatchedMaps(nn.Module):
    """Maps of their own for each head, applied to copies of the states, with heads in one axis with sequences."""

    def __init__(self, is_outside):
        super().__init__()
        self.is_outside, self.out = is_outside, nn.Linear(D, D)
        self.maps = nn.ParameterList(nn.Parameter(torch.zeros(H, D, D // H)) for _ in range(3))

    def forward(self, x):
        copies = x.repeat(H, 1, 1) if self.is_outside else x.repeat_interleave(H, 0)
        maps = (w.repeat_interleave(len(x), 0) if self.is_outside else w.repeat(len(x), 1, 1) for w in self.maps)
        q, k, v = (torch.bmm(copies, w) for w in maps)
        mixed = (q @ k.mT).softmax(-1) @ v
        by_head = mixed.unflatten(0, (H, -1) if self.is_outside else (-1, H)).movedim(0 if self.is_outside else 1, 2)
        return x + self.out(by_head.flatten(2))


@pytest.mark.parametrize("is_outside", [False, True])
def test_heads_of_batched_maps_are_not_counted_by_the_width_of_the_maps(is_outside):
    module = drawn(nn.Sequential(BatchedMaps(is_outside), BatchedMaps(is_outside)))
    assert [call.lead.heads for call in record(module, states()).reading.calls] == [H, H]

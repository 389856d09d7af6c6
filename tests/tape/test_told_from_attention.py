"""Sums that are told from attention by where the touched token is, heads that are told from queries and windows, and
attention that is refused because no product shows its heads.

Shapes: B sequence, N query token, M key token, D width, H head, K head width, E expert, C candidate or edge.
"""

import pytest
import rewrites
import torch
import torch.nn.functional as F
from every_path import NO_PATH
from networks_of_others import (
    MLP,
    Along,
    Attention,
    B,
    D,
    H,
    N,
    Of,
    Sequence,
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
from path_checks import TWO, assert_every_path, assert_same_paths
from refusals import refusal
from torch import nn

from rankbench.measures.module_reading import read_module
from rankbench.measures.network_table import in_words, table_of_reading
from rankbench.model.modules import Example
from rankbench.tape import record, tap


def attention(mix):
    """A layer of heads whose outputs are mix(q, k, v)."""
    return Attention(lambda q, k, v, _: mix(q, k, v))


def around(layer):
    return drawn(Sequence(Attention(written_out), layer, Attention(by_kernel)))


# --- sums over something else than tokens -----------------------------------------------------------------------------


class OneHotExperts(nn.Module):
    """Each token goes to one expert, by products with one-hot vectors; an expert sees zeros for the others' tokens."""

    def __init__(self, experts=3):
        super().__init__()
        self.router, self.experts = nn.Linear(D, experts), nn.ModuleList(MLP() for _ in range(experts))

    def forward(self, x):
        shares_BNE = self.router(x).softmax(-1)
        sent_BNE = F.one_hot(shares_BNE.argmax(-1), len(self.experts)).to(x)
        given_EBND = torch.einsum("bne,bnd->ebnd", sent_BNE, x)
        made_BEND = torch.stack([expert(part) for expert, part in zip(self.experts, given_EBND, strict=True)], 1)
        return torch.einsum("bend,bne->bnd", made_BEND, sent_BNE * shares_BNE)


class WithSlots(nn.Module):
    """Experts with four slots, to each of which one token goes and from which that token is answered. chooses: each
    expert takes the tokens that want it most; else tokens take the next slot of the expert that they want."""

    def __init__(self, chooses, is_matrix, experts=3, slots=4):
        super().__init__()
        self.router, self.maps = nn.Linear(D, experts), nn.Parameter(torch.zeros(experts, D, D))
        self.chooses, self.is_matrix, self.slots = chooses, is_matrix, slots

    def forward(self, x):
        shares_BNE = self.router(x).softmax(-1)
        if self.chooses:
            most_BES, tokens_BES = shares_BNE.mT.topk(self.slots, -1)
            sent_BNES = F.one_hot(tokens_BES, N).to(x).permute(0, 3, 1, 2)
            weights_BNES = sent_BNES * most_BES[:, None]
        else:
            wanted_BNE = F.one_hot(shares_BNE.argmax(-1), shares_BNE.shape[-1])
            places_BN = ((wanted_BNE.cumsum(1) - 1) * wanted_BNE).sum(-1)
            has_place_BNE = (wanted_BNE * (places_BN < self.slots)[..., None]).to(x)
            places_BNS = F.one_hot(places_BN.clamp(max=self.slots - 1), self.slots).to(x)
            sent_BNES = has_place_BNE[..., None] * places_BNS[:, :, None]
            weights_BNES = sent_BNES * shares_BNE[..., None]
        if self.is_matrix:
            given_BESD = (sent_BNES.flatten(2).mT @ x).unflatten(1, (-1, self.slots))
            return weights_BNES.flatten(2) @ (given_BESD @ self.maps).flatten(1, 2)
        given_EBSD = torch.einsum("bnes,bnd->ebsd", sent_BNES, x)
        return torch.einsum("bnes,ebsd->bnd", weights_BNES, torch.einsum("ebsd,edf->ebsf", given_EBSD, self.maps))


class Gated(nn.Module):
    """A token as the mean of its state and of learned vectors, weighted by a softmax of its own."""

    def __init__(self):
        super().__init__()
        self.gate, self.learned = nn.Linear(D, 3), nn.Parameter(torch.zeros(2, D))

    def forward(self, x):
        candidates_BNCD = torch.stack([x, *(vector.expand_as(x) for vector in self.learned)], 2)
        return (self.gate(x).softmax(-1)[..., None, :] @ candidates_BNCD)[:, :, 0]


class Fused(nn.Module):
    """Several inputs, each token of which is a weighted mean of theirs."""

    def __init__(self, inputs):
        super().__init__()
        self.maps, self.gate = nn.ModuleList(nn.Linear(D, D) for _ in range(inputs)), nn.Linear(inputs * D, inputs)
        self.body = Sequence(Attention(written_out), MLP(), Attention(written_out))

    def forward(self, **inputs):
        candidates_BNCD = torch.stack([part(x) for part, x in zip(self.maps, inputs.values(), strict=True)], 2)
        shares_BNC = self.gate(candidates_BNCD.flatten(2)).softmax(-1)
        return self.body((shares_BNC[..., None] * candidates_BNCD).sum(2))


class OfFeatures(nn.Module):
    """Attention among features, or groups of them, in front of all maps."""

    def __init__(self, mix):
        super().__init__()
        self.mix, self.body = mix, Sequence(Attention(written_out), MLP(), Attention(written_out))

    def forward(self, x):
        return self.body(x + self.mix(x))


def of_channels(x):
    return ((x.mT @ x / N).softmax(-1) @ x.mT).mT


def of_groups(x):
    groups = x.unflatten(-1, (D // 4, 4))
    return ((groups @ groups.mT).softmax(-1) @ groups).flatten(2)


NO_HEADS = {
    "experts by one-hot vectors": lambda: around(OneHotExperts()),
    "slots": lambda: around(WithSlots(False, False)),
    "slots as a matrix": lambda: around(WithSlots(False, True)),
    "experts choose": lambda: around(WithSlots(True, False)),
    "experts choose, as a matrix": lambda: around(WithSlots(True, True)),
    "slots, first": lambda: drawn(Sequence(WithSlots(False, True), *(Attention(written_out) for _ in range(2)))),
    "a gate to learned vectors": lambda: around(Gated()),
    "channels": lambda: drawn(OfFeatures(of_channels)),
    "groups of features": lambda: drawn(OfFeatures(of_groups)),
}


@pytest.mark.parametrize("name", NO_HEADS)
def test_a_sum_for_each_token_by_itself_is_no_attention(name):
    assert_every_path(NO_HEADS[name](), {"x": states()}, TWO)


@pytest.mark.parametrize("groups", [4, 2])
def test_torchs_kernel_among_channels_is_the_factor_that_its_formula_is(groups):
    """As in XCiT, of four heads, of which so many groups share keys."""

    def mix(x):
        q, k = heads_of(x, 4).mT, heads_of(x, 4)[:, :groups].mT
        return joined(by_kernel(q, k, k, None, enable_gqa=True).mT)

    tape, _ = assert_same_paths(around(Of(mix)), rewrites.written_out(around(Of(mix))), states(), TWO)
    factor = "factor, of torch.nn.functional.scaled_dot_product_attention"
    assert [each.kind for each in tape.sums().frozen if "norm" not in each.kind] == [
        "attention weights", factor, "attention weights",
    ]  # fmt: skip


class ChannelsOfAnImage(nn.Module):
    """Attention among the channels of each head, as in DaViT, behind a convolution of each channel by itself."""

    def __init__(self):
        super().__init__()
        self.near = nn.Conv2d(D, D, 3, padding=1, groups=D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        x = x + self.near(x.mT.unflatten(2, (-1, 6))).flatten(2).mT
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        return joined(((k.mT @ v).softmax(-1) @ q.mT).mT)


@pytest.mark.parametrize("share", [1, 0.1, 0.01])
def test_channels_that_a_convolution_touches_are_no_queries(share):
    """share: of its weights. At a tenth some channels of the keys hold more of a neighbour than the values do."""
    module = drawn(nn.Sequential(Sequence(Attention(written_out)), ChannelsOfAnImage()))
    module[1].near.weight.mul_(share)
    assert [call.kind for call in record(module, random("image", 3, 36, D)).reading.calls] == ["softmax"]


@pytest.mark.parametrize("number", [2, 3])
def test_a_mean_of_inputs_is_no_attention(number):
    assert_every_path(drawn(Fused(number)), {name: states(name) for name in "xyz"[:number]}, TWO)


# --- heads ------------------------------------------------------------------------------------------------------------


def with_chosen_queries(q, k, v):
    """Each head answers its three longest queries, the others get the mean of the values."""
    longest = q.norm(dim=-1).topk(3, -1).indices[..., None].expand(-1, -1, -1, q.shape[-1])
    mixed = (q.gather(2, longest) @ k.mT).softmax(-1) @ v
    return v.mean(2, keepdim=True).expand_as(v).clone().scatter(2, longest, mixed)


def test_heads_that_choose_their_queries_are_heads():
    tape = record(drawn(Sequence(attention(with_chosen_queries), MLP(), attention(with_chosen_queries))), states())
    assert tape.paths().by_length == TWO
    assert tape.sums().remainder < NO_PATH


class ToLearnedToken(nn.Module):
    """A learned token that reads the states, layer by layer: in the first, its queries depend on no input."""

    def __init__(self, mix):
        super().__init__()
        self.body, self.token = Sequence(Attention(written_out)), nn.Parameter(torch.ones(1, D))
        self.layers = nn.ModuleList(Attention(mix) for _ in range(2))

    def forward(self, x):
        x, token = self.body(x), self.token.expand(len(x), 1, -1)
        for layer in self.layers:
            token = token + layer(token, torch.cat([token, x], 1))
        return token


def test_queries_that_depend_on_no_input_are_read_as_the_kernel_is():
    assert_same_paths(*(drawn(ToLearnedToken(mix)) for mix in (written_out, by_kernel)), states())


class ToMemory(nn.Module):
    """Tokens that read as many others; with scores or with weights that are transposed."""

    def __init__(self, mix):
        super().__init__()
        self.cross, self.layer = Attention(mix), Attention(by_kernel)

    def forward(self, x, memory):
        x = x + self.cross(x, memory)
        return x + self.layer(x)


@pytest.mark.parametrize(
    "mix",
    [
        written_out,
        lambda q, k, v, _: (k @ q.mT).softmax(-2).mT @ v,
        lambda q, k, v, _: (v.mT @ (q @ k.mT).softmax(-1).mT).mT,
        lambda q, k, v, _: (v.mT @ (k @ q.mT).softmax(-2)).mT,
        lambda q, k, v, _: torch.einsum("bhmn,bhmk->bhnk", (k @ q.mT).sigmoid() / N, v),
    ],
)
def test_queries_are_told_from_keys_when_weights_are_transposed(mix):
    tape = record(drawn(ToMemory(mix)), x=states(), memory=states("memory"))
    assert [call.is_cross for call in tape.reading.calls] == [True, False]
    itself = record(drawn(Sequence(Attention(mix), MLP(), Attention(mix))), states())
    assert [call.is_cross for call in itself.reading.calls] == [False, False]


class ToInducingTokens(nn.Module):
    """Learned tokens read the sequence by torch's own module, which multiplies them again in each pass."""

    def __init__(self):
        super().__init__()
        self.tokens, self.attention = nn.Parameter(torch.zeros(3, D)), nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x):
        return self.attention(self.tokens.expand(len(x), -1, -1), x, x)[0]


def test_rounding_is_no_touch():
    tape = record(drawn(nn.Sequential(ToInducingTokens(), Sequence(Attention(by_kernel)))), states())
    assert [call.is_cross for call in tape.reading.calls] == [True, False]


class PreallocatedHeads(Attention):
    """Each head writes its result to memory that was made for all of them, or adds it to zeros."""

    def __init__(self, start):
        super().__init__(None)
        self.start = start

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        made = self.start(q)
        for head in range(H):
            made[:, head] += (q[:, head] @ k[:, head].mT).softmax(-1) @ v[:, head]
        return self.out(joined(made))


def written(q, k, v):
    made = torch.empty_like(q)
    for head in range(H):
        made[:, head] = (q[:, head] @ k[:, head].mT).softmax(-1) @ v[:, head]
    return made


def put_by_index(q, k, v):
    every = torch.where(torch.ones(q.shape[:3]) > 0)
    return torch.zeros_like(q).index_put_(every, ((q @ k.mT).softmax(-1) @ v)[every])


MEMORY = {
    "written": lambda: attention(written),
    "put by index": lambda: attention(put_by_index),
    "added to zeros": lambda: PreallocatedHeads(torch.zeros_like),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_for_the_results_of_heads_begins_no_path(name):
    tape = record(drawn(nn.Sequential(MEMORY[name](), Sequence(Attention(by_kernel)))), states())
    assert tape.paths().by_length == [0, 2, 4]


def test_layers_of_one_class_may_make_their_weights_in_two_ways():
    module = drawn(Sequence(attention(lambda q, k, v: additive(q, k) @ v), MLP(), Attention(written_out)))
    assert_every_path(module, {"x": states()}, TWO)


class Pooled(nn.Module):
    """Tokens that are present, pooled by a softmax over them."""

    def __init__(self):
        super().__init__()
        self.body, self.weights, self.out = Sequence(Attention(written_out)), nn.Linear(D, 1), nn.Linear(D, 3)

    def forward(self, x, present):
        x = self.body(x)
        weights = self.weights(x).masked_fill(~present[..., None], -torch.inf).softmax(1)
        return self.out((weights * x).sum(1))


def test_a_pool_is_found_where_the_touched_token_is_padding():
    lengths = torch.full((B,), N)
    lengths[-1] = N - 3
    module = drawn(Pooled())
    tape = record(module, x=states(), present=torch.arange(N) < lengths[:, None])
    assert tape.paths().by_length == [0, 1, 2]


# --- refused ----------------------------------------------------------------------------------------------------------

TO, FROM = torch.arange(N).repeat_interleave(N), torch.arange(N).repeat(N)


def over_edges(q, k, v):
    """Additive attention over a list of edges."""
    powers_BHC = (q.sum(-1)[..., TO] + k.sum(-1)[..., FROM]).tanh().exp()
    sums_BHN = torch.zeros(*q.shape[:3], dtype=q.dtype).index_add(2, TO, powers_BHC)
    return torch.zeros_like(v).index_add(2, TO, (powers_BHC / sums_BHN[..., TO])[..., None] * v[:, :, FROM])


def additive(q, k):
    return (q[:, :, :, None] + k[:, :, None]).tanh().sum(-1).softmax(-1)


def key_by_key(q, k, v):
    p = additive(q, k)
    return sum(p[..., [key]] * v[:, :, [key]] for key in range(p.shape[-1]))


def sorted_by_each_head(q, k, v):
    """Each head sorts the tokens by its own numbers, and attends within halves."""
    order = q.sum(-1).argsort(-1)[..., None].expand_as(q)
    q, k, v = (x.gather(2, order).unflatten(2, (2, -1)) for x in (q, k, v))
    mixed = ((q @ k.mT).softmax(-1) @ v).flatten(2, 3)
    return torch.zeros_like(mixed).scatter(2, order, mixed)


class SharedKeys(nn.Module):
    """Four query heads side by side in the rows of P, for one key head."""

    def __init__(self, kernel):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), *(nn.Linear(D, D // 4) for _ in range(2))
        self.kernel = kernel

    def forward(self, x):
        q, k, v = (
            self.q(x).unflatten(-1, (4, -1)),
            *(part(x)[:, None].expand(-1, x.shape[1], -1, -1) for part in (self.k, self.v)),
        )
        mixed = F.scaled_dot_product_attention(q, k, v) if self.kernel else (q @ k[:, :1].mT).softmax(-1) @ v[:, :1]
        return mixed.flatten(2)


class DynamicConvolution(nn.Module):
    """Windows of three tokens, weighted by a softmax of what a convolution gives their middle one, as in ConvBERT."""

    def __init__(self):
        super().__init__()
        self.convolution, self.weights = nn.Conv1d(D, D, 3, padding=1), nn.Linear(D, 3)

    def forward(self, x):
        windows_BNKD = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mT
        weights_BNK = self.weights(x * self.convolution(x.mT).mT).softmax(-1)
        return (weights_BNK.flatten(0, 1)[:, None] @ windows_BNKD.flatten(0, 1)).view_as(x)


class Twice(nn.Module):
    """Two versions of each sequence in one batch."""

    def __init__(self):
        super().__init__()
        self.body = Sequence(Attention(flattened))

    def forward(self, x):
        one, other = self.body(torch.cat([x, 2 * x])).chunk(2)
        return one - other


class PoolingBy(Pooled):
    """A pool whose weights something comes between."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def forward(self, x):
        x = self.body(x)
        return self.out(self.reduce(self.weights(x).softmax(1) * x))


class SequenceBySequence(Pooled):
    """A pool of one sequence after the other."""

    def forward(self, x):
        x = self.body(x)
        return self.out(torch.stack([self.weights(tokens).softmax(0).mT.mm(tokens)[0] for tokens in x]))


class InInferenceMode(Sequence):
    @torch.inference_mode()
    def forward(self, x):
        return super().forward(x)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.body = nn.LazyLinear(D, dtype=torch.float64), Sequence(Attention(written_out)).double()

    def forward(self, x):
        return self.body(self.first(x))


class GraphAttention(nn.Module):
    """Weights of the neighbours on a ring, by a leaky rectifier of a number of the query and one of the key."""

    def __init__(self):
        super().__init__()
        self.values, self.query, self.key = nn.Linear(D, D), nn.Linear(D, H), nn.Linear(D, H)

    def forward(self, x):
        scores = F.leaky_relu(self.query(x).mT[..., None] + self.key(x).mT[:, :, None], 0.001)
        apart = (torch.arange(N)[:, None] - torch.arange(N)) % N
        p = scores.masked_fill((apart > 1) & (apart < N - 1), -9e15).softmax(-1)
        return (p @ self.values(x).unflatten(-1, (H, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)


class Synthesised(Attention):
    """Weights that each query makes alone, as in the Synthesizer."""

    def __init__(self):
        super().__init__(written_out)
        self.weights = nn.Linear(D // H, N)

    def forward(self, x):
        q, v = (part(x).unflatten(-1, (H, -1)).transpose(1, 2) for part in (self.q, self.v))
        return self.out((self.weights(q.relu()).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("layer", [GraphAttention, Synthesised])
def test_the_touch_stays_on_one_token_whatever_made_the_weights(layer):
    tape = record(drawn(Sequence(layer(), layer())), states("apart"))
    assert tape.paths().by_length == TWO
    assert tape.reading.mixing == ()


def renormalised(q, k, v):
    """Weights below the third largest are left out, and the others divided by their sum."""
    p = (q @ k.mT).softmax(-1)
    p = p * (p >= p.topk(3, -1).values[..., -1:])
    return p / p.sum(-1, keepdim=True) @ v


def test_weights_that_are_compared_with_each_other_are_weights():
    module = drawn(Sequence(attention(renormalised), MLP(), attention(renormalised)))
    assert record(module, states()).paths().by_length == TWO


def by_clusters(q, k, v):
    """Queries share the weights of their cluster."""
    own_BHNC = F.one_hot(q[..., :3].argmax(-1), 3).to(q)
    return own_BHNC @ (q[:, :, :3] @ k.mT / 40).softmax(-1) @ v


def first(mix):
    return lambda: drawn(Sequence(attention(mix), MLP(), Attention(written_out)))


NOT_COVERED = "is not covered, and may be attention"


class GroupsByTorch(nn.Module):
    """Attention among groups of features by torch's own module, with the tokens beside the sequences in one axis."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        groups = x.unflatten(-1, (-1, 4)).flatten(0, 1)
        return self.attention(groups, groups, groups, need_weights=False)[0].reshape(x.shape)


def in_front(layer):
    return drawn(nn.Sequential(layer, Sequence(Attention(written_out))))


REFUSED = {
    "groups of features beside tokens": (lambda: around(GroupsByTorch()), "are of one token"),
    "the same, in front": (lambda: in_front(GroupsByTorch()), "are of one token"),
    "the same, by a softmax": (
        lambda: in_front(Of(lambda x: of_groups(x.flatten(0, 1)).view_as(x))),
        "has mixed all tokens",
    ),
    "edges": (first(over_edges), "index_add comes before any sum"),
    "key by key": (first(key_by_key), "add comes before any sum"),
    "a sum by linear": (
        first(
            lambda q, k, v: (
                torch.stack([F.linear(p, x.mT) for p, x in zip(additive(q, k)[:, 0], v[:, 0], strict=True)])[:, None]
                + 0 * v
            )
        ),
        NOT_COVERED,
    ),
    "out=": (first(lambda q, k, v: torch.matmul(additive(q, k), v, out=torch.empty_like(v))), NOT_COVERED),
    "a dynamic convolution": (lambda: around(DynamicConvolution()), "attention or a dynamic convolution"),
    "sorted by each head": (first(sorted_by_each_head), "reaches other windows in each head"),
    "heads among the queries": (lambda: drawn(Sequence(SharedKeys(False))), "are of one token"),
    "heads among the kernel's queries": (lambda: drawn(Sequence(SharedKeys(True))), "are of one token"),
    "two versions, heads flattened": (lambda: drawn(Twice()), "not the heads of one sequence"),
    "one P for the values of several heads": (
        first(lambda q, k, v: (q[:, :1] @ k[:, :1].mT).softmax(-1) @ v),
        "these side by side",
    ),
    "weights of clusters": (first(by_clusters), "from the side of their queries"),
    "a mean of weighted tokens": (lambda: drawn(PoolingBy(lambda x: x.mean(1))), "mean comes before any sum"),
    "a scaled pool": (lambda: drawn(PoolingBy(lambda x: (x / 2).sum(1))), "div comes before any sum"),
    "pooled one by one": (
        lambda: drawn(SequenceBySequence()),
        "or sequence by sequence, of which",
    ),
    "inference mode": (lambda: drawn(InInferenceMode(Attention(written_out))), "within torch.inference_mode"),
    "a lazy module": (Lazy, "first: a lazy module has no weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_whose_heads_nothing_shows_is_refused(name):
    build, message = REFUSED[name]
    tokens = 2 * N if name == "sorted by each head" else N
    assert message in refusal(lambda: record(build(), states(tokens=tokens)))


class AddsToData(Sequence):
    """Adds each part's result to the numbers of its state."""

    def forward(self, x):
        x = x.clone()
        for norm, part in zip(self.norms, self.parts, strict=True):
            x.data.add_(part(norm(x)))
        return x


def test_what_is_added_to_the_data_of_a_state_is_added_to_the_state():
    parts = Attention(written_out), MLP(), Attention(written_out)
    assert_same_paths(drawn(AddsToData(*parts)), drawn(Sequence(*parts)), states(), TWO)


def loop_of_sigmoids(q, k, v):
    shifts = range(q.shape[2])
    return sum((q * k.roll(n, 2)).sum(-1, keepdim=True).sigmoid() * v.roll(n, 2) for n in shifts) / len(shifts)


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (lambda: Along(nn.Conv1d(D, D, 3, padding=1)), ["parts.1"]),
        (lambda: attention(loop_of_sigmoids), ["parts.1"]),
        (MLP, []),
    ],
)
def test_submodules_that_mix_tokens_without_attention_are_named(layer, names):
    read = read_module(around(layer()), Example((states(),)))
    table = table_of_reading(read, "")
    assert list(table[table.part == "mixing"].name) == names
    assert ("no attention, in parts.N" in in_words(read, "")) == bool(names)


class Trigrams(nn.Module):
    """Letters whose embeddings have those of both neighbours beside them, as in MobileBERT."""

    def __init__(self):
        super().__init__()
        self.table, self.map = nn.Embedding(50, D), nn.Linear(3 * D, D)

    def forward(self, ids):
        x = self.table(ids)
        return self.map(torch.cat([F.pad(x[:, 1:], (0, 0, 0, 1)), x, F.pad(x[:, :-1], (0, 0, 1, 0))], 2))


class Joining(nn.Module):
    """A layer whose sub-module reads what attention made and what it read, as BERT's."""

    def __init__(self):
        super().__init__()
        self.attention, self.join = Attention(by_kernel), Joined()

    def forward(self, x):
        return self.join(self.attention(x), x)


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(D))

    def forward(self, x, before):
        return self.norm(x + before)


def test_tokens_that_are_mixed_where_they_are_embedded_are_named_there_alone():
    module = drawn(nn.Sequential(Trigrams(), Joining(), Joining()))
    assert record(module, letters()).reading.mixing == ("0",)


class Conditioned(nn.Module):
    """Layers whose norms and gates are made of a vector for each sequence, as in DiT."""

    def __init__(self, condition):
        super().__init__()
        self.condition, self.map = condition, nn.Linear(4, D)
        self.layers = nn.ModuleList(Modulated() for _ in range(2))

    def forward(self, x, given):
        for layer in self.layers:
            x = layer(x, self.map(self.condition(given)))
        return x


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.map, self.attention = nn.Linear(D, 3 * D), Attention(by_kernel)

    def forward(self, x, condition):
        shift, scale, gate = self.map(F.silu(condition))[:, None].chunk(3, -1)
        return x + gate * self.attention(F.layer_norm(x, (D,)) * (1 + scale) + shift)


CONDITIONS = {
    "vectors": (nn.Identity, random("conditions", B, 4)),
    "times": (lambda: lambda t: (t[:, None] * torch.arange(1.0, 5)).sin(), random("times", B)),
    "classes": (lambda: nn.Embedding(20, 4), torch.tensor([3, 5, 2, 4, 19])),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_what_is_given_for_a_whole_sequence_mixes_no_tokens(name):
    build, given = CONDITIONS[name]
    reading = read_module(drawn(Conditioned(build())), Example((states(), given))).reading
    assert reading.mixing == () and all(call.is_sure for call in reading.calls)
    assert [x.axes.tokens for x in reading.inputs] == [(1,), ()]
    assert [x.is_touched for x in reading.inputs] == [True, True]


class OfTheirMean(nn.Module):
    """A map of weights that the mean of the tokens makes, then attention."""

    def __init__(self):
        super().__init__()
        self.maps, self.attention = nn.Linear(D, D * D), Attention(by_kernel)

    def forward(self, x):
        return self.attention(x @ self.maps(x.mean(1)).unflatten(1, (D, D)) / D)


@pytest.mark.parametrize("before", [0, 1])
def test_maps_that_all_tokens_make_are_factors_and_named(before):
    parts = *[Attention(written_out)] * before, OfTheirMean(), Attention(by_kernel)
    tape = record(drawn(Sequence(*parts)), states())
    assert tape.paths().by_length == [[1, 4, 4], [1, 6, 12, 8]][before]
    assert tape.reading.mixing == (f"parts.{before}",)


MIXED = {
    "less their mean": lambda x: x - x.mean(1, keepdim=True),
    "over their deviation": lambda x: x / (1 + x.var(1, keepdim=True)).sqrt(),
    "their largest": lambda x: x + x.amax(1, keepdim=True),
    "largest so far": lambda x: x.cummax(1)[0],
    "half of the numbers shifted": lambda x: torch.cat([x[..., : D // 2], F.pad(x[:, :-1, D // 2 :], (0, 0, 1, 0))], 2),
    "softmax of each number": lambda x: x + (x.softmax(1) * x).sum(1, keepdim=True),
    "products of numbers": lambda x: x @ (x.mT @ x) / N,
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_the_tokens_of_the_inputs_themselves_is_named(name):
    """One number of a state may not show it, and stands at one of its numbers as at one of its tokens."""
    tape = record(drawn(nn.Sequential(Of(MIXED[name]), Sequence(Attention(by_kernel)))), states("apart", 2 * N))
    assert tape.reading.mixing == ("0",)
    assert tape.paths().by_length == [1, 2]


def test_a_mean_of_all_tokens_is_named_although_it_changes_each_but_little():
    norm_of_all = Of(lambda x: F.layer_norm(x, x.shape[1:]))
    module = drawn(Sequence(norm_of_all, Attention(by_kernel)))
    assert record(module, states("apart", 2 * N)).reading.mixing == ("parts.0",)


class Excited(nn.Module):
    """Every token times a gate that the mean of all makes (squeeze and excitation)."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(D, D)

    def forward(self, x):
        return x * self.map(x.mean(1, keepdim=True)).sigmoid()


@pytest.mark.parametrize("tokens", [5, 9, 16, 32])
def test_behind_a_weak_mean_of_all_tokens_each_submodule_is_read_as_it_is(tokens):
    module = drawn(Sequence(Excited(), MLP(), Attention(by_kernel), MLP(), Excited(), MLP(), Attention(by_kernel)))
    for number in range(6):
        reading = record(module, states(f"of draw {number}", tokens)).reading
        assert reading.mixing == ("parts.0", "parts.4")
        assert [call.lead.heads for call in reading.calls] == [H, H]


class ChannelsFirst(nn.Module):
    """Layers of states that are given as (B, D, N)."""

    def __init__(self):
        super().__init__()
        self.layers = Sequence(Attention(written_out), MLP(), Attention(written_out))

    def forward(self, x):
        return self.layers(x.mT)


def test_tokens_that_are_given_behind_their_channels_are_not_mixed():
    tape = record(drawn(ChannelsFirst()), states().mT.contiguous())
    assert tape.paths().by_length == [1, 4, 4]
    assert tape.reading.mixing == ()


def test_an_input_within_an_object_is_read_by_what_the_calls_say():
    module = drawn(Sequence(Attention(written_out)))
    module.forward = lambda given: Sequence.forward(module, given["states"].x)
    given = type("Given", (), {"x": states()})()
    assert record(module, {"states": given}).paths().by_length == [1, H]


def test_an_error_of_the_watching_function_is_its_own():
    def watch(call):
        len(3)

    with pytest.raises(RuntimeError, match=r"the function that watches call .*: object of type 'int' has no len"):
        tap(drawn(Sequence(Attention(written_out))), watch, states())

"""Tokens that are chosen by comparing them with others: as keys of attention they are read, else their mixing is named.

Shapes: B sequence, N token, D width, H head, K head width, C neighbour.
"""

import pytest
import torch
import torch.nn.functional as F
from networks_of_others import Attention, B, D, H, N, Sequence, by_kernel, drawn, heads_of, joined, states, written_out
from path_checks import TWO, assert_same_paths
from torch import nn

from rankbench.tape import record

T = 2 * N
HERE = torch.arange(B)[:, None, None]


def nearest(x, number=2):
    return torch.cdist(x, x).topk(number, -1, largest=False).indices


def nearest_by_products(x):
    squares = x.square().sum(-1, keepdim=True)
    return (2 * x @ x.mT - squares - squares.mT).topk(2, -1)[1]


def gathered(x, index_BNC):
    return x[:, None].expand(-1, T, -1, -1).gather(2, index_BNC[..., None].expand(-1, -1, -1, D))


def edges(x):
    neighbours_BNCD = x[HERE, nearest(x)]
    return (neighbours_BNCD - x[:, :, None]).relu().mean(2)


def added_by_pairs(x):
    b, query, key = ((x @ x.mT) > 0).nonzero(as_tuple=True)
    return torch.zeros(B * T, D, dtype=x.dtype).index_add(0, b * T + query, x[b, key]).view_as(x)


def merged(x):
    """Every other token joins the most alike of the rest, as in ToMe."""
    some, rest = x[:, ::2], x[:, 1::2]
    index_BN = (some @ rest.mT).argmax(-1)[..., None].expand(-1, -1, D)
    rest = rest.scatter_add(1, index_BN, some)
    return torch.stack([some, rest], 2).flatten(1, 2)


NEIGHBOURS = {
    "merged": merged,
    "mean": lambda x: x[HERE, nearest(x)].mean(2),
    "mean, of products": lambda x: gathered(x, nearest_by_products(x)).mean(2),
    "edges": edges,
    "one axis": lambda x: x.flatten(0, 1).index_select(0, (nearest(x) + T * HERE).flatten()).view(B, T, 2, D).mean(2),
    "largest scores": lambda x: x[HERE, (x @ x.mT).argsort(-1)[..., -2:]].mean(2),
    "scores above 0": added_by_pairs,
    "inverse distances": lambda x: (
        F.normalize(1 / (1 + torch.cdist(x, x).topk(2).values), 1)[..., None] * edges(x)[:, :, None]
    ).sum(2),
}


class OfTokens(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.map = function, nn.Linear(D, D)

    def forward(self, x):
        return self.function(self.map(x))


@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.parametrize("before", [0, 1])
def test_means_of_chosen_tokens_are_named(name, before):
    parts = [Attention(written_out)] * before, OfTokens(NEIGHBOURS[name]), Attention(by_kernel)
    tape = record(drawn(Sequence(*parts[0], *parts[1:])), states("apart", T))
    assert tape.reading.mixing == (f"parts.{before}",)
    assert tape.paths().by_length == [[1, 2], [1, 4, 4]][before]


def test_tokens_looked_up_in_a_table_of_states_are_named():
    def mean(x):
        return F.embedding(nearest(x) + T * HERE, x.flatten(0, 1)).mean(2)

    assert record(drawn(Sequence(OfTokens(mean), Attention(by_kernel))), states("apart", T)).reading.mixing == (
        "parts.0",
    )


def of_largest_norm(x):
    return x.norm(dim=-1).argmax(-1)


# to all tokens the same is added, or by it all are divided, and the touched token is none of those that decide it
OF_FEW = {
    "largest norm": lambda x: x + x[torch.arange(B), of_largest_norm(x)][:, None],
    "largest norm, gathered": lambda x: x + x.gather(1, of_largest_norm(x)[:, None, None].expand(-1, -1, D)),
    "largest norm, by a product": lambda x: x + F.one_hot(of_largest_norm(x), T).to(x.dtype)[:, None] @ x,
    "two of the least first numbers": lambda x: (
        x + x.gather(1, x[..., 0].argsort(-1)[:, :2, None].expand(-1, -1, D)).mean(1, keepdim=True)
    ),
    "over the largest norm": lambda x: x / x.norm(dim=-1, keepdim=True).amax(1, keepdim=True),
    "first": lambda x: x + x[:, :1],
}


class InFront(Attention):
    """Attention to what a function makes of the tokens."""

    def __init__(self, function):
        super().__init__(by_kernel)
        self.function = function

    def forward(self, x):
        return super().forward(self.function(x))


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(Sequence(Attention(by_kernel)) for _ in range(2))

    def forward(self, x):
        return self.layers[1](self.function(self.layers[0](x)))


KINDS = {
    "a part": (lambda f: Sequence(Attention(written_out), OfTokens(f), Attention(by_kernel)), "parts.1"),
    "in front of attention": (lambda f: Sequence(Attention(written_out), InFront(f)), "parts.1"),
    "between layers": (Between, "the module itself"),
}


@pytest.mark.parametrize("name", OF_FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_all_others_read_are_mixed_with_them(kind, name):
    build, where = KINDS[kind]
    assert record(drawn(build(OF_FEW[name])), states("apart", T)).reading.mixing == (where,)


class InWindows(nn.Module):
    """Attention within windows of N tokens, each a sequence of its own, which a submodule reads."""

    def __init__(self):
        super().__init__()
        self.inner = Attention(by_kernel)

    def forward(self, x):
        return x + self.inner(x.reshape(-1, N, D)).view_as(x)


def test_windows_beside_the_touched_one_are_not_mixed_with_it():
    assert record(drawn(Sequence(InWindows(), InWindows())), states("apart", T)).reading.mixing == ()


def farthest(x, number):
    """Indices of tokens far from one another, the first left out, (B, number)."""
    index, least = [torch.zeros(B, dtype=torch.long)], torch.full((B, T), torch.inf, dtype=x.dtype)
    for _ in range(number):
        least = torch.minimum(least, (x - x[torch.arange(B), index[-1]][:, None]).square().sum(-1))
        index.append(least.argmax(-1))
    return torch.stack(index[1:], 1)


CENTRES = {
    "farthest": lambda x: farthest(x, 4),
    "some": lambda x: torch.tensor([1, 9, 6, 3]).expand(B, -1),
    "of the largest first numbers": lambda x: x[..., 0].topk(4, -1).indices,
}


@pytest.mark.parametrize("name", CENTRES)
@pytest.mark.parametrize("written", ["cdist", "differences"])
@pytest.mark.parametrize("number", [2, 4])
def test_groups_around_some_tokens_are_named(name, written, number):
    """Centres, of which the touched token may be none, join the tokens nearest to them, as in PointNet++."""

    def pooled(x):
        centres = x.gather(1, CENTRES[name](x)[..., None].expand(-1, -1, D))
        pairs = centres[:, :, None] - x[:, None]
        distances = torch.cdist(centres, x) if written == "cdist" else pairs.square().sum(-1)
        return (x[HERE, distances.topk(number, -1, largest=False)[1]] - centres[:, :, None]).relu().amax(2)

    module = drawn(nn.Sequential(OfTokens(pooled), Attention(by_kernel)))
    for seed in ("apart", "others", "further"):
        assert record(module, states(seed, T)).reading.mixing == ("0",)


def by_own_number(x):
    """The three tokens of the largest first number, mapped, and put back."""
    index_B3D = x[..., 0].topk(3, -1).indices[..., None].expand(-1, -1, D)
    return torch.zeros_like(x).scatter(1, index_B3D, x.gather(1, index_B3D).relu())


def by_attention(x):
    """The three tokens to which the first gives the largest weights, mapped, and put back."""
    index_B3D = (x[:, :1] @ x.mT).softmax(-1)[:, 0].topk(3, -1).indices[..., None].expand(-1, -1, D)
    return torch.zeros_like(x).scatter_add(1, index_B3D, x.gather(1, index_B3D).relu())


@pytest.mark.parametrize("choose", [by_own_number, by_attention])
@pytest.mark.parametrize("before", [0, 1])
def test_tokens_that_stay_in_their_place_are_not_mixed(choose, before):
    parts = [Attention(written_out)] * before, OfTokens(choose), Attention(by_kernel)
    assert record(drawn(Sequence(*parts[0], *parts[1:])), states("apart", T)).reading.mixing == ()


def by_position(q, k, v, _):
    """Scores with a term of the positions that they say, as in CoPE."""
    scores, table_KN = q @ k.mT, torch.linspace(-1, 1, N * D // H, dtype=q.dtype).view(-1, N).sin()
    return (scores + (q @ table_KN).gather(-1, (N * scores.sigmoid()).long())).softmax(-1) @ v


def test_numbers_that_scores_choose_from_a_token_itself_are_not_mixed():
    tape = record(drawn(Sequence(Attention(by_position), Attention(by_kernel))), states())
    assert tape.reading.mixing == ()
    assert tape.paths().by_length == [1, 4, 4]


class OfTheNearest(Attention):
    """Each token sees the three nearest: gathered, or by a mask. scores: of distances, or of products."""

    def __init__(self, is_gathered, scores):
        super().__init__(written_out)
        self.is_gathered, self.scores = is_gathered, scores

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        distances = torch.cdist(q, k)
        if not self.is_gathered:
            scores = -distances if self.scores == "distances" else q @ k.mT
            return self.out(
                joined(scores.masked_fill(distances > distances.kthvalue(3, -1, True)[0], -torch.inf).softmax(-1) @ v)
            )
        least, index = distances.topk(3, -1, largest=False)
        each = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None], index
        scores = -least if self.scores == "distances" else (q[..., None, :] * k[each]).sum(-1)
        return self.out(joined((scores.softmax(-1)[..., None] * v[each]).sum(3)))


@pytest.mark.parametrize("scores", ["distances", "products"])
@pytest.mark.parametrize("before", [0, 1])
def test_attention_to_the_nearest_is_read_as_with_a_mask(scores, before):
    parts = [[*[Attention(by_kernel)] * before, OfTheNearest(kind, scores)] for kind in (True, False)]
    tape, _ = assert_same_paths(*(drawn(Sequence(*each)) for each in parts), states(), [[1, 2], TWO][before])
    assert tape.reading.mixing == ()


class Scan(nn.Module):
    """A state for each channel, which a token's own numbers read and write, as in Mamba."""

    def __init__(self, size=3):
        super().__init__()
        self.write, self.read, self.out = nn.Linear(D, size), nn.Linear(D, size), nn.Linear(D, D)

    def forward(self, x):
        write, read, state, each = self.write(x), self.read(x), torch.zeros(len(x), D, 3, dtype=x.dtype), []
        for token in range(x.shape[1]):
            state = 0.5 * state + write[:, token, None] * x[:, token, :, None]
            each.append((state * read[:, token, None]).sum(-1))
        return self.out(torch.stack(each, 1))


class Sorted(nn.Module):
    """Experts that read the tokens in their order, each token by itself."""

    def __init__(self, experts=3):
        super().__init__()
        self.router, self.maps = nn.Linear(D, experts), nn.Parameter(torch.zeros(experts, D, D))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, experts = self.router(flat).softmax(-1).topk(2, -1)
        token, expert = torch.arange(len(flat)).repeat_interleave(2), experts.flatten()
        order = expert.argsort(stable=True)
        made = (flat[token[order]][:, None] @ self.maps[expert[order]])[:, 0] * weights.flatten()[order][:, None]
        return made[order.argsort()].unflatten(0, (-1, 2)).sum(1).view_as(x)


@pytest.mark.parametrize("tokens", [N, T])
def test_tokens_sorted_by_their_expert_behind_a_scan_are_not_mixed(tokens):
    module = drawn(Sequence(Scan(), nn.Sequential(Sorted()), Attention(by_kernel)))
    assert record(module, states("apart", tokens)).reading.mixing == ("parts.0",)

"""Tokens that something other than attention joins to fewer: what does so is named as mixing, and no other submodule.

Shapes: B sequence, N token, D width, P pixels along a side.
"""

import pytest
import torch
from networks_of_others import (
    MLP,
    Along,
    Attention,
    B,
    D,
    Of,
    Sequence,
    by_kernel,
    drawn,
    letters,
    random,
    states,
    written_out,
)
from torch import nn

from rankbench.tape import record

T = 16  # tokens, 14 of which is touched


class Merging(nn.Module):
    """A map of tokens, or of the numbers of several, which `moved` puts side by side."""

    def __init__(self, moved, tokens=1):
        super().__init__()
        self.moved, self.map = moved, nn.Linear(tokens * D, D)

    def forward(self, x):
        return self.map(self.moved(x))


JOINING = {
    "convolution of blocks": lambda: Along(nn.Conv1d(D, D, 2, stride=2)),
    "overlapping convolution": lambda: Along(nn.Conv1d(D, D, 3, stride=2, padding=1)),
    "two convolutions": lambda: Along(
        nn.Sequential(nn.Conv1d(D, D, 1), nn.GELU(), nn.Conv1d(D, D, 4, stride=4), nn.GELU())
    ),
    "means of pairs": lambda: Along(nn.AvgPool1d(2)),
    "pairs side by side": lambda: Merging(lambda x: x.unflatten(1, (-1, 2)).flatten(2), 2),
    "every second token beside the next": lambda: Merging(lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 2), 2),
    "unfolded windows": lambda: Merging(lambda x: x.unfold(1, 3, 2).flatten(2), 3),
    "transposed convolution": lambda: Along(nn.ConvTranspose1d(D, D, 4, stride=2, padding=1)),
}
MOVING = {
    "every second token": lambda: Merging(lambda x: x[:, ::2]),
    "the last tokens": lambda: Merging(lambda x: x[:, 3:]),
    "each token twice": lambda: Merging(lambda x: x.repeat_interleave(2, 1)),
    "transposed convolution of blocks": lambda: Along(nn.ConvTranspose1d(D, D, 2, stride=2)),
}


@pytest.mark.parametrize("mix", [written_out, by_kernel])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("name", [*JOINING, *MOVING])
def test_what_joins_tokens_is_named_and_what_moves_them_is_not(name, before, mix):
    parts = [Sequence(Attention(mix))] * before, (JOINING | MOVING)[name](), Sequence(Attention(mix), MLP())
    mixing = record(drawn(nn.Sequential(*parts[0], *parts[1:])), states("joined", T)).reading.mixing
    if name in MOVING:
        assert mixing == ()
    else:
        (where,) = mixing
        assert where.split(".")[0] == str(before)


class ToFewer(Attention):
    """Attention to keys that are made of several tokens each."""

    def __init__(self, joined, mix):
        super().__init__(mix)
        self.joined = joined

    def forward(self, x):
        return super().forward(x, self.joined(x))


class OfABlock(nn.Module):
    """The same, of keys that the block around an attention makes."""

    def __init__(self, joined, mix):
        super().__init__()
        self.joined, self.attention = joined, Attention(mix)

    def forward(self, x):
        return self.attention(x, self.joined(x))


FEWER = {
    "convolution of blocks": lambda: Along(nn.Conv1d(D, D, 4, stride=4)),
    "overlapping convolution": lambda: Along(nn.Conv1d(D, D, 3, stride=2, padding=1)),
    "pairs side by side": JOINING["pairs side by side"],
    "mean of all": lambda: lambda x: x.mean(1, keepdim=True),
}


@pytest.mark.parametrize("kind", [ToFewer, OfABlock])
@pytest.mark.parametrize("tokens", [T, 20])
@pytest.mark.parametrize("mix", [written_out, by_kernel])
@pytest.mark.parametrize("name", FEWER)
def test_attention_to_keys_that_join_tokens_is_named(name, mix, tokens, kind):
    """As in PVT, CvT and SegFormer. A token's own key is one of those that it reads, wherever that stands."""
    tape = record(drawn(Sequence(*(kind(FEWER[name](), mix) for _ in range(2)))), states("joined", tokens))
    parts = [name.removesuffix(".joined").removesuffix(".attention") for name in tape.reading.mixing]
    assert parts == ["parts.0", "parts.1"]
    assert tape.paths().by_length == [1, 4, 4]
    assert [call.is_cross for call in tape.reading.calls] == [False, False]


@pytest.mark.parametrize("name", FEWER)
def test_keys_that_join_tokens_are_named_behind_a_convolution(name):
    """Which carries the touch of each token to its neighbours."""
    near, to_fewer = Along(nn.Conv1d(D, D, 3, padding=1)), ToFewer(FEWER[name](), by_kernel)
    tape = record(drawn(Sequence(Attention(by_kernel), near, to_fewer)), states("joined", T))
    assert {name.removesuffix(".joined") for name in tape.reading.mixing} == {"parts.1", "parts.2"}
    assert tape.paths().by_length == [1, 4, 4]


class Strided(nn.Module):
    """A convolution with a stride that no submodule holds apart from what is around it."""

    def __init__(self, before=None):
        super().__init__()
        self.table, self.before, self.behind = nn.Embedding(50, D), before, Sequence(Attention(by_kernel))
        self.convolution = nn.Conv1d(D, D, 2, stride=2)

    def forward(self, x):
        x = x if x.is_floating_point() else self.table(x)
        x = x if self.before is None else self.before(x)
        return self.behind(self.convolution(x.mT).mT)


@pytest.mark.parametrize("before", [None, lambda: Sequence(Attention(by_kernel))])
@pytest.mark.parametrize("x", [states("joined", T), letters(T)])
def test_what_joins_tokens_between_submodules_is_the_module_itself(before, x):
    module = drawn(Strided(before and before()))
    assert record(module, x).reading.mixing == ("the module itself",)


class Merged(nn.Module):
    """Squares of four patches side by side, as in Swin."""

    def __init__(self):
        super().__init__()
        self.map = nn.Sequential(nn.Linear(4 * D, D))

    def forward(self, x):
        side = int(x.shape[1] ** 0.5) // 2
        return self.map(x.unflatten(1, (side, 2, side, 2)).transpose(2, 3).flatten(1, 2).flatten(2))


class Patches(nn.Module):
    """Patches of images as tokens."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Conv2d(3, D, 4, stride=4)])

    def forward(self, x):
        return self.parts[0](x).flatten(2).mT


@pytest.mark.parametrize("merged", [False, True])
def test_patches_of_an_image_are_joined_where_they_are_merged(merged):
    parts = Patches(), Sequence(Attention(by_kernel)), *[Merged()] * merged, Sequence(Attention(by_kernel))
    mixing = record(drawn(nn.Sequential(*parts)), random("images", B, 3, 32, 32)).reading.mixing
    assert mixing == (("2",) if merged else ())


def to_image(x):
    return x.mT.unflatten(2, [int(x.shape[1] ** 0.5)] * 2)


class OfAnImage(nn.Module):
    """A convolution that reads (B, D, P, P), of states (B, N, D) or so themselves."""

    def __init__(self, *sizes, is_flat=True, **settings):
        super().__init__()
        self.map, self.is_flat = nn.Sequential(nn.Conv2d(D, D, *sizes, **settings)), is_flat

    def forward(self, x):
        return self.map(to_image(x) if self.is_flat else x).flatten(2).mT


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_overlapping_patches_are_joined_behind_attention_and_a_convolution(stride, is_flat):
    """As in PVT and SegFormer."""
    near, patches = OfAnImage(3, padding=1), OfAnImage(3, stride, 1, is_flat=is_flat)
    parts = Patches(), Sequence(Attention(by_kernel), near), *[Of(to_image)] * (not is_flat), patches
    module = drawn(nn.Sequential(*parts, Sequence(Attention(by_kernel))))
    mixing = record(module, random("images", B, 3, 32, 32)).reading.mixing
    assert {name.removesuffix(".map.0") for name in mixing} == {"1.parts.1", f"{len(parts) - 1}"}


class OfAMap(nn.Module):
    """Attention of a map (B, D, P, P) within windows, in which the tokens are one axis."""

    def __init__(self, side, mix):
        super().__init__()
        self.side, self.parts = side, Sequence(Attention(mix))

    def forward(self, x):
        blocks = x.unflatten(3, (-1, self.side)).unflatten(2, (-1, self.side)).permute(0, 2, 4, 3, 5, 1)
        y = self.parts(blocks.flatten(0, 2).flatten(1, 2)).view(blocks.shape)
        return y.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


class WithFeaturesLast(Of):
    """A module of maps (B, D, P, P), for maps (B, P, P, D)."""

    def forward(self, x):
        return self.function(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@pytest.mark.parametrize("mix", [written_out, by_kernel])
@pytest.mark.parametrize("side", [4, 8])
@pytest.mark.parametrize("features_last", [False, True])
@pytest.mark.parametrize("name", ["pixels by themselves", "patches", "overlapping patches"])
def test_attention_behind_maps_whose_patches_are_joined_is_not_named(name, features_last, side, mix):
    """As in Swin and Visformer: each token that is left depends on others than the touched one."""
    sizes = {"pixels by themselves": (1, 1), "patches": (2, 2), "overlapping patches": (3, 2, 1)}[name]
    turned = WithFeaturesLast if features_last else Of
    patches = nn.Conv2d(3, D, 4, 4), *[Of(lambda x: x.permute(0, 2, 3, 1))] * features_last
    parts = OfAMap(side, mix), nn.Sequential(nn.Conv2d(D, D, *sizes)), OfAMap(4, mix), OfAMap(4, mix)
    module = drawn(nn.Sequential(nn.Sequential(*patches), *map(turned, parts)))
    mixing = record(module, random("images", B, 3, 32, 32)).reading.mixing
    assert [where.split(".")[0] for where in mixing] == ["2"] * (sizes[0] > 1)


@pytest.mark.parametrize("mix", [written_out, by_kernel])
def test_attention_behind_blocks_that_are_joined_to_one_is_not_named(mix):
    """As in NesT, of states (B, blocks, N, D)."""

    class OfBlocks(Attention):
        def forward(self, x):
            return super().forward(x.flatten(0, 1)).view(x.shape)

    blocks = Of(lambda x: x.unflatten(1, (4, T))), OfBlocks(mix)
    joined = Merging(lambda x: x.unflatten(2, (-1, 4)).flatten(1, 2).flatten(2)[:, None], 4)
    module = drawn(nn.Sequential(*blocks, joined, OfBlocks(mix)))
    assert record(module, states("joined", 4 * T)).reading.mixing == ("2",)


@pytest.mark.parametrize("mix", [written_out, by_kernel])
def test_attention_that_reads_a_map_behind_a_convolution_is_not_named(mix):
    """As in MaxViT. The convolution leaves the touch at the neighbours along both axes."""

    class OfPixels(Attention):
        def forward(self, x):
            return super().forward(x.flatten(1, 2)).view(x.shape)

    near = WithFeaturesLast(nn.Sequential(nn.Conv2d(D, D, 3, padding=1)))
    of_rows = Sequence(Attention(mix)), Of(lambda x: x.unflatten(1, (8, 8)))
    module = drawn(nn.Sequential(Patches(), *of_rows, Sequence(near, OfPixels(mix))))
    assert record(module, random("images", B, 3, 32, 32)).reading.mixing == ("3.parts.0.function.0",)


@pytest.mark.parametrize("mix", [written_out, by_kernel])
@pytest.mark.parametrize("tokens", [4 * B, 16, 24])
def test_pools_between_layers_are_the_modules_own(tokens, mix):
    """Also where as few tokens as sequences are left."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Sequence(Attention(mix)) for _ in range(3))

        def forward(self, x):
            for layer in self.layers[:2]:
                x = nn.functional.avg_pool1d(layer(x).mT, 2).mT
            return self.layers[2](x)

    assert record(drawn(Pooled()), states("joined", tokens)).reading.mixing == ("the module itself",)


class Latents(nn.Module):
    """Learned tokens that read the others, themselves, and are read by the others."""

    def __init__(self, number, mix):
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(number, D))
        self.read, self.own, self.back = (Attention(mix) for _ in range(3))

    def forward(self, x):
        y = self.learned.expand(len(x), -1, -1)
        y = y + self.read(y, x)
        return x + self.back(x, y + self.own(y))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_learned_tokens_are_not_joined(number):
    assert record(drawn(Latents(number, by_kernel)), states("joined", T)).reading.mixing == ()


class FromTheFirst(Attention):
    """Attention of the first token of a state to all of its tokens."""

    def forward(self, x):
        return super().forward(x[:, :1], x)


class ClassAttention(nn.Module):
    """A learned token that reads the others and itself in several layers, as in CaiT."""

    def __init__(self, layers, mix):
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(1, 1, D))
        self.layers = nn.ModuleList(FromTheFirst(mix) for _ in range(layers))

    def forward(self, x):
        y = self.learned.expand(len(x), -1, -1)
        for layer in self.layers:
            y = y + layer(torch.cat([y, x], 1))
        return y


@pytest.mark.parametrize("mix", [written_out, by_kernel])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_token_that_reads_the_others_in_several_layers_joins_none(layers, before, mix):
    parts = Sequence(*(Attention(mix) for _ in range(before))), ClassAttention(layers, mix)
    assert record(drawn(nn.Sequential(*parts)), states("joined", T)).reading.mixing == ()


class OfSome(Attention):
    """Attention of every fourth token to all, as in LeViT."""

    def forward(self, x):
        return super().forward(x[:, ::4], x)


@pytest.mark.parametrize("mix", [written_out, by_kernel])
def test_tokens_that_attention_leaves_out_join_none_behind_a_convolution(mix):
    near = Sequence(Along(nn.Sequential(nn.Conv1d(D, D, 3, padding=1))))
    behind = nn.Sequential(Sequence(Attention(mix)), OfSome(mix), Sequence(Attention(mix)))
    (where,) = record(drawn(nn.Sequential(near, behind)), states("joined", T)).reading.mixing
    assert where.startswith("0.")


class OfTwoInputs(nn.Module):
    """Layers that read what `join` makes of two states; a convolution joins pairs of tokens."""

    def __init__(self, join):
        super().__init__()
        self.join, self.layers = join, Sequence(Attention(by_kernel), Attention(by_kernel))
        self.convolution, self.first = nn.Conv1d(D, D, 2, stride=2), nn.Parameter(torch.zeros(1, 1, D))

    def halved(self, x):
        return self.convolution(x.mT).mT

    def forward(self, x, other):
        return self.layers(self.join(self, x, other))


BOTH = {
    "a class token and the sum": (lambda m, x, other: torch.cat([m.first.expand(B, 1, D), x + other], 1), ()),
    "the sum and a class token": (lambda m, x, other: torch.cat([x + other, m.first.expand(B, 1, D)], 1), ()),
    "pairs of the sum": (lambda m, x, other: m.halved(x + other), ("the module itself",)),
    "pairs of the first": (lambda m, x, other: torch.cat([m.halved(x), other], 1), ("the module itself",)),
    "pairs of the second": (lambda m, x, other: torch.cat([x, m.halved(other)], 1), ("the module itself",)),
}


@pytest.mark.parametrize("tokens", [9, 15, 16])
@pytest.mark.parametrize("name", BOTH)
def test_tokens_of_two_inputs_are_not_taken_for_neighbours(name, tokens):
    join, mixing = BOTH[name]
    assert record(drawn(OfTwoInputs(join)), states("one", tokens), states("two", tokens)).reading.mixing == mixing

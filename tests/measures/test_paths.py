"""Paths of frozen and recomputed networks against every path of networks written out, closed forms, itertools.

Shapes: B batch, N token, D width, H head, K head width, F MLP width, L layer, P path, G group of paths.
"""

import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from by_hand import KINDS
from drawn import generator, label_of, randomised, transformer
from hypothesis import given, settings
from hypothesis import strategies as st
from written_out import assert_sums_are_those_of_all_paths, close, heads_by_hand

import rankbench.measures.frozen_network
import rankbench.measures.paths
from rankbench.measures.dong_theory import num_paths
from rankbench.measures.frozen_network import FrozenNetwork, PathSums, sums_by_length
from rankbench.measures.paths import PathTree, all_paths, read_out, sample_paths, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork

EPSILON = 1e-5  # the norms', as torch's LayerNorm has it

every = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def network(seed=0, **changes):
    """A small Transformer on 7 tokens in, 4 classes out, all parameters random."""
    return randomised(transformer(**{"mlp_ratio": 1.5, **changes}), generator(seed)).requires_grad_(False)


def tokens(seed=1, num_sequences=2, num_tokens=4):
    return torch.randint(7, (num_sequences, num_tokens), generator=generator(seed))


# --- frozen: exact sums by length -------------------------------------------------------------------------------------

MLPS = [
    {"mlp": False, "mlp_skip": False},
    *({"mlp": True, "mlp_skip": skip, "activation": act} for skip in (True, False) for act in ("relu", "gelu")),
]
NORMS = [
    {"norm": "none"},
    *(
        {"norm": norm, "norm_kind": kind, "norm_affine": affine_}
        for norm in ("pre", "post")
        for kind in ("layernorm", "rmsnorm")
        for affine_ in (True, False)
    ),
]
MASKS = [{"mask": "none"}, {"mask": "causal"}, {"mask": "window", "window": 1}]
SIZES = [
    {"layers": 2, "heads": 3, "width": 6},
    {"layers": 3, "heads": 1, "width": 4},
    {"layers": 3, "heads": 2, "width": 8},
    {"layers": 2, "heads": 2, "width": 5, "head_width": 3},
    {"layers": 2, "heads": 3, "width": 4, "head_width": 5},
]
ATTENTIONS = [mask | {"tied_qk": tied} | size for size in SIZES for tied in (False, True) for mask in MASKS]
# Every combination of what the sums treat by cases, each with the next kind of attention: 30 kinds, so that in 360
# combinations every kind meets every norm and every MLP.
STRUCTURES = [
    {"skip": skip, "skip_scale": scale, "bias": bias} | norm | mlp
    for norm in NORMS
    for mlp in MLPS
    for bias in (True, False)
    for skip in (True, False)
    for scale in (1.0, -0.6)
]
COMBINATIONS = [
    structure | ATTENTIONS[7 * number % len(ATTENTIONS)] | {"seed": number}
    for number, structure in enumerate(STRUCTURES)
]


MIXES = [
    {"temperature": 0.5, "branch_scale": 0.7, "skip_scale": 0.0},
    {"mix_uniform": -1.0, "mask": "causal"},
    {"mix_attention": 0.4, "mix_identity": 0.9, "mix_uniform": -0.2, "branch_scale": -0.3, "norm": "pre"},
    {"mix_identity": 1.0, "mask": "window", "window": 1, "norm": "none", "temperature": 2.0},
    {"embedding_norm": True, "positions": "learned", "norm": "post"},
    {"embedding_norm": True, "norm": "none", "norm_kind": "rmsnorm", "norm_affine": False},
    {"weight_norm": "sigma"},
]


WHOLE = [
    {},
    {"norm": "pre", "norm_kind": "rmsnorm", "mask": "causal"},
    {"norm": "none", "skip_scale": 0.4, "mix_attention": 0.6, "mix_identity": -0.3, "mix_uniform": 0.2},
    {"mlp": False, "mlp_skip": False, "mask": "window", "window": 1},
]
# 7 has no divisor in common with the numbers of norms, MLPs, attentions and flags: all of each are among the quick ones
QUICK = [pytest.param(x, marks=pytest.mark.slow if n % 7 > 1 else ()) for n, x in enumerate(COMBINATIONS)]
QUICK += [mix | {"layers": 3, "seed": 1} for mix in MIXES]
QUICK += [kind | WHOLE[number % len(WHOLE)] | {"seed": number} for number, kind in enumerate(KINDS)]


@pytest.mark.parametrize("changes", QUICK, ids=label_of)
def test_sums_by_length_are_the_enumerated_ones(changes):
    model = network(**changes)
    for mlp in ("gate", "source") if model.cfg.mlp else ("gate",):
        assert_sums_are_those_of_all_paths(model, tokens(changes["seed"], 2, 3 + changes["seed"] % 3), mlp)


def test_the_remainder_is_what_is_missing_relative_to_the_state():
    draws = generator(0)
    by_length, bias, state = (
        torch.randn(*shape, generator=draws, dtype=torch.float64) for shape in ((3, 2, 4, 5), (2, 4, 5), (2, 4, 5))
    )
    missing, whole = (np.linalg.norm(x.flatten(1), axis=1) for x in (state - bias - by_length.sum(0), state))
    assert PathSums(by_length, bias, state).remainder().tolist() == pytest.approx(missing / whole, rel=1e-12)


def test_nothing_is_missing_of_a_state_of_zero():
    zero, unit = torch.zeros(2, 3, 4, 5), torch.ones(3, 4, 5)
    assert PathSums(zero, unit * 0, unit * 0).remainder().tolist() == [0, 0, 0]
    # but parts that sum to no zero
    assert PathSums(zero, unit * 1e-30, unit * 0).remainder().tolist() == [math.inf] * 3
    tiny = 1e-200 * torch.ones(3, 4, 5, dtype=torch.float64)  # whose squares are none
    lost = PathSums(tiny[None] / 2, tiny * 0, tiny).remainder()
    torch.testing.assert_close(lost, torch.full_like(lost, 0.5))


def test_without_values_no_longer_path_arrives_and_norms_of_nothing_are_finite():
    model = network(norm="post")
    for block in model.blocks:
        block.attention.qkv.weight[-6:] = 0
    parts = sums_by_length(model, tokens())
    assert all(part.isfinite().all() for part in parts) and not parts.by_length_KBND[1:].any()


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_the_remainder_of_single_precision_is_single_rounding(norm):
    model = network(layers=3, width=8, norm=norm).float()
    remainder = sums_by_length(model, tokens(num_sequences=8)).remainder()
    assert remainder.dtype == torch.float32
    # eps is 6e-8: below 1e-9 it would not be float32 arithmetic, above 1e-4 a thousand roundings would not explain it
    assert 1e-9 < remainder.max() < 1e-4


@pytest.mark.parametrize("mlp", ["gate", "source"])
def test_the_sweep_does_not_care_how_many_sequences_it_takes(monkeypatch, mlp):
    model, inputs, built = network(layers=3), tokens(num_sequences=7), []

    def counted(model, inputs, mlp):
        built.append(len(inputs))
        return FrozenNetwork(model, inputs, mlp)

    monkeypatch.setattr(rankbench.measures.frozen_network, "FrozenNetwork", counted)
    sums = []
    # the terms of one sequence: (layers + 2) x 4 tokens x 6 numbers of 8 bytes
    for size in (1, 2 * 5 * 4 * 6 * 8, 1 << 40):
        monkeypatch.setattr(rankbench.measures.frozen_network, "SWEEP_BYTES", size)
        sums.append(sums_by_length(model, inputs, mlp))
    assert built == [1] * 7 + [2, 2, 2, 1] + [7]
    for part, *others in zip(*sums, strict=True):
        for other in others:
            close(part, other)


def test_sums_by_length_leave_no_gradient_and_no_trace():
    model = network().requires_grad_(True)
    assert not any(part.requires_grad for part in sums_by_length(model, tokens()))


# --- groups of paths --------------------------------------------------------------------------------------------------

GROUPS = [
    np.array([[1, 0, 2], [0, 2, 1], [1, 0, 1]]),
    np.array([[0, 0, 0]]),
    np.array([[1, 0, 2], [2, 2, 2], [1, 1, 1], [0, 0, 0], [1, 0, 2]]),  # one path twice, two of other groups
    np.zeros((0, 3), dtype=np.int64),
]


def recomputed_by_hand(model, inputs, path, mlp=False):
    """The published protocol: at each used layer the head's own attention of the path's own state, the whole output
    bias, the norm without learned parts; no skip; an unused layer does nothing."""
    cfg, x = model.cfg, model.embed(inputs)
    for layer, choice in enumerate(path):
        if choice == 0:
            continue
        attention, block = model.attentions[layer], model.blocks[layer]
        mixing, w, bias, w_o = heads_by_hand(attention, cfg, x, choice - 1)
        x = mixing @ (x @ w + bias) @ w_o
        x = cfg.branch_scale * (x + (0 if attention.out.bias is None else attention.out.bias))
        if cfg.norm != "none":
            x = plain_norm(x, cfg)
        if mlp and cfg.mlp:
            z = block.mlp.up(x)
            x = cfg.branch_scale * block.mlp.down(z.relu() if cfg.activation == "relu" else z * torch.special.ndtr(z))
            if cfg.norm != "none":
                x = plain_norm(x, cfg)
    return x


def plain_norm(x, cfg):
    if cfg.norm_kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()


RECOMPUTED = [
    *({"norm": norm, "norm_kind": kind} for norm in ("none", "pre", "post") for kind in ("layernorm", "rmsnorm")),
    {"skip": False, "mlp_skip": False, "bias": False},
    {"mlp": False, "mlp_skip": False, "mask": "causal", "norm_affine": False},
    {"mask": "window", "window": 1, "tied_qk": True, "head_width": 5, "activation": "relu"},
    {"skip_scale": 0.3},
    *MIXES,
    *KINDS,
]


@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("changes", RECOMPUTED, ids=label_of)
def test_recomputed_groups_are_networks_of_their_own_by_hand(changes, mlp):
    model, inputs = network(layers=3, **changes), tokens(num_sequences=3)
    got = sums_of_groups(RecomputedNetwork(model, inputs, mlp), GROUPS)
    zero = torch.zeros_like(got[0])
    wanted = [sum((recomputed_by_hand(model, inputs, path, mlp) for path in group), zero) for group in GROUPS]
    close(got, torch.stack(wanted))


@pytest.fixture
def steps(monkeypatch):
    """(layer, number of prefixes, number of sequences) of each step of a network of paths, once it has been taken."""
    taken = []
    for kind in (FrozenNetwork, RecomputedNetwork):

        def counted(self, states_PBND, layer, choice, sequences, step=kind.step):
            taken.append((layer, *states_PBND.shape[:2]))
            return step(self, states_PBND, layer, choice, sequences)

        monkeypatch.setattr(kind, "step", counted)
    return taken


@pytest.mark.parametrize("kind", [FrozenNetwork, RecomputedNetwork])
def test_more_paths_than_memory_should_hold_run_in_batches(monkeypatch, kind):
    model = network(layers=3)
    groups = [all_paths(3, model.num_heads, length) for length in range(4)]
    groups.append(groups[1].repeat(2, axis=0))  # each path twice
    together, sizes, tree_of = sums_of_groups(kind(model, tokens()), groups), [], PathTree.of
    numbers = tokens().shape[1] * model.width
    monkeypatch.setattr(rankbench.measures.paths, "PATHS_NUMBERS", 5 * numbers)
    monkeypatch.setattr(PathTree, "of", lambda paths_PL: sizes.append(len(paths_PL)) or tree_of(paths_PL))
    close(sums_of_groups(kind(model, tokens()), groups), together)
    assert max(sizes) <= 5 and sum(sizes) == sum(map(len, groups))


@pytest.mark.parametrize("kind", [FrozenNetwork, RecomputedNetwork])
def test_groups_do_not_care_how_much_is_held_at_a_time(monkeypatch, kind, steps):
    model, inputs, sums = network(layers=3), tokens(num_sequences=5), []
    # the tree over GROUPS has 6 leaves of 4 x 6 numbers for each sequence
    for size in (1, 2 * 6 * 4 * 6, 1 << 40):
        monkeypatch.setattr(rankbench.measures.paths, "NUMBERS_AT_A_TIME", size)
        sums.append(sums_of_groups(kind(model, inputs), GROUPS))
    assert {sequences for _, _, sequences in steps} == {1, 2, 5}
    close(sums[0], sums[2])
    close(sums[1], sums[2])


@pytest.mark.parametrize("kind", [FrozenNetwork, RecomputedNetwork])
def test_a_shared_prefix_is_computed_once(kind, steps):
    everything = np.array(list(itertools.product(range(3), repeat=3)))
    sums_of_groups(kind(network(layers=3), tokens()), [everything, everything])
    # (H + 1)^(layer + 1) prefixes, twice the group or not
    assert [sum(count for at, count, _ in steps if at == layer) for layer in range(3)] == [3, 9, 27]


@every
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=12))
def test_the_tree_leads_every_path_to_a_leaf_of_its_own(paths):
    tree = PathTree.of(np.array(paths))
    prefixes = [()]
    for children in tree.children:
        prefixes = [(*prefixes[parent], choice) for choice, parents in children for parent in parents]
        assert len(set(prefixes)) == len(prefixes)
    assert tree.num_leaves == len(prefixes) == len(set(paths))
    assert [prefixes[leaf] for leaf in tree.leaf_of_path] == paths


@pytest.mark.parametrize("norm_kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_a_subset_is_read_out_raw_or_normalised_without_learned_parts(norm, norm_kind):
    model = network(norm=norm, norm_kind=norm_kind)
    sums = torch.randn(3, 4, 6, generator=generator(0), dtype=torch.float64)
    weight, bias = model.read_out.weight.numpy(), model.read_out.bias.numpy()
    close(read_out(model, sums, "raw"), sums.numpy() @ weight.T + bias)
    close(read_out(model, sums, "normalised"), plain_norm(sums, model.cfg).numpy() @ weight.T + bias)


# --- counting and drawing paths ---------------------------------------------------------------------------------------


def enumerated(layers, heads, length, skip):
    choices = range(0 if skip else 1, heads + 1)
    return [path for path in itertools.product(choices, repeat=layers) if np.count_nonzero(path) == length]


@every
@given(st.integers(1, 4), st.integers(1, 3), st.data(), st.booleans())
def test_paths_of_a_length_are_those_of_an_enumeration(layers, heads, data, skip):
    length = data.draw(st.integers(0, layers))
    wanted = enumerated(layers, heads, length, skip)
    assert num_paths(layers, heads, length, skip) == len(wanted)
    assert all_paths(layers, heads, length, skip).shape == (len(wanted), layers)
    assert [tuple(path) for path in all_paths(layers, heads, length, skip)] == wanted  # lexicographic, as itertools


@every
@given(st.integers(1, 5), st.integers(1, 3), st.data(), st.integers(1, 20), st.booleans(), st.booleans(), seeds)
def test_drawn_paths_are_paths_of_that_length(layers, heads, data, number, replacement, skip, seed):
    length = data.draw(st.integers(0, layers))
    drawn = sample_paths(layers, heads, length, number, generator(seed), replacement=replacement, skip=skip)
    listed = [tuple(path) for path in drawn]
    wanted = enumerated(layers, heads, length, skip)
    assert set(listed) <= set(wanted)
    if replacement and wanted:
        assert drawn.shape == (number, layers)
    else:
        assert drawn.shape[1] == layers
        assert len(set(listed)) == len(listed) == min(number, len(wanted))
    again = sample_paths(layers, heads, length, number, generator(seed), replacement=replacement, skip=skip)
    assert np.array_equal(drawn, again)


@pytest.mark.parametrize(("layers", "heads", "length", "skip"), [(3, 2, 2, True), (4, 1, 2, True), (3, 2, 3, False)])
def test_drawing_with_replacement_is_uniform(layers, heads, length, skip):
    wanted = enumerated(layers, heads, length, skip)
    drawn = sample_paths(layers, heads, length, 150 * len(wanted), generator(0), replacement=True, skip=skip)
    counts = [(drawn == path).all(1).sum() for path in wanted]
    assert sum(counts) == len(drawn)
    # of fixed seeds: 1e-3 is a draw too unlikely to be met by chance, and too likely to be met by a wrong law
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_drawing_without_replacement_is_uniform_over_subsets():
    """Two of three paths (4 layers, one head each, length 3 has 4): all 12 ordered pairs are equally likely."""
    wanted = enumerated(4, 1, 3, True)
    pairs = dict.fromkeys(itertools.permutations(wanted, 2), 0)
    for seed in range(1200):
        pairs[tuple(tuple(path) for path in sample_paths(4, 1, 3, 2, generator(seed), replacement=False))] += 1
    assert scipy.stats.chisquare(list(pairs.values())).pvalue > 1e-3


def test_paths_of_a_deep_network_are_drawn_without_listing_them_all():
    drawn = sample_paths(96, 96, 48, 20, generator(0), replacement=False)
    assert drawn.shape == (20, 96) and (np.count_nonzero(drawn, axis=1) == 48).all() and drawn.max() <= 96


@pytest.mark.parametrize(("heads", "length"), [(96, 0), (1, 96), (1, 95)])
def test_few_paths_of_a_deep_network_are_listed_without_the_others(heads, length):
    """Length 0 has one path in a network of any size: every analysis with replacement=false meets it."""
    drawn = sample_paths(96, heads, length, 100, generator(0), replacement=False)
    wanted = {96: [(1,) * 96], 0: [(0,) * 96], 95: [(1,) * i + (0,) + (1,) * (95 - i) for i in range(96)]}[length]
    assert {tuple(path) for path in drawn} == set(wanted)


def test_frozen_sums_of_a_deep_network_are_one_sweep():
    """96 layers of 2 heads have 3^96 paths; their number by length is what identity attention and M = H shows.

    With a window of 0 each token sees itself alone, P = I.
    """
    identity = {"mask": "window", "window": 0, "mlp": False, "mlp_skip": False, "norm": "none", "bias": False}
    model = network(layers=96, width=2, heads=2, head_width=2, **identity)
    for block in model.blocks:  # each head the identity: every path is X itself
        block.attention.qkv.weight[-4:] = torch.eye(2).repeat(2, 1).double()
        block.attention.out.weight[:] = torch.eye(2).repeat(1, 2).double()
    sums = sums_by_length(model, tokens()).by_length_KBND
    x = model.embed(tokens())
    for length in (0, 1, 48, 96):
        # 96 exact doublings and additions of integers beyond 2^53: a hundred roundings
        torch.testing.assert_close(sums[length], math.comb(96, length) * 2.0**length * x, rtol=1e-12, atol=0)

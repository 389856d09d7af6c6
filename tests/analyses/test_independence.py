"""rankbench.analyses.independence against Hessians and paths written out, and numbers computed by hand.

Shapes: B batch, N token, D width, L layer, H head.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from drawn import normal
from rows import pick
from shipped import options_of

from rankbench.analyses import independence
from rankbench.analysing.runner import measure
from rankbench.config.keys import ConfigError
from rankbench.measures import cross_gradients, dependence
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length, with_signs
from rankbench.measures.paths import all_paths, joint_network, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.plots.independence import draw_independence
from rankbench.seeds import generator_for

EXACT = {"rel": 1e-10, "abs": 1e-12}  # float64, a few hundred operations in another order
SMALL = {"tokens": 2, "paths_per_length": 2, "probes": 2, "hessian_sequences": 8, "sequences": 40}


options = functools.partial(options_of, "independence", **SMALL)


@pytest.fixture(scope="session")
def make_subject(random_subject):
    return functools.partial(random_subject, train=1, test=60)


STRUCTURES = [
    {},
    {"norm": "pre", "norm_kind": "rmsnorm"},
    {"norm": "none", "skip_scale": 0.5, "mlp": False, "mlp_skip": False},
    {"mask": "causal", "padded": True},
]


# --- joint networks and signs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", STRUCTURES, ids=str)
def test_a_joint_frozen_network_is_the_sum_of_its_paths(make_subject, changes):
    subject = make_subject(layers=3, **changes)
    network = FrozenNetwork(subject.network, subject.test.inputs)
    choices = [[0, 2], [1], [0, 1, 2]]
    paths = np.array(list(itertools.product(*choices)))
    wanted = sums_of_groups(network, [paths])[0]
    torch.testing.assert_close(joint_network(network, choices), wanted, rtol=1e-11, atol=1e-12)
    everything = joint_network(network, [[0, 1, 2]] * 3)
    sums = sums_by_length(subject.network, subject.test.inputs)
    torch.testing.assert_close(everything, sums.by_length_KBND.sum(0), rtol=1e-11, atol=1e-12)


def test_a_joint_recomputed_network_of_one_path_is_that_path_and_of_two_it_is_not_their_sum(make_subject):
    subject = make_subject(layers=3)
    network = RecomputedNetwork(subject.network, subject.test.inputs)
    path = np.array([[2, 0, 1]])
    alone = sums_of_groups(network, [path])[0]
    torch.testing.assert_close(joint_network(network, [[2], [0], [1]]), alone, rtol=1e-12, atol=1e-13)
    both = sums_of_groups(network, [np.array([[2, 0, 1], [2, 0, 2]])])[0]
    torch.testing.assert_close(joint_network(network, [[2], [0], [1, 2]]), both)  # they part at the end alone
    late = sums_of_groups(network, [np.array(list(itertools.product([0, 2], [0], [1])))])[0]
    assert (joint_network(network, [[0, 2], [0], [1]]) - late).abs().max() > 0.1


def test_an_interaction_that_is_rounding_is_marked(make_subject):
    """No recomputed paths interact where attention is uniform and nothing normalises; control: where it is not."""
    subject = make_subject(norm="none", bias=False, mlp=False)
    ordinary = independence.table(subject, options())
    for block in subject.network.blocks:
        block.attention.qkv.weight[:8] = 0  # no queries, no keys
    additive = independence.table(subject, options())
    for table, below in ((ordinary, 0), (additive, 1)):
        of_network = pick(table, of="network").set_index("scheme")
        assert of_network.interaction_below_floor.to_dict() == {"frozen": 1, "recomputed": below}
        pairs = pick(table, of="paths", scheme="recomputed")
        assert (pairs.interaction_below_floor[pairs.interaction > 1e-6] == 0).all()
        assert (pairs.interaction_below_floor[pairs.interaction < 1e-14] == 1).all()
    assert pairs.interaction.max() < 1e-14
    assert table[table.of.isin(["lengths", "heads"])].interaction_below_floor.isna().all()


@pytest.mark.parametrize("changes", STRUCTURES, ids=str)
def test_the_mean_square_over_all_signs_is_the_sum_of_the_paths_squares(make_subject, changes):
    """Exact: all 2^(L H) patterns of signs are averaged, where the analysis draws some."""
    subject = make_subject(**changes)
    network = FrozenNetwork(subject.network, subject.test.inputs)
    squares = torch.zeros(3, dtype=torch.float64)
    for signs in itertools.product([-1.0, 1.0], repeat=4):
        signed = with_signs(network, torch.tensor(signs, dtype=torch.float64).view(2, 2))
        squares += signed.by_length().by_length_KBND.flatten(1).square().sum(1) / 16
    for length in range(3):
        outputs = sums_of_groups(network, list(all_paths(2, 2, length)[:, None]))
        assert squares[length].item() == pytest.approx(outputs.square().sum().item(), **EXACT)


# --- the table ------------------------------------------------------------------------------------------------------


def test_one_row_for_each_pair(make_subject):
    table = independence.table(make_subject(), options())
    lengths, single, heads = 3, 1 + 2 + 2, 4
    for scheme in ("frozen", "recomputed"):
        rows = pick(table, scheme=scheme)
        assert len(pick(rows, of="lengths")) == lengths * (lengths + 1) // 2
        assert len(pick(rows, of="paths")) == single * (single - 1) // 2
        assert len(pick(rows, of="network")) == 1
    assert len(pick(table, of="heads")) == heads * (heads + 1) // 2
    same = [set(pick(table, of="paths", scheme=scheme)["first"]) for scheme in ("frozen", "recomputed")]
    assert same[0] == same[1]  # the same paths in both


def test_measures_of_lengths_by_hand(make_subject):
    subject = make_subject()
    table = independence.table(subject, options(schemes=["frozen"]))
    x = sums_by_length(subject.network, subject.test.inputs[:40]).by_length_KBND.numpy()
    for j, k in itertools.combinations(range(3), 2):
        (row,) = pick(table, of="lengths", first=f"S{j}", second=f"S{k}").to_dict("records")
        angles = [(a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()) for a, b in zip(x[j], x[k], strict=True)]
        assert row["cosine"] == pytest.approx(np.mean(angles), **EXACT)
        wanted = {name: [] for name in independence.DEPENDENCE}
        for token in (0, 3):
            a, b = x[j][:, token], x[k][:, token]
            wanted["covariance"].append(dependence.covariance(a, b))
            wanted["correlation"].append(dependence.correlation(a, b))
            parts = dependence.whitened(a, 3), dependence.whitened(b, 3)
            wanted["information_gaussian"].append(dependence.gaussian_information(*parts))
            wanted["information_ksg"].append(dependence.ksg_information(*parts, 4))
            grams = dependence.gaussian_gram(a), dependence.gaussian_gram(b)
            wanted["hsic"].append(dependence.unbiased_hsic(*grams))
            wanted["alignment_gaussian"].append(dependence.alignment(*grams))
            wanted["alignment_linear"].append(dependence.alignment(*map(dependence.linear_gram, (a, b))))
        for name, values in wanted.items():
            assert row[name] == pytest.approx(pd.Series(values).mean(), nan_ok=True, **EXACT), name


def test_absent_tokens_do_not_count(make_subject):
    subject = make_subject(padded=True)
    inputs = subject.test.inputs[:40]
    present = inputs >= 0
    outputs = sums_of_groups(RecomputedNetwork(subject.network, inputs), [all_paths(2, 2, k) for k in range(3)])
    outputs = (outputs * present[..., None]).numpy()
    table = independence.table(subject, options(schemes=["recomputed"], tokens=2))
    (row,) = pick(table, of="lengths", first="S1", second="S2").to_dict("records")
    angles = [(a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(*outputs[1:], strict=True)]
    assert row["cosine"] == pytest.approx(np.mean(angles), **EXACT)
    assert present[:, 3].sum() < independence.FEWEST  # too few sequences are that long: the first place alone
    assert row["correlation"] == pytest.approx(dependence.correlation(outputs[1][:, 0], outputs[2][:, 0]), **EXACT)
    (diagonal,) = pick(table, of="lengths", first="S2", second="S2").to_dict("records")
    each = sums_of_groups(RecomputedNetwork(subject.network, inputs), list(all_paths(2, 2, 2)[:, None])).numpy()
    squares = ((each * present.numpy()[..., None]) ** 2).sum()
    assert diagonal["interference"] == pytest.approx((outputs[2] ** 2).sum() / squares, **EXACT)


@pytest.mark.further
@pytest.mark.parametrize("scheme", ["frozen", "recomputed"])
def test_interference_by_enumeration_and_by_signs(make_subject, scheme):
    subject = make_subject(layers=2)
    inputs = subject.test.inputs[:40]
    network = {"frozen": FrozenNetwork, "recomputed": RecomputedNetwork}[scheme](subject.network, inputs)
    table = independence.table(subject, options(schemes=[scheme])).dropna(subset="interference")
    assert (table.interference_se == 0).all()
    for length in range(3):
        each = sums_of_groups(network, list(all_paths(2, 2, length)[:, None]))
        wanted = each.sum(0).square().sum() / each.square().sum()
        (row,) = pick(table, first_length=length).to_dict("records")
        assert row["interference"] == pytest.approx(wanted.item(), **EXACT)
        assert row["num_paths"] == len(each) and row["interference"] <= row["num_paths"]
    if scheme == "frozen":
        drawn = independence.table(subject, options(schemes=[scheme], max_paths=8, sign_draws=400))
        drawn = drawn.dropna(subset="interference")
        assert (drawn.interference_se.iloc[1:] > 0).all()
        # four standard errors; the one path of length 0 has no sign
        distance = np.abs(drawn.interference.to_numpy() - table.interference.to_numpy())
        assert (distance <= 4 * drawn.interference_se + 1e-12).all()
    else:  # without all paths there are no sums of them
        few = independence.table(subject, options(schemes=[scheme], max_paths=8))
        assert set(few.of) == {"paths", "heads"}


def plain(x):
    return F.layer_norm(x, x.shape[-1:], eps=1e-5)


def test_interactions_by_hand(make_subject):
    subject = make_subject()
    inputs = subject.test.inputs[:40]
    table = independence.table(subject, options())
    assert pick(table, of="network", scheme="frozen").interaction.item() < 1e-12  # an identity
    network = RecomputedNetwork(subject.network, inputs)
    sums = sums_of_groups(network, [np.concatenate([all_paths(2, 2, k) for k in range(3)])])[0]
    state = FrozenNetwork(subject.network, inputs).state_BND
    ratio = (plain(state) - plain(sums)).flatten(1).norm(dim=1) / plain(state).flatten(1).norm(dim=1)
    got = pick(table, of="network", scheme="recomputed").interaction.item()
    assert got == pytest.approx(ratio.mean().item(), **EXACT)
    pairs = pick(table, of="paths", scheme="recomputed")
    assert pairs.interaction.notna().all()
    for row in pairs.to_dict("records"):
        choices = [sorted({int(a), int(b)}) for a, b in zip(row["first"][::2], row["second"][::2], strict=True)]
        joint = plain(joint_network(network, choices))
        added = plain(sums_of_groups(network, [np.array(list(itertools.product(*choices)))])[0])
        ratio = (joint - added).flatten(1).norm(dim=1) / joint.flatten(1).norm(dim=1)
        assert row["interaction"] == pytest.approx(ratio.mean().item(), rel=1e-8, abs=1e-11)


# --- cross-gradients ------------------------------------------------------------------------------------------------


def hessian_of_all(model, batch):
    """The loss' Hessian by all attention parameters but b_O, flat, which head each entry belongs to, and the
    parameters."""
    named = dict(model.named_parameters())
    parameters = {name: named[name] for name in named if "qkv" in name or name.endswith("attention.out.weight")}

    def loss(flat):
        parts = flat.split([x.numel() for x in parameters.values()])
        given = {name: part.view_as(parameters[name]) for name, part in zip(parameters, parts, strict=True)}
        outputs = torch.func.functional_call(model, given, (batch.inputs,))
        return F.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten(), ignore_index=-1)

    flat = torch.cat([x.flatten() for x in parameters.values()])
    width, heads = model.blocks[0].attention.head_width, model.cfg.heads
    owner = []
    for name, x in parameters.items():
        layer = int(name.split(".")[1])
        for index in itertools.product(*map(range, x.shape)):
            column = index[1] if name.endswith("attention.out.weight") else index[0]
            owner.append(layer * heads + column // width % heads)
    return torch.autograd.functional.hessian(loss, flat), np.array(owner), parameters


@pytest.mark.further
@pytest.mark.parametrize(
    "changes",
    [
        {"padded": True, "bias": False},
        pytest.param({"positions": "sinusoidal"}, marks=pytest.mark.slow),
        pytest.param({"norm": "pre", "tied_qk": True, "mlp": False, "mlp_skip": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_cross_gradients_against_the_whole_hessian(make_subject, changes):
    subject = make_subject(**changes)
    batch = subject.test[:6]
    hessian, owner, _ = hessian_of_all(subject.network, batch)
    wanted = np.array([[hessian[owner == a][:, owner == b].norm().item() for b in range(4)] for a in range(4)])
    generator = torch.Generator().manual_seed(0)
    rounding = torch.Generator().manual_seed(1)
    got, error, floor = cross_gradients.cross_gradients(subject.network, batch, 30, generator, rounding)
    assert ((floor > 0) & (floor < 1e-9 * got)).all()  # float64
    # unbiased squares: five standard errors of 16 numbers, and the errors are small enough to tell blocks apart
    assert (np.abs(got.numpy() - wanted) < 5 * error.numpy() + 1e-12).all()
    assert (error.numpy() < 0.25 * wanted).all()
    torch.testing.assert_close(got, got.T)


def test_a_product_with_the_hessian_is_exact_and_the_same_in_chunks(make_subject, monkeypatch):
    subject = make_subject(padded=True)
    batch = subject.test[:7]
    hessian, _, parameters = hessian_of_all(subject.network, batch)
    direction = {name: normal(number, *x.shape) for number, (name, x) in enumerate(parameters.items())}
    wanted = hessian @ torch.cat([x.flatten() for x in direction.values()])
    for at_a_time in (100, 3):
        monkeypatch.setattr(cross_gradients, "SEQUENCES_AT_A_TIME", at_a_time)
        got = cross_gradients.hessian_product(subject.network, batch, parameters, direction)
        torch.testing.assert_close(
            torch.cat([got[name].flatten() for name in parameters]), wanted, rtol=1e-9, atol=1e-11
        )


@pytest.mark.further
def test_head_rows_hold_the_norms(make_subject):
    subject = make_subject()
    table = pick(independence.table(subject, options()), of="heads")
    generator = generator_for(subject.seed, "cross_gradients")
    rounding = torch.Generator().manual_seed(1)
    norms, errors, _ = cross_gradients.cross_gradients(subject.network, subject.test[:8], 2, generator, rounding)
    own = table[table["first"] == table["second"]].set_index("first").cross_gradient
    for row in table.to_dict("records"):
        a, b = (2 * (int(row[side][1]) - 1) + int(row[side][3]) - 1 for side in ("first", "second"))
        assert row["cross_gradient"] == pytest.approx(norms[a, b].item(), **EXACT)
        assert row["cross_gradient_se"] == pytest.approx(errors[a, b].item(), **EXACT)
        relative = row["cross_gradient"] / math.sqrt(own[row["first"]] * own[row["second"]])
        assert row["cross_gradient_relative"] == pytest.approx(relative, **EXACT)


# --- options, digest, figure, claims --------------------------------------------------------------------------------


def test_too_small_a_test_set_is_refused(make_subject):
    subject = make_subject()
    small = dataclasses.replace(subject, test=subject.test[:29])
    with pytest.raises(ConfigError, match="needs at least 30 test sequences; this task has 29"):
        independence.table(small, options(sequences=None))


@pytest.fixture(scope="module")
def table_of_three_seeds(make_subject):
    return measure("independence", options(), [make_subject(seed) for seed in (3, 4, 5)])


@pytest.mark.further
def test_the_digest_shows_mean_sizes(table_of_three_seeds):
    table = table_of_three_seeds
    lines = independence.digest(table).splitlines()
    assert "3 seeds" in lines[0]
    words = next(line for line in lines if line.startswith("paths") and "recomputed" in line).split()
    rows = pick(table, of="paths", scheme="recomputed")
    assert words[2] == f"{rows.cosine.abs().mean():.3f}"


@pytest.mark.further
def test_the_figure_shows_the_tables_means(table_of_three_seeds):
    table = table_of_three_seeds
    figure = draw_independence(table)
    maps = [axes for axes in figure.axes if axes.images]
    assert len(maps) == 9 and all(axes.images[0].norm.vmin == -1 for axes in maps)
    cosine = maps[4].images[0].get_array()  # the second row: recomputed
    mean = pick(table, of="lengths", scheme="recomputed", first="S0", second="S2").cosine.mean()
    assert cosine[0, 2] == cosine[2, 0] == pytest.approx(mean, **EXACT)
    both = pd.concat([table.assign(label="a"), table.assign(label="b")])
    assert len([axes for axes in draw_independence(both, None, "label").axes if axes.images]) == 18
    figure.draw_without_rendering()
    (legend,) = figure.subfigs[1].legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["frozen", "recomputed", "identical paths", "orthogonal paths"]
    assert not any(axes.get_tightbbox().overlaps(legend.get_window_extent()) for axes in figure.axes)  # nor any line

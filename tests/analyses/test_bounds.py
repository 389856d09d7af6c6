"""rankbench.analyses.bounds: its numbers against the same by hand, and its proved bound against every kind of network.

Shapes: B batch, N token, D width.
"""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from by_hand import composite, maps_by_hand
from rows import pick

from rankbench.analyses import ANALYSES, bounds
from rankbench.analysing.runner import measure
from rankbench.model.network import without
from rankbench.model.transformer import Transformer
from rankbench.plots.marks import FLOOR
from rankbench.runs.tables import read_table, write_table

VARIANTS = ["attention_only_no_norm", "no_mlp_no_norm", "no_skip_no_norm", "no_norm"]


@pytest.fixture(scope="session")
def make_subject(fresh_subject):
    """subject(seed=0, gain=1, **model keys): a small network as torch initialises it, all matrices times `gain`."""
    small = {"sequences": 9, "length": 6, "name": "small", "layers": 3, "heads": 2, "width": 8}
    return lambda seed=0, gain=1.0, **changes: fresh_subject(seed, **{**small, "init_gain": gain, **changes})


def table_of(subject, *variants, sequences=9):
    return bounds.table(subject, bounds.Options(list(variants), sequences))


def by_hand(block, cfg):
    """beta and lambda of a layer without norms, head by head, in plain loops."""
    betas = []
    for head in range(cfg.heads):
        w_q, w_k, w_v, w_o, *_ = maps_by_hand(block.attention, head)
        betas.append(np.abs(w_q @ w_k.T).sum(0).max() * composite(w_v @ w_o))
    lam = 1.0
    if cfg.mlp:
        gelu_slope = 1.1289042  # the largest, to 8 digits
        up, down = (np.abs(linear.weight.numpy().T) for linear in (block.mlp.up, block.mlp.down))
        m = gelu_slope * up @ down + cfg.mlp_skip * np.eye(cfg.width)
        lam = composite(m)
    return max(betas), lam


def reduced_config(cfg, skip=False, mlp=False, norm=False):
    """The config of a network built without what is taken out."""
    changes = {"skip": False, "mlp_skip": False} if skip else {}
    changes |= {"mlp": False, "mlp_skip": False} if mlp else {}
    return dataclasses.replace(cfg, **changes, **({"norm": "none"} if norm else {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_number_by_hand(make_subject, states_by_layer, variant):
    subject = make_subject(gain=2.0)  # no residual near rounding
    table = table_of(subject, variant)
    model = subject.network.double().requires_grad_(False)
    reduced = without(model, **bounds.VARIANTS[variant])
    cfg = reduced_config(model.cfg, **bounds.VARIANTS[variant])
    states = states_by_layer(reduced, subject.test.inputs)
    residuals = np.array([[composite((x - x.mean(0)).numpy()) for x in state] for state in states])
    constants = [by_hand(block, cfg) for block in model.blocks]
    coefficients = [4 * beta * cfg.heads / math.sqrt(4) for beta, _ in constants]
    recursion, layer = [residuals[0]], [residuals[0]]
    for (_, lam), c, before in zip(constants, coefficients, residuals, strict=False):
        recursion.append(lam * (cfg.skip * recursion[-1] + c * recursion[-1] ** 3))
        layer.append(lam * (cfg.skip * before + c * before**3))
    c = max(coefficients) * max(lam for _, lam in constants)
    theorem = [c ** ((3**depth - 1) / 2) * residuals[0] ** (3**depth) for depth in range(4)]
    wanted = {"recursion": recursion, "layer": layer}
    if not cfg.skip:
        wanted["theorem"] = theorem
    for bound, values in wanted.items():
        rows = pick(table, bound=bound)
        assert rows.layer.tolist() == [0, 1, 2, 3]
        slack = np.log10(values) - np.log10(residuals)
        # the largest slope of gelu is written with 8 digits above
        assert rows.log10_bound.to_numpy() == pytest.approx(np.log10(values).mean(1), rel=1e-6, abs=1e-6)
        assert rows.log10_measured.to_numpy() == pytest.approx(np.log10(residuals).mean(1), abs=1e-10)
        assert rows.slack.to_numpy() == pytest.approx(slack.mean(1), rel=1e-6, abs=1e-6)
        assert rows.slack_min.to_numpy() == pytest.approx(slack.min(1), rel=1e-6, abs=1e-6)
        assert rows.log10_beta.to_numpy()[1:] == pytest.approx([math.log10(beta) for beta, _ in constants])
        assert rows.log10_lambda.to_numpy()[1:] == pytest.approx([math.log10(lam) for _, lam in constants], abs=1e-7)
        falls = [(after < before).mean() for after, before in zip(layer[1:], residuals, strict=False)]
        assert rows.contractive.tolist()[1:] == pytest.approx(falls)
        assert "noise_floor" not in rows  # of residuals that are followed
        assert rows.isna().sum().sum() == 3  # layer 0 has no constants
    diameters = [[torch.cdist(x, x, p=1).max().item() for x in state] for state in states]
    got = pick(table, bound="diameter").log10_measured
    assert got.to_numpy() == pytest.approx(np.log10(diameters).mean(1), abs=1e-10)


def test_the_source_says_which_theorem_and_whether_it_speaks_of_the_network(make_subject):
    table = table_of(make_subject(), *VARIANTS, "full")
    sources = pick(table, bound="theorem", layer=1).set_index("variant").source.to_dict()
    assert sources == {
        "attention_only_no_norm": "Theorem 2.3",
        "no_mlp_no_norm": "Corollary 3.1",
        "no_skip_no_norm": "Corollary 3.2",
    }
    covered = pick(table, bound="recursion", layer=1).set_index("variant").covered.to_dict()
    assert covered == {variant: variant not in ("no_norm", "full") for variant in [*VARIANTS, "full"]}
    assert set(pick(table, variant="full").bound) == {"recursion", "layer"}
    assert pick(table, variant="full").source.str.contains("sec. 3.3").all()
    alone = table_of(make_subject(heads=1), "attention_only_no_norm")
    assert set(pick(alone, bound="theorem").source) == {"Theorem 2.2"}
    masked = pick(table_of(make_subject(mask="causal"), "attention_only_no_norm"), bound="theorem")
    assert masked.empty


@pytest.mark.parametrize("gain", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "causal"},
        {"mask": "window", "window": 1},
        {"activation": "relu", "skip_scale": -0.7, "branch_scale": 0.3, "temperature": 0.5},
        {"heads": 4, "head_width": 8, "tied_qk": True, "mlp_ratio": 3.0},
    ],
    ids=str,
)
def test_the_proved_bound_holds_in_every_network_without_norms(make_subject, changes, gain):
    table = pick(table_of(make_subject(gain=gain, **changes), *VARIANTS), bound="diameter")
    assert len(table) == 4 * 4 and table.covered.all()
    assert (table.holds.dropna() == 1).all() and table.holds.notna().sum() > 8


def test_temperature_and_branch_scale_are_parts_of_beta(make_subject):
    plain, scaled = (
        pick(table_of(make_subject(**keys), "attention_only_no_norm"), bound="recursion", layer=1).log10_beta.item()
        for keys in ({}, {"temperature": 4.0, "branch_scale": -0.5})
    )
    assert scaled - plain == pytest.approx(math.log10(0.5 / 4))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_mlps_stretch_bounds_its_jacobian_and_its_differences(make_subject, activation):
    subject = make_subject(gain=2.0, activation=activation)
    mlp = subject.network.blocks[0].double().mlp
    stretch = bounds.mlp_stretch(mlp)
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 30.0):
        for _ in range(20):
            y_ND, centre_D = scale * torch.randn(7, 8, generator=generator).double(), torch.randn(8).double()
            moved = mlp(y_ND) - mlp(centre_D[None])
            apart = y_ND - centre_D
            for p, limit in ((1, stretch[0]), (torch.inf, stretch[1])):
                assert torch.linalg.matrix_norm(moved, p) <= limit * torch.linalg.matrix_norm(apart, p) * (1 + 1e-9)
    if activation == "gelu":
        return
    # relu with all units on and weights of one sign is linear: nothing smaller would do
    mlp.up.weight.abs_(), mlp.down.weight.abs_()
    mlp.up.bias.fill_(100.0)
    linear = torch.func.jacrev(lambda y: mlp(y[None])[0])(torch.ones(8).double()).T
    assert bounds.mlp_stretch(mlp)[0].item() == pytest.approx(torch.linalg.matrix_norm(linear, 1).item())


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_norms_count_as_right_multiplications_by_the_largest_scale(make_subject, norm):
    """A norm whose scale is the same for every token is one: then the bound by hand is the table's."""
    plain = {"mlp": False, "norm_kind": "rmsnorm", "norm_affine": False, "bias": False, "positions": "none"}
    subject = make_subject(norm=norm, layers=1, **plain)
    # tokens that are permutations of one another have one root mean square; attention keeps that only up to mixing,
    # so the post-norm's scale is computed here
    weight = subject.network.read_in.weight
    weight.copy_(torch.stack([weight[0].roll(shift) for shift in range(len(weight))]))
    got = pick(table_of(subject, "full", sequences=1), bound="layer", layer=1)
    model = subject.network.double()
    x = model.embed(subject.test.inputs[:1])
    beta, _ = by_hand(model.blocks[0], model.cfg)
    r, c = composite((x - x.mean(1, keepdim=True))[0].numpy()), 4 * beta * 2 / math.sqrt(4)
    if norm == "pre":
        scale = (x.square().mean(-1) + 1e-5).rsqrt().max().item()
        wanted = r + c * (scale * r) ** 3
    else:
        y = x + model.blocks[0].attention(x)
        wanted = (y.square().mean(-1) + 1e-5).rsqrt().max().item() * (r + c * r**3)
    assert got.log10_bound.item() == pytest.approx(math.log10(wanted), rel=1e-6)


def test_every_layer_is_compared_far_below_rounding(make_subject, states_by_layer):
    subject = make_subject(layers=8, gain=0.5)
    table = table_of(subject, "attention_only_no_norm")
    assert table.followed.all() and (table.below_floor == 0).all() and (table.compared == 9).all()
    assert np.isfinite(table[["log10_bound", "log10_measured", "slack", "slack_min"]]).all(axis=None)
    # 500-digit arithmetic confirms what `collapse` follows (tests/analyses/test_collapse.py)
    of_collapse = ANALYSES["collapse"]
    followed = of_collapse.table(subject, of_collapse.options(["attention_only_no_norm"], 9))
    measured = pick(table, bound="theorem").log10_measured
    assert measured.to_numpy() == pytest.approx(followed.log10_residual.to_numpy(), rel=1e-12)
    assert measured.iloc[-1] < -1000
    # above rounding the diameter is the plain forward pass's: the first two layers
    network = without(subject.network.double(), skip=True, mlp=True, norm=True)
    with torch.no_grad():
        states = states_by_layer(network, subject.test.inputs[:9])
    for layer, x_BND in enumerate(states[:3]):
        diameter_B = [max(float(abs(a - b).sum()) for a in x_ND for b in x_ND) for x_ND in x_BND]
        (measured,) = pick(table, bound="diameter", layer=layer).log10_measured
        assert measured == pytest.approx(np.log10(diameter_B).mean(), abs=1e-6)


def test_sequences_of_equal_tokens_count_nowhere(make_subject):
    subject = make_subject(positions="none")
    subject.test.inputs[0] = subject.test.inputs[0, 0]
    others = dataclasses.replace(subject, test=subject.test[1:])
    got, wanted = (table_of(of, "attention_only_no_norm") for of in (subject, others))
    pd.testing.assert_frame_equal(got, wanted, rtol=1e-9)
    assert (table_of(subject, "no_norm", sequences=1).compared == 0).all()


def test_below_the_noise_floor_nothing_is_said_of_a_network_that_cannot_be_followed(make_subject):
    table = table_of(make_subject(layers=8, width=8, gain=0.5, norm="pre", norm_kind="l2norm"), "attention_only")
    assert not table.followed.any()
    last = pick(table, layer=8)
    assert (last.compared == 0).all() and (last.below_floor > 0.5).all()
    assert last[["slack", "slack_min", "holds", "refuted"]].isna().all(axis=None)
    assert last.log10_measured.isna().all() and (last.noise_floor > 1e-20).all()
    assert np.isfinite(table.log10_bound).all()


def test_values_of_zero_leave_nothing_to_bound(make_subject):
    table = table_of(make_subject(values="zero"), *VARIANTS)
    assert np.isfinite(table[table.bound != "layer"].log10_bound).all()
    alone = pick(table, variant="attention_only_no_norm")
    assert (alone.log10_measured.isna() == (alone.layer > 0)).all()  # no residual is left, and none compared
    assert ((alone.compared == 0) == (alone.layer > 0)).all()
    skips = pick(table, variant="no_mlp_no_norm", bound="recursion")
    assert skips.slack.to_numpy() == pytest.approx(0, abs=1e-9)
    assert (skips.holds == 1).all()  # equality, to rounding


def test_padding_is_no_part_of_a_sequence(make_subject):
    subject = make_subject(positions="none", layers=2)  # deep enough, and far above rounding
    short = dataclasses.replace(subject, test=subject.test[:3])
    inputs = F.pad(subject.test.inputs[:3], (0, 4), value=-1)
    with torch.device("meta"):
        padded = Transformer(subject.network.cfg, **{**subject.network.sizes, "padded": True, "length": 10})
    padded.load_state_dict(subject.network.state_dict(), assign=True)
    test = dataclasses.replace(subject.test, inputs=inputs, targets=inputs)
    long = dataclasses.replace(subject, networks={"initialised": padded}, test=test)
    for variant in (*VARIANTS, "full"):
        # padding changes the order of sums
        pd.testing.assert_frame_equal(table_of(short, variant), table_of(long, variant), rtol=1e-9, atol=1e-9)


def test_a_residual_above_the_bound_is_reported(make_subject):
    compared = bounds._compared(np.array([0.0, 1]), np.array([1.0, 0]), np.array([0.5, -1]))
    assert compared == {"compared": 2, "slack": 0.0, "slack_min": -1.0, "holds": 0.5, "refuted": 0.5}


def two_seeds(make_subject, *variants, **changes):
    return measure("bounds", bounds.Options(list(variants), 9), [make_subject(seed, **changes) for seed in (0, 1)])


@pytest.mark.further
def test_digest_and_figure_of_the_written_table(make_subject, tmp_path):
    table = two_seeds(make_subject, *VARIANTS, "full")
    write_table(table, tmp_path / "bounds.csv")
    table = read_table(tmp_path / "bounds.csv")
    digest = bounds.digest(table)
    assert "mean of 2 seeds" in digest
    mean = pick(table, variant="no_skip_no_norm", bound="theorem", layer=3).log10_bound.mean()
    assert f"{mean:.4g}" in digest
    for facet, rows in ((None, 1), ("seed", 2)):
        figure = ANALYSES["bounds"].figure(table, None, facet)
        assert len(figure.axes) == rows * 5
        assert all(axes.get_yscale() == "linear" for axes in figure.axes)  # of values that are log10
        for axes in figure.axes:  # the bounds may leave the panel, what was measured may not
            low, high = axes.get_ylim()
            for line in axes.get_lines():
                measured = np.array(line.get_ydata(), float)
                inside = (low < measured) & (measured < high) | np.isnan(measured)
                assert inside.all() or not line.get_label().startswith("measured")
        lines = {line.get_label(): line for line in figure.axes[2].get_lines()}
        if facet is None:
            assert lines["bound: theorem"].get_ydata()[-1] == pytest.approx(mean)
            measured = pick(table, variant="no_skip_no_norm", bound="layer").groupby("layer").log10_measured.mean()
            assert lines["measured residual"].get_ydata() == pytest.approx(measured.to_numpy())
            assert list(lines["measured residual"].get_xdata()) == list(measured.index)  # and not above a bound of it
    near = ANALYSES["bounds"].figure(table.assign(noise_floor=1e-9, below_floor=1.0), None, None).axes[2]
    floor = next(line for line in near.get_lines() if line.get_label() == FLOOR)
    assert floor.get_ydata() == pytest.approx(-9) and near.get_ylim()[0] < -9

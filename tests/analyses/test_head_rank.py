"""analyses/head_rank.py against loops and exact heads; and the attentions that move along the rank axis.

Shapes: B batch, N token, D width, H head.
"""

import dataclasses
import functools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import attention_by_hand
from drawn import generator, normal, randomised, transformer
from shipped import options_of, task_of

from rankbench.analyses import ANALYSES, Subject, head_rank
from rankbench.analyses.rank_theory import full_rank_head, pairs
from rankbench.config.keys import ConfigError
from rankbench.judging import judge
from rankbench.measures import amsel_theory as theory
from rankbench.measures import lipschitz_of_networks
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length
from rankbench.measures.paths import all_paths, sums_of_groups
from rankbench.model.norm import plain_norm
from rankbench.runs.tables import read_table, with_who, write_table

OPTIONS = options_of("head_rank", heads=None, spectrum=3, sequences=None)
ROUNDING = 1e-11  # float64, some hundred operations of order 1 in each of two layers
COORDINATES = {"read_in": "identity", "read_out": "identity", "positions": "none", "width": 4}
# One of each kind of attention, norm and read-in that the rank presets are made of.
KINDS = [
    {"head_width": 3, "value_width": 5},
    {"heads": 4, "head_width": 2, "kv_groups": 2},
    {"latent_width": 3},
    {"heads": 4, "head_width": 2, "kv_groups": 1, "latent_width": 2, "value_width": 3, "bias": False},
    {"heads": 6, "head_width": 2, "head_reduction": "mean"},
    {"norm_kind": "l2norm"},
    {"norm_kind": "l2norm", "norm": "pre", "norm_affine": False},
    {"mask": "others", "head_width": 4},
    {"width": 6, "positions": "concatenated", "norm_kind": "l2norm"},
]


@pytest.fixture(scope="session")
def network():
    """network(seed=0, inputs=4, **changes): a Transformer from coordinates to as many, all parameters random."""

    def make(seed=0, inputs=4, **changes):
        sizes = {"input_kind": "coordinates", "num_inputs": inputs, "num_outputs": inputs}
        return randomised(transformer(**sizes, **COORDINATES | changes), generator(seed)).requires_grad_(False)

    return make


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_attention_is_that_by_hand_and_the_network_the_sum_of_its_paths(network, changes):
    model, inputs = network(**changes), normal(2, 3, 5, 4)
    x_BND, groups = normal(1, 2, 5, model.cfg.width), [all_paths(2, model.cfg.heads, length) for length in range(3)]
    for attention in model.attentions:
        wanted = attention_by_hand(attention, model.cfg, x_BND)
        torch.testing.assert_close(attention(x_BND), wanted, rtol=0, atol=ROUNDING)
    for mlp in ("gate", "source"):
        sums = sums_by_length(model, inputs, mlp)
        assert sums.remainder().max() < ROUNDING
        one_by_one = sums_of_groups(FrozenNetwork(model, inputs, mlp), groups)
        torch.testing.assert_close(sums.by_length_KBND, one_by_one, rtol=ROUNDING, atol=ROUNDING)


def test_the_l2norm_divides_by_the_length(network):
    norm = network(norm_kind="l2norm").blocks[0].attention_norm
    x_BND = normal(3, 2, 5, 4)
    wanted = x_BND / (x_BND.norm(dim=-1, keepdim=True) ** 2 + 1e-5).sqrt()
    assert norm.weight.shape == (1,)
    torch.testing.assert_close(norm(x_BND), wanted * norm.weight, rtol=1e-14, atol=0)
    torch.testing.assert_close(plain_norm("l2norm", x_BND), wanted, rtol=1e-14, atol=0)


def test_positions_fill_the_width_that_the_coordinates_leave(network):
    model, x_BND = network(width=6, positions="concatenated"), normal(4, 2, 3, 4)
    state = model.embed(x_BND)
    assert torch.equal(state[..., :4], x_BND)
    assert torch.equal(state[..., 4:], model.position.weight[:3].expand(2, 3, 2))
    assert torch.equal(model.read_out(state), x_BND) and torch.equal(state @ model.read_out.weight.T, x_BND)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"width": 6}, "model.width=6: model.read_in=identity"),
        ({"positions": "concatenated"}, "leaves no room"),
        ({"positions": "concatenated", "read_in": "linear"}, "needs model.read_in=identity"),
        ({"width": 2, "read_in": "linear"}, "model.width=2: model.read_out=identity"),
    ],
)
def test_an_identity_between_widths_that_do_not_fit_is_refused(network, changes, says):
    with pytest.raises(ConfigError, match=says):
        network(**changes)


def test_a_hard_network_takes_the_largest_score(network):
    model, x_BND = network(layers=1, mlp=False, mlp_skip=False, norm="none", skip=False, bias=False), normal(5, 2, 5, 4)
    w = model.blocks[0].attention.maps_as_applied()
    wanted = torch.zeros_like(x_BND)
    for q, k, v, o in zip(w.w_q_HDK, w.w_k_HDK, w.w_v_HDK, w.w_o_HKD, strict=True):
        for b in range(2):
            best = ((x_BND[b] @ q) @ (x_BND[b] @ k).T).argmax(1)
            wanted[b] += x_BND[b][best] @ v @ o
    torch.testing.assert_close(head_rank.hard(model)(x_BND), wanted, rtol=ROUNDING, atol=ROUNDING)
    assert model.blocks[0].attention.temperature == 1  # the network itself is left alone


@pytest.mark.parametrize("width", [2, 4, 7])
def test_spectra_and_angles_are_those_of_the_whole_matrix(width):
    left, right = normal(6, 3, 4, width), normal(7, 3, 4, width)
    sigma, angle = lipschitz_of_networks.spectra(left, right)
    for a, b, s, degrees in zip(left.numpy(), right.numpy(), sigma, angle, strict=True):
        matrix = a @ b.T
        wanted = np.linalg.svd(matrix, compute_uv=False)[: min(4, width)]
        np.testing.assert_allclose(s, wanted, rtol=1e-10, atol=1e-12)
        cosine = np.trace(matrix) / np.linalg.norm(matrix) / 2
        assert degrees.item() == pytest.approx(math.degrees(math.acos(cosine)), abs=1e-8)


def subject_of(task, models, seed=0):
    train, test = (task.sample(size, torch.Generator().manual_seed(size)) for size in (400, 60))
    return Subject("a run", seed, task, train, test, models)


nearest = functools.partial(task_of, "nearest_neighbor", dimension=4, points=5)


def test_errors_and_baselines_by_hand(network):
    subject = subject_of(nearest(), {"initialised": network()})
    table = head_rank.table(subject, OPTIONS)
    outputs = subject.network(subject.test.inputs)
    soft = table[(table.of == "network") & (table.evaluation == "soft")].error.item()
    assert soft == pytest.approx((outputs - subject.test.targets).square().sum(-1).mean().item(), rel=1e-12)
    baselines = table[table.of == "baseline"].set_index("evaluation").error
    assert baselines["zero"] == pytest.approx(1, rel=1e-12)
    x, y = (side.numpy() for side in (subject.train.inputs, subject.train.targets))
    features = np.stack([x, x.sum(1, keepdims=True) - x], -1).reshape(-1, 2)
    a, b = np.linalg.lstsq(features, y.ravel(), rcond=None)[0]
    x, y = (side.numpy() for side in (subject.test.inputs, subject.test.targets))
    wanted = ((a * x + b * (x.sum(1, keepdims=True) - x) - y) ** 2).sum(-1).mean()
    assert baselines["linear"] == pytest.approx(wanted, rel=1e-9)
    assert baselines["linear attention"] < baselines["linear"] < 1
    heads = table[(table.of == "head") & (table.layer == 2) & (table["head"] == 2) & (table.matrix == "vo")].iloc[0]
    w = subject.network.blocks[1].attention.maps_as_applied()
    matrix = (w.w_v_HDK[1] @ w.w_o_HKD[1]).numpy()
    sigma = np.linalg.svd(matrix, compute_uv=False)[:2]
    assert heads.frobenius_norm == pytest.approx(np.linalg.norm(matrix), rel=1e-10)
    assert heads.effective_rank == pytest.approx(math.exp(-sum(s * math.log(s) for s in sigma / sigma.sum())), rel=1e-9)
    assert heads.spectral_norm == pytest.approx(sigma[0], rel=1e-10)
    assert math.cos(math.radians(heads.angle)) == pytest.approx(np.trace(matrix) / np.linalg.norm(matrix) / 2, rel=1e-9)
    assert [column for column in table if table[column].isna().all()] == []


def test_the_answer_is_odd_so_no_quadratic_predictor_is_better_than_a_linear_one():
    task = nearest(mode="farthest")
    points = task.sample(20, torch.Generator().manual_seed(1)).inputs
    assert torch.equal(task.answers(-points, -points), -task.answers(points, points))


def test_errors_by_examples_of_regression_in_context(network):
    task = task_of("linear_regression", dimension=4, points=3, start_dimension=1, start_points=1)
    model = network(mask="causal")
    model.read_out.num_outputs = 1
    subject = subject_of(task, {"initialised": model})
    table = head_rank.table(subject, OPTIONS)
    soft = table[(table.of == "network") & (table.evaluation == "soft")].set_index("examples").error
    outputs = model(subject.test.inputs)
    for examples in range(3):
        wanted = ((outputs - subject.test.targets)[:, 2 * examples, 0] ** 2).mean().item() / 4
        assert soft[examples] == pytest.approx(wanted, rel=1e-12)
    predictors = {"zero", "least squares", "3 nearest neighbours", "averaging"}
    assert set(table[table.of == "baseline"].evaluation) == predictors
    assert len(ANALYSES["head_rank"].figure(with_who(table, **subject.who), None, None).axes) == 2
    errors_alone = with_who(head_rank.table(subject, dataclasses.replace(OPTIONS, heads=0)), **subject.who)
    assert "least squares" in head_rank.digest(errors_alone) and "medians" not in head_rank.digest(errors_alone)


def test_bounds_stand_where_they_apply_and_heads_are_above_them(network, model_config):
    task = pairs(4)
    alone = {"layers": 1, "skip": False, "mlp": False, "mlp_skip": False, "norm": "none", "mask": "others"}
    model = network(heads=3, head_width=1, value_width=4, **alone)
    table = head_rank.table(subject_of(task, {"initialised": model}), OPTIONS)
    common = {"layers": 1, "heads": 3, "rank": 1, "width": 4, "copies": 0.75, "angle_limit": theory.angle_limit(4, 1)}
    assert (table[list(common)] == pd.Series(common)).all(axis=None)
    for form in theory.FORMS:
        assert (table[f"bound_{form}"] == theory.lower_bound(4, 1, 3, form)).all()
    assert table[table.of == "network"].error.min() > table.bound_any.iloc[0]
    for changes in ({"mask": "none"}, {"layers": 2}, {"skip": True}):
        other = network(heads=3, head_width=1, value_width=4, **{**alone, **changes})
        assert "bound_any" not in head_rank.table(subject_of(task, {"initialised": other}), OPTIONS)
    exact = full_rank_head(4)
    table = head_rank.table(subject_of(task, {"initialised": exact}), OPTIONS)
    assert table[(table.of == "network") & (table.evaluation == "hard")].error.item() < 1e-28


def test_a_task_with_classes_has_spectra_and_no_errors(random_network, sorting_task, tmp_path):
    task = sorting_task(length=4, alphabet=5, test_size=8)
    model, _ = random_network(1, 0)
    subject = subject_of(task, {"initialised": model})
    write_table(with_who(head_rank.table(subject, OPTIONS), **subject.who), tmp_path / "head_rank.csv")
    table = read_table(tmp_path / "head_rank.csv")
    assert set(table.of) == {"head"} and table[["evaluation", "examples", "error"]].isna().all(axis=None)
    for row in table.itertuples():
        w = model.blocks[row.layer - 1].attention.maps()
        left, right = (w.w_q_HDK, w.w_k_HDK.mT) if row.matrix == "qk" else (w.w_v_HDK, w.w_o_HKD)
        scale = 2**-0.5 if row.matrix == "qk" else 1  # heads of width 2
        sigma = np.linalg.svd((left @ right)[row.head - 1].numpy() * scale, compute_uv=False)
        assert [row.sigma_1, row.sigma_2] == pytest.approx(sigma[:2], rel=1e-10)
    assert "error" not in head_rank.digest(table) and "effective_rank" in head_rank.digest(table)
    axes = head_rank.draw_head_rank(table, None, None).axes
    assert [panel.get_ylabel() for panel in axes] == [f"singular value of ${name}$" for name in ("W_{QK}", "W_{VO}")]
    drawn = {line.get_label(): line.get_ydata() for line in axes[0].lines}
    first = table[(table.layer == 1) & (table.matrix == "qk")]
    assert drawn["layer 1"] == pytest.approx([first.sigma_1.mean(), first.sigma_2.mean()], rel=1e-12)
    # claims on errors have nothing to be judged by
    assert {verdict["outcome"] for verdict in judge("garg_learns_regression", table)} == {"undecided"}


# --- the figure, on tables by hand ------------------------------------------------------------------------------------


def by_hand():
    """Three seeds of a sweep: heads of rank 8 (one) and 2 (four), 4 and 16 points."""
    rows = []
    for seed in range(3):
        for rank, error, hard in ((8, 0.01, 0.001), (2, 0.5, 0.5)):
            for points in (4, 16):
                more = 1 + (0.3 if points == 16 else 0) * (rank == 2) + 0.001 * seed
                common = {"run": f"{rank}-{points}", "task": "nearest_neighbor", "model": "amsel", "seed": seed}
                common |= {"weights": "trained", "layers": 1, "heads": 8 // rank, "rank": rank, "width": 8, "copies": 1}
                common |= {"angle_limit": theory.angle_limit(8, rank), "bound_any": 0.1, "bound_sharp": 0.2}
                for evaluation, value in (("soft", error * more), ("hard", hard)):
                    axes = {"of": "network", "evaluation": evaluation, "examples": points}
                    rows.append(common | axes | {"error": value})
                zero = {"of": "baseline", "weights": "none", "evaluation": "zero", "examples": points, "error": 1.0}
                rows.append(common | zero)
                degrees = (179.0 if rank == 8 else 100) + 0.1 * seed
                rows.append(common | {"of": "head", "layer": 1, "head": 1, "matrix": "qk", "angle": degrees})
    return pd.DataFrame(rows)


def test_the_figure_and_the_digest_of_heads_with_bounds():
    table = by_hand().assign(effective_rank=1.0, frobenius_norm=1.0)
    assert len(head_rank.draw_head_rank(table, None, "run").axes) == 2
    assert " 139.6 " in head_rank.digest(table)  # the median of both ranks


def test_both_panels_of_regression_in_context_say_what_they_show():
    table = by_hand().drop(columns=["bound_any", "bound_sharp"])
    panels = head_rank.draw_head_rank(table.assign(run="one"), None, None).axes
    assert [axes.get_xlabel()[:5] for axes in panels] == ["examp", "heads"]
    assert all(axes.get_ylabel().startswith("squared error") for axes in panels)


def test_published_numbers_of_a_series_of_ours_are_stars_of_its_colour():
    table = by_hand().drop(columns=["bound_any", "bound_sharp"])
    numbers = pd.DataFrame([("N=16", 0.5), ("N=99", 0.4)], columns=["series", "value"])
    numbers = numbers.assign(source="Paper", where=None, x=0.5, unit="squared error")
    errors = head_rank.draw_head_rank(table, numbers, None).axes[0]
    assert [label.get_text() for label in errors.get_xticklabels()] == ["0.25", "0.5", "1"]  # 0.5 is published alone
    lines = {line.get_label(): line for line in errors.lines}
    star, other = lines["N=16 (Paper)"], lines["N=99 (Paper)"]
    assert (star.get_marker(), star.get_color()) == ("*", lines["softmax, N=16"].get_color())
    assert other.get_marker() != "*" and star.get_color() != lines["softmax, N=4"].get_color()


@pytest.mark.parametrize("padded", [False, True])
def test_where_there_are_no_others_a_token_sees_itself(random_network, padded):
    model, batch = random_network(3, 0, padded=padded, mask="others")
    inputs = batch.inputs.clone()
    if padded:
        inputs[0, 1:] = -1
    alone, _ = random_network(3, 0, mask="none")  # the same weights
    wanted = alone(batch.inputs[:1, :1])
    torch.testing.assert_close(model(inputs[:1] if padded else inputs[:1, :1])[:, :1], wanted)
    assert model(inputs).isfinite().all()

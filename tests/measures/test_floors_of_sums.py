"""Floors of rounding of sums of paths: against sums in more digits, in the tables, the figures and the verdicts."""

import pandas as pd
import pytest
import torch
from drawn import generator

import rankbench as rb
from rankbench.commands.compose import compose
from rankbench.judging import CLAIMS, judge
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length, sums_through_heads
from rankbench.measures.norms import composite_norm, frobenius_norm, residual_matrix
from rankbench.measures.rounding import RandomRounding, floors_of_sums, side_by_side
from rankbench.model import initial_model
from rankbench.plots.marks import BELOW
from rankbench.tasks import build_task

SMALL = ["model.layers=3", "model.heads=2", "model.width=16", "task.length=6", "task.alphabet=5", "task.test_size=20"]
OPTIONS = {"sequences": 20, "subset_sizes": [2], "repeats": 1}


def network_and_inputs(*words):
    cfg = compose("analyze", "analysis=[residual]", *SMALL, *words)
    task = build_task(cfg.task)
    inputs = task.sample(12, generator(0)).inputs
    return initial_model(cfg.model, task, 0).eval(), inputs


def heads_and_lengths(network, inputs):
    frozen = FrozenNetwork(network, inputs)
    return torch.cat([sums_by_length(network, inputs).by_length_KBND, sums_through_heads(frozen).flatten(0, 1)])


@pytest.mark.parametrize("words", [["model=san"], ["model=transformer"], ["model.init_gain=1e-3"], ["model.norm=pre"]])
@torch.no_grad()
def test_no_error_of_a_float32_sum_exceeds_its_floor(words):
    """The error is the difference to float64. Floors are worst cases times MARGIN = 4, so a typical one is ten times
    its error; a thousand would hide what can be measured."""
    network, inputs = network_and_inputs(*words)
    sums = heads_and_lengths(network, inputs)
    copied = lambda copies: heads_and_lengths(network, side_by_side(inputs, copies))  # noqa: E731
    floors = floors_of_sums(copied, sums, None, generator(1))
    errors = sums.double() - heads_and_lengths(network.double(), inputs)
    measured = frobenius_norm(errors), composite_norm(residual_matrix(errors))
    for floor_GB, error_GB in zip((floors.norm_GB, floors.residual_GB), measured, strict=True):
        assert (error_GB <= floor_GB).all()
        ratio = (floor_GB / error_GB)[error_GB > 1e-30]
        assert ratio.median() < 1000


@torch.no_grad()
def test_products_in_place_change_what_they_are_given():
    a, b, c = (torch.rand(3, 3, generator=generator(seed)) for seed in range(3))
    given = c.clone()
    with RandomRounding(generator(0)):
        given.addmm_(a, b, beta=0.5, alpha=2.0)
        given.flatten(0, 1).cumsum_(0)
    wanted = (0.5 * c + 2.0 * a @ b).flatten().cumsum(0).view(3, 3)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=0)
    assert (given != wanted).any()


@pytest.fixture(scope="module")
def tables():
    """Tables of networks whose sums are clear of rounding, and of one whose values and embeddings cancel."""
    clear = rb.analyze(["model=san_skip", *SMALL], "paths", "path_mass", paths=OPTIONS, path_mass={"sequences": 20})
    words = ["model=san_skip", *SMALL, "model.init_gain=1e-6"]
    collapsed = rb.analyze(words, "paths", paths=OPTIONS)
    return clear["paths"], clear["path_mass"], collapsed["paths"]


@pytest.mark.further
def test_the_tables_mark_what_rounding_makes(tables):
    clear, mass, collapsed = tables
    assert (clear[clear.path_length <= 1].below_floor == 0).all() and (clear.sum_below_floor == 0).all()
    assert (mass.below_floor == 0).all()
    frozen = collapsed[(collapsed.scheme == "frozen") & (collapsed.selection == "all")].set_index("path_length")
    # attention is uniform to 1e-12, so the sums of two heads or more are equal tokens up to rounding
    assert frozen.below_floor[0] == 0 and (frozen.below_floor[2:] == 1).all()
    assert (frozen.relative_residual[3:] < frozen.relative_noise_floor[3:]).all()
    assert (collapsed.sum_below_floor == 0).all()  # the sums themselves are small, and right


def test_a_network_of_zeros_is_below_every_floor():
    words = ["model=san_skip", *SMALL, "model.init_gain=1e-200"]
    rows = rb.analyze(words, "path_mass", sequences=8)["path_mass"]
    lengths = rows[rows.part == "length"].set_index("path_length")
    assert lengths.below_floor[0] == 0 and (lengths.below_floor[2:] == 1).all()


def test_figures_and_verdicts_say_it(tables):
    paths, mass, _ = tables
    assert BELOW not in rb.plot(paths, analysis="paths").axes[0].get_legend_handles_labels()[1]
    marked = paths.assign(sum_below_floor=(paths.path_length == 2).astype(float))
    axes = rb.plot(marked, analysis="paths").axes[0]
    assert BELOW in axes.get_legend_handles_labels()[1]
    axes = rb.plot(mass.assign(below_floor=1.0), analysis="path_mass").axes
    assert BELOW in axes[0].get_legend_handles_labels()[1]
    assert all(text.get_text().startswith("<") for text in axes[2].texts)
    assert CLAIMS["dong_fig4_length_1_sorting"].floor == "sum_below_floor"
    seeds = [rows.assign(seed=seed, whole_accuracy=1.0, ceiling_accuracy=1.0) for seed in range(3) for rows in [marked]]
    (verdict, *_) = judge("dong_fig4_longest_at_chance", pd.concat(seeds), None)
    assert "rows are at the floor of rounding (sum_below_floor)" in verdict["reason"]
    seeds = [rows.assign(sum_below_floor=0.0) for rows in seeds]
    (verdict, *_) = judge("dong_fig4_longest_at_chance", pd.concat(seeds), None)
    assert "floor of rounding" not in verdict["reason"]

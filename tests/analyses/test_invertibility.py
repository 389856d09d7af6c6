"""The analyses invertibility and histograms: against the iteration and the counts done by hand, and a root finder.

Shapes: B sequence, N token, D width.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import torch
from refusals import refusal
from shipped import options_of

from rankbench.analyses import ANALYSES, histograms, invertibility, residual
from rankbench.config.keys import ConfigError
from rankbench.measures.attention_layer import attend, fresh_layer
from rankbench.measures.lipschitz_bounds import theorem_inf
from rankbench.runs.tables import read_table, with_who, write_table

SMALL = {"tokens": [5], "widths": [4], "heads": 2, "sequences": 3, "iterations": 12}


options = functools.partial(options_of, "invertibility", **SMALL)
histogram_options = functools.partial(options_of, "histograms")


@pytest.fixture(scope="module")
def make_subject(fresh_subject):
    small = {"sequences": 6, "length": 4, "name": "small", "layers": 3, "heads": 2, "width": 4}
    return functools.partial(fresh_subject, kinds=("trained", "initialised"), **small)


CONTRACTIVE = {"attention": "contractive_l2", "tied_qk": True, "contraction": 0.9, "norm": "none", "init_gain": 0.9}

# --- the iteration ----------------------------------------------------------------------------------------------------


def test_the_fixed_point_is_a_root_finders_inverse():
    layer = fresh_layer("l2", 2, 1, 1.1, torch.Generator().manual_seed(0))
    layer = layer._replace(divisor=1.2 * theorem_inf(layer, 3))  # a contraction
    y_BND = torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    iterates = invertibility.invert(lambda x: attend(layer, x), y_BND, 60)
    assert len(iterates) == 61 and iterates[0] is y_BND

    def missed(x):
        x_BND = torch.from_numpy(x).view_as(y_BND)
        return (x_BND + attend(layer, x_BND) - y_BND).flatten().numpy()

    root = scipy.optimize.root(missed, y_BND.flatten().numpy(), tol=1e-12)
    np.testing.assert_allclose(iterates[-1].flatten(), root.x, rtol=0, atol=1e-11)


def test_a_contraction_shrinks_the_error_by_its_bound_at_every_step():
    layer = fresh_layer("l2", 4, 2, 2.0, torch.Generator().manual_seed(0))
    c = 0.8
    layer = layer._replace(divisor=theorem_inf(layer, 6) / c)
    x_BND = invertibility.inputs_of(0, 5, 3, 6, 4, torch.Generator().manual_seed(1))
    assert (x_BND[:, 0] == 0).all() and x_BND.min() >= 0 and 4 < x_BND.max() <= 5
    iterates = invertibility.invert(lambda x: attend(layer, x), x_BND + attend(layer, x_BND), 10)
    errors = [(iterate_BND - x_BND).abs().max().item() for iterate_BND in iterates]
    # in the infinity norm, which the bound is of; what is left of 1e-15 is rounding
    assert all(after <= c * before + 1e-14 for before, after in itertools.pairwise(errors))


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.further
def test_rows_of_fresh_layers_are_the_iteration_by_hand(make_subject, tmp_path):
    subject = make_subject(kinds=("initialised",))
    chosen = options(attentions=["l2", "dot", "contractive_l2"], coefficients=[0.5, 0.9], tokens=[3, 5])
    table = with_who(invertibility.table(subject, chosen), **subject.who)
    write_table(table, tmp_path / "invertibility.csv")
    pd.testing.assert_frame_equal(read_table(tmp_path / "invertibility.csv"), table)
    assert len(table) == 3 * 2 * 2 * 2 * 13 and set(table.weights) == {"fresh"} and set(table.part) == {"attention"}
    assert set(table.inputs) == {"0..1", "0..10"}
    # c enters where it stands: the first error is c |f(x)|
    first = table[(table.iteration == 0) & (table.inputs == "0..10")].set_index(["attention", "tokens", "coefficient"])
    for attention in ("l2", "dot"):
        for tokens in (3, 5):
            half, most = first.error[attention, tokens, 0.5], first.error[attention, tokens, 0.9]
            assert half / 0.5 == pytest.approx(most / 0.9, rel=1e-12)
    assert (table.relative_error <= table.error / 0.5).all()
    assert "share of the error left" in invertibility.digest(table)


@pytest.mark.parametrize("changes", [{}, {"norm": "pre", "mask": "causal"}, CONTRACTIVE], ids=str)
def test_rows_of_a_models_layers(make_subject, changes):
    subject = make_subject(**changes)
    table = invertibility.table(subject, options(coefficients=[0.7], ranges=[[0, 2]]))
    assert list(table.groupby(["weights", "layer"], sort=False).size()) == [13] * 6
    attention = subject.network.blocks[1].attention
    generator = invertibility.generator_for(0, "invertibility")
    x_BND = invertibility.inputs_of(0, 2, 3, 5, 4, generator)
    with torch.no_grad():
        y_BND = x_BND + 0.7 * attention(x_BND)
        now_BND = y_BND
        errors = []
        for _ in range(13):
            errors.append((now_BND - x_BND).abs().max().item())
            now_BND = y_BND - 0.7 * attention(now_BND)
    rows = table[(table.weights == "trained") & (table.layer == 2)]
    np.testing.assert_allclose(rows.error, errors, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(rows.relative_error, rows.error / x_BND.abs().max().item())


@pytest.mark.further
@pytest.mark.parametrize(
    "changes",
    [{"skip_scale": 0.8}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"mlp": False, "mlp_skip": False}))],
    ids=str,
)
def test_a_contractive_network_is_undone_down_to_its_embedding(make_subject, changes):
    subject = make_subject(**(CONTRACTIVE | {"branch_scale": 0.4} | changes))
    table = invertibility.table(subject, options(coefficients=[0.5], ranges=[[0, 1]], iterations=80, network=True))
    network = table[table.part == "network"]
    assert network.layer.tolist() == [3, 2, 1] * 2 and set(network.inputs) == {"test"}
    assert network.relative_error.max() < 1e-9  # float64, amplified layer by layer
    assert "whole network's inverse" in invertibility.digest(with_who(table, **subject.who))
    few = invertibility.table(subject, options(coefficients=[0.5], ranges=[[0, 1]], iterations=1, network=True))
    assert few[few.part == "network"].error.min() > 1e-4  # the iterations make the difference


@pytest.mark.further
@pytest.mark.parametrize("mask", [pytest.param("none", marks=pytest.mark.slow), "causal"])
def test_padded_sequences_are_undone_as_each_would_be_alone(make_subject, random_network, mask):
    changes = {**CONTRACTIVE, "contraction_keys": 4, "mlp": False, "mask": mask}
    model, batch = random_network(6, 0, padded=True, **changes)
    whole, _ = random_network(6, 0, **changes)  # the same weights, without absent tokens
    asked = options(tokens=[4], coefficients=[0.5], ranges=[[0, 1]], iterations=7, sequences=6, network=True)

    def errors(network, batch):
        subject = dataclasses.replace(make_subject(), test=batch, networks={"initialised": network})
        table = invertibility.table(subject, asked)
        return table[table.part == "network"].set_index("layer").error

    lengths = (batch.inputs >= 0).sum(1).tolist()
    alone = [errors(whole, batch[row : row + 1, :length]) for row, length in enumerate(lengths)]
    pd.testing.assert_series_equal(errors(model, batch), pd.concat(alone, axis=1).max(axis=1), check_names=False)


def test_a_network_with_norms_is_not_undone(make_subject):
    for changes in ({"norm": "post"}, {"norm": "none", "skip": False}):
        with pytest.raises(ConfigError, match=r"use model\.norm=none and skips"):
            invertibility.check(make_subject(**changes), options(network=True))


# --- histograms -------------------------------------------------------------------------------------------------------


def test_histograms_count_the_entries(make_subject):
    subject = make_subject(kinds=("initialised",), attention="l2", tied_qk=True)
    table = with_who(histograms.table(subject, histogram_options(tokens=5, sequences=7, bins=8)), **subject.who)
    assert len(table) == 3 * 2 * 2 * 8
    rows = table[(table.layer == 2) & (table.inputs == "0..10")]
    x_BND = invertibility.inputs_of(0, 10, 7, 5, 4, histograms.generator_for(0, "invertibility"))
    y_BND = subject.network.blocks[1].attention(x_BND).detach()
    for of, values in (("input", x_BND), ("output", y_BND)):
        bins, values = rows[rows.of == of], values.numpy().ravel()
        assert bins.sd.iloc[0] == pytest.approx(values.std(), rel=1e-12)
        assert (bins.smallest.iloc[0], bins.largest.iloc[0]) == (values.min(), values.max())
        for number, row in enumerate(bins.itertuples()):
            inside = (values >= row.low) & ((values < row.high) | (number == 7) & (values <= row.high))
            assert row.density == pytest.approx(inside.mean() / (row.high - row.low), rel=1e-9)
        assert (bins.density * (bins.high - bins.low)).sum() == pytest.approx(1)
    assert "sd" in histograms.digest(table)


def test_entries_that_overflow_are_refused(make_subject):
    said = refusal(histograms.table, make_subject(), histogram_options(ranges=[[0, 1], [0, 1e160]]))
    assert said.startswith("analysis.histograms.ranges=[[0,1e+160]]: the outputs of attention overflow")


@pytest.mark.further
def test_the_figures_have_a_panel_for_each_range_and_kind(make_subject):
    subject = make_subject()
    of_layers = with_who(invertibility.table(subject, options()), **subject.who)
    of_entries = with_who(histograms.table(subject, histogram_options(tokens=5, sequences=4, bins=6)), **subject.who)
    for name, table in (("invertibility", of_layers), ("histograms", of_entries)):
        panels = {"invertibility": 4, "histograms": 2}[name]  # two ranges; trained and initialised, or trained alone
        assert len(ANALYSES[name].figure(table, None, None).axes) == panels
        both = pd.concat([table.assign(of_model="a"), table.assign(of_model="b")])
        figure = ANALYSES[name].figure(both, None, "of_model")
        assert len(figure.axes) == 2 * panels
        drawn = [axes.lines or axes.patches for axes in figure.axes]
        assert all(drawn)
    seeds = pd.concat([of_entries, of_entries.assign(seed=1), of_entries.assign(seed=2)])
    patches = ANALYSES["histograms"].figure(seeds, None, None).axes[0].patches
    dashed = {patch.get_linestyle() for patch in patches if patch.get_edgecolor() == patches[-1].get_edgecolor()}
    assert len(dashed) == 4  # all seeds, and each of the three


def test_a_trained_networks_tables_say_whether_its_training_was_over(make_subject):
    fresh = make_subject(attention="l2", tied_qk=True, norm="none", mlp=False)
    steps = pd.DataFrame({"step": [0, 40, 80], "loss": [3.0, 1.0, 0.8], "split": "test"})
    valid = steps.assign(loss=9.0, split="valid")
    trained = dataclasses.replace(fresh, curve=pd.concat([steps, valid]))
    few = options(coefficients=[0.5], ranges=[[0, 1]], iterations=1)
    for subject, fall in ((fresh, None), (trained, 0.1)):  # at step 60 the loss was at .9
        tables = (
            invertibility.table(subject, few),
            histograms.table(subject, histogram_options(tokens=5, sequences=4)),
            residual.table(subject, options_of("residual", variants=["full"], sequences=4)),
        )
        for table in tables:
            assert ("loss_fall" in table) == (fall is not None)
            assert fall is None or table.loss_fall.tolist() == pytest.approx([fall] * len(table), rel=1e-12)

"""rankbench.analyses.path_mass and pruning against every path run one by one, and against autograd.

Shapes: B batch, N token, D width, L layer, H head, P path, C class.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from drawn import normal
from rows import pick
from shipped import options_of

from rankbench.analyses import path_mass, pruning
from rankbench.analysing.runner import measure
from rankbench.measures.attention_matrices import attention_metrics
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length
from rankbench.measures.paths import all_paths, sums_of_groups
from rankbench.model.network import run
from rankbench.plots.path_mass import draw_path_mass
from rankbench.plots.pruning import draw_pruning

EXACT = {"rel": 1e-10, "abs": 1e-12}  # float64, a few hundred operations in another order
LAYERS, HEADS = 3, 2
PATHS = np.concatenate([all_paths(LAYERS, HEADS, length) for length in range(LAYERS + 1)])


@pytest.fixture(scope="session")
def make_subject(random_subject):
    return functools.partial(random_subject, train=9, test=12, layers=LAYERS, heads=HEADS)


STRUCTURES = [
    {},
    {"norm": "pre", "norm_kind": "rmsnorm", "mask": "causal"},
    {"norm": "none", "skip_scale": 0.5, "mlp": False, "mlp_skip": False, "bias": False},
    {"skip": False},
    {"padded": True},
]


def each_path(model, inputs, mlp="gate"):
    """Every path's output (P, B, N, D), absent tokens 0, and the bias term (B, N, D)."""
    network = FrozenNetwork(model, inputs, mlp)
    paths = PATHS if model.cfg.skip else all_paths(LAYERS, HEADS, LAYERS, False)
    outputs = sums_of_groups(network, list(paths[:, None]))
    if model.padded:
        outputs = outputs * (inputs >= 0)[..., None]
    return outputs, sums_by_length(model, inputs, mlp).bias_BND, paths


def loss_and_accuracy(outputs, targets):
    loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1).item()
    scored = targets >= 0
    return loss, (outputs.argmax(-1) == targets)[scored].double().mean().item()


def majority_accuracy(subject):
    """Of the commonest class in training."""
    trained_on, targets = (batch.targets[batch.targets >= 0] for batch in (subject.train, subject.test))
    return (targets == trained_on.bincount().argmax()).double().mean().item()


# --- mass -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mlp", ["gate", "source"])
@pytest.mark.parametrize("changes", STRUCTURES, ids=str)
def test_every_number_of_path_mass_by_enumeration(make_subject, changes, mlp, monkeypatch):
    subject = make_subject(**changes)
    model, test = subject.network, subject.test
    monkeypatch.setattr(path_mass, "NUMBERS_AT_A_TIME", 800)  # several chunks of sequences
    table = path_mass.table(subject, options_of("path_mass", mlp=mlp))
    outputs, bias, paths = each_path(model, test.inputs, mlp)
    present_BN1 = (test.inputs >= 0)[..., None]
    state = outputs.sum(0) + bias * present_BN1
    parts = {("length", k): paths_of for k in range(LAYERS + 1) if (paths_of := (paths > 0).sum(1) == k).any()}
    parts |= {
        ("head", layer, head): paths[:, layer - 1] == head
        for layer, head in itertools.product(range(1, LAYERS + 1), range(1, HEADS + 1))
    }
    assert len(table) == len(parts) + 1 and table.remainder.max() < 1e-13
    for (kind, *where_from), chosen in parts.items():
        where = {"path_length": where_from[0]} if kind == "length" else {"layer": where_from[0], "head": where_from[1]}
        (row,) = pick(table, part=kind, **where).to_dict("records")
        assert row["num_paths"] == chosen.sum()
        part = outputs[chosen].sum(0)
        ratio = part.flatten(1).norm(dim=1) / state.flatten(1).norm(dim=1)
        assert row["mass"] == pytest.approx(ratio.mean().item(), **EXACT)
        # the loss of X_L + (size - 1) part, differentiated at size 1: no inner product of ours
        size = torch.ones((), dtype=torch.float64, requires_grad=True)
        grown = model.read_out(state + (size - 1) * part)
        F.cross_entropy(grown.flatten(0, 1), test.targets.flatten(), ignore_index=-1).backward()
        assert row["gradient_mass"] == pytest.approx(size.grad.item(), **EXACT)
        without = loss_and_accuracy(model.read_out(state - part), test.targets)
        assert (row["loss_without"], row["accuracy_without"]) == pytest.approx(without, **EXACT)
    whole = loss_and_accuracy(model(test.inputs), test.targets)
    assert (table.whole_loss.iloc[0], table.whole_accuracy.iloc[0]) == pytest.approx(whole, **EXACT)
    assert table.majority_accuracy.to_numpy() == pytest.approx(majority_accuracy(subject), **EXACT)


@pytest.mark.parametrize("changes", [{}, {"mask": "causal"}, {"padded": True}], ids=str)
def test_ranks_of_heads_are_the_means_of_metrics(make_subject, changes, monkeypatch):
    subject = make_subject(**changes)
    monkeypatch.setattr(path_mass, "NUMBERS_AT_A_TIME", 800)
    table = path_mass.table(subject, options_of("path_mass"))
    steps = run(subject.network, subject.test.inputs)
    weights = [step.weights_BHNM for step in steps if step.sublayer.kind == "attention"]
    for layer, p in enumerate(weights, 1):
        wanted = attention_metrics(p, None, subject.network.lengths(subject.test.inputs))[
            "attention_effective_rank"
        ].mean(0)
        rows = pick(table, part="head", layer=layer)
        assert rows.attention_effective_rank.to_numpy() == pytest.approx(wanted.numpy(), **EXACT)


# --- pruning --------------------------------------------------------------------------------------------------------


def greedy_by_hand(parts, state, loss):
    left, order = list(range(len(parts))), []
    while left:
        order.append(left.pop(int(np.argmin([loss(state + parts[part]) for part in left]))))
        state = state + parts[order[-1]]
    return order


def last_head(path):
    """The last layer with a head and that head, (0, 0) of the path without heads."""
    return max(((layer, head) for layer, head in enumerate(path, 1) if head), default=(0, 0))


LABELS = {"path": tuple, "last_head": last_head, "length": np.count_nonzero}
PARTS = [("path", "gate"), ("path", "source"), ("last_head", "gate"), ("last_head", "source"), ("length", "gate")]


@pytest.mark.parametrize(("parts", "mlp"), PARTS)
@pytest.mark.parametrize("changes", STRUCTURES, ids=str)
def test_every_number_of_pruning_by_hand(make_subject, changes, parts, mlp, monkeypatch):
    subject = make_subject(**changes)
    monkeypatch.setattr(pruning, "NUMBERS_AT_A_TIME", 1000)  # several chunks of sequences and of paths
    table = pruning.table(subject, options_of("pruning", parts=parts, mlp=mlp, selection_sequences=5, counts=9))
    model, chosen = subject.network, subject.train[:5]

    def sums_of_parts(inputs):
        outputs, bias, paths = each_path(model, inputs, mlp)
        labels = list(map(LABELS[parts], paths))
        in_order = sorted(set(labels), key=labels.index if parts == "path" else None)
        members = [[label == part for label in labels] for part in in_order]
        lengths = [np.count_nonzero(paths[of_part], axis=1).mean() for of_part in members]
        return torch.stack([outputs[of_part].sum(0) for of_part in members]), bias, np.array(lengths)

    outputs, bias, lengths = sums_of_parts(chosen.inputs)
    norms = outputs.flatten(1).norm(dim=1)
    loss = lambda state: loss_and_accuracy(model.read_out(state), chosen.targets)[0]  # noqa: E731
    orders = {"greedy": greedy_by_hand(outputs, bias, loss), "norm": np.argsort(-norms.numpy(), kind="stable")}
    outputs, bias, _ = sums_of_parts(subject.test.inputs)
    for order, indices in orders.items():
        rows = pick(table, order=order)
        assert rows.kept.iloc[0] == 0 and rows.kept.iloc[-1] == len(outputs)
        for row in rows.to_dict("records"):
            kept = indices[: row["kept"]]
            wanted = loss_and_accuracy(model.read_out(outputs[kept].sum(0) + bias), subject.test.targets)
            assert (row["loss"], row["accuracy"]) == pytest.approx(wanted, rel=1e-9, abs=1e-11)
            assert row["kept_share"] == pytest.approx(row["kept"] / len(outputs), rel=1e-12)
            if row["kept"]:
                assert row["path_length"] == pytest.approx(lengths[kept].mean(), rel=1e-12)


def test_every_order_begins_at_the_bias_and_ends_at_the_whole_network(make_subject):
    subject = make_subject()
    table = pruning.table(subject, options_of("pruning"))
    whole = loss_and_accuracy(subject.network(subject.test.inputs), subject.test.targets)
    for _, rows in table.groupby(["order", "repeat"], dropna=False):
        assert (rows.loss.iloc[-1], rows.accuracy.iloc[-1]) == pytest.approx(whole, **EXACT)
        assert (rows.whole_loss.iloc[0], rows.whole_accuracy.iloc[0]) == pytest.approx(whole, **EXACT)
    assert table.majority_accuracy.to_numpy() == pytest.approx(majority_accuracy(subject), **EXACT)
    assert table[table.kept == 0].loss.nunique() == 1
    random = pick(table, order="random", kept=8)
    assert len(random) == 3 and random.loss.nunique() == 3  # three orders


def test_greedy_for_regression_takes_the_best_of_the_squared_errors():
    logits, (bias, targets) = normal(0, 6, 3, 2, 2), normal(1, 2, 3, 2, 2)
    wanted = greedy_by_hand(logits, bias, lambda state: F.mse_loss(state, targets).item())
    assert pruning.greedy_order(logits.clone(), bias, targets, lambda sums: sums).tolist() == wanted


# --- options, digests, figures, claims ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(make_subject):
    subjects = [make_subject(seed) for seed in (3, 4, 5)]
    return {name: measure(name, options_of(name), subjects) for name in ("path_mass", "pruning")}


def test_digests_show_means(tables):
    lines = path_mass.digest(tables["path_mass"]).splitlines()
    mean = pick(tables["path_mass"], part="length", path_length=1).mass.mean()
    assert "3 seeds" in lines[0] and lines[4].split()[1] == f"{mean:.3g}"
    lines = pruning.digest(tables["pruning"]).splitlines()
    mean = pick(tables["pruning"], order="norm", kept=0).accuracy.mean()
    assert float(next(line for line in lines if line.startswith("norm")).split()[1]) == pytest.approx(mean, abs=5e-4)


def test_figures_show_the_tables_means(tables):
    table = tables["path_mass"]
    maps = [axes for axes in draw_path_mass(table).axes if axes.images]
    image = maps[0].images[0].get_array()
    assert image[2, 1] == pytest.approx(pick(table, part="head", layer=3, head=2).mass.mean(), **EXACT)
    assert maps[0].images[0].get_clim()[0] == 0  # small differences of the mass look small
    larger = pd.concat([table.assign(label="a"), table.assign(label="b", mass=3 * table.mass)])
    figure = draw_path_mass(larger, None, "label")
    maps = [axes.images[0] for axes in figure.axes if axes.images]
    assert maps[0].get_clim() == maps[2].get_clim() != maps[1].get_clim() == maps[3].get_clim()
    names = [name for name in figure.axes[0].get_legend_handles_labels()[1] if "=" in name]
    assert names == ["label=a", "label=b"] and figure.get_figheight() < 2 * draw_path_mass(table).get_figheight()
    table = tables["pruning"]
    both = pd.concat([table.assign(label="a"), table.assign(label="b")])
    panels = draw_pruning(both, None, "label").axes
    assert len(panels) == 4
    assert all(float(text.get_text()) >= 0.1 for text in panels[1].get_yticklabels())  # and not 2.3 x 10^0
    drawn = {line.get_label(): line for line in panels[0].get_lines()}
    rows = pick(table, order="greedy").groupby("kept").accuracy.mean()
    np.testing.assert_allclose(drawn["greedy"].get_ydata(), rows)


def test_a_sequence_of_zeros_is_counted_and_leaves_the_mean_of_the_others(make_subject):
    subject = make_subject(norm="none", mlp=False, mlp_skip=False, bias=False, positions="none")
    subject.network.read_in.weight[2] = 0
    subject.test.inputs[subject.test.inputs.eq(2).all(1)] = 3
    subject.test.inputs[1] = 2
    table = path_mass.table(subject, options_of("path_mass"))
    others = dataclasses.replace(subject, test=subject.test[[0, *range(2, 12)]])
    wanted = path_mass.table(others, options_of("path_mass"))
    assert (table.num_undefined == 1).all() and (wanted.num_undefined == 0).all()
    assert table.mass.to_numpy() == pytest.approx(wanted.mass.to_numpy(), **EXACT)

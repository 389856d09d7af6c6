"""rankbench.analyses: every number of the two tables against the same number computed by hand.

What the sums of paths are is tested in test_paths.py; here is tested what the tables make of them.
Shapes: B batch, N token, D width, C class.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from by_hand import relative_residual
from refusals import refusal
from rows import pick
from shipped import options_of

from rankbench.analyses import paths, residual
from rankbench.analysing.runner import measure
from rankbench.measures.attention_matrices import attention_metrics
from rankbench.measures.frozen_network import sums_by_length
from rankbench.measures.norms import own_rounding
from rankbench.measures.paths import all_paths, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.measures.states import state_metrics
from rankbench.model.network import run
from rankbench.runs.tables import with_who
from rankbench.tasks.task import repeated_token_ceiling

# Float64, the same few hundred operations in another order.
EXACT = {"rel": 1e-11, "abs": 1e-13}


def paths_options(**changes):
    return options_of("paths", **{"subset_sizes": [2, 5], "repeats": 3, **changes})


def exact_options(scheme, **changes):
    """Those of the exact sums of one scheme, without sampled paths."""
    return paths_options(schemes=[scheme], subset_sizes=[], **changes)


def residual_options(*variants, sequences=5):
    return residual.Options(list(variants), sequences, None, 10.0)


@pytest.fixture(scope="session")
def make_subject(random_subject):
    return functools.partial(random_subject, train=61, test=12, layers=3, width=6)


BARE = {"mlp": False, "mlp_skip": False, "norm": "none", "bias": False}


# --- paths ------------------------------------------------------------------------------------------------------------


def scores_by_hand(model, states, targets, readout="normalised"):
    """(accuracy, loss, relative residual) of states, sequence by sequence and token by token."""
    states = np.asarray(states)
    right, losses, residuals = [], [], []
    for x_ND, wanted in zip(states, targets.numpy(), strict=True):
        read = x_ND
        if readout == "normalised":
            read = (x_ND - x_ND.mean(1, keepdims=True)) / np.sqrt(x_ND.var(1, keepdims=True) + 1e-5)
        logits = read @ model.read_out.weight.numpy().T + model.read_out.bias.numpy()
        for logits_C, target in zip(logits, wanted, strict=True):
            right.append(logits_C.argmax() == target)
            losses.append(math.log(sum(math.exp(z) for z in logits_C)) - logits_C[target])
        residuals.append(relative_residual(x_ND))
    return np.mean(right), np.mean(losses), np.mean(residuals)


def assert_scores(row, wanted):
    for column, value in zip(("accuracy", "loss", "relative_residual"), wanted, strict=True):
        assert row[column] == pytest.approx(value, **EXACT), column


def test_there_is_one_row_for_each_sum(make_subject):
    subject = make_subject()
    table = with_who(paths.table(subject, paths_options()), **subject.who)
    wanted = "run task model seed scheme selection path_length subset_size repeat accuracy loss relative_residual "
    wanted += "norm_share num_paths remainder"
    assert list(table)[:15] == wanted.split()
    sums = [("all", length, -1, -1) for length in range(4)]
    sums += [("sampled", *axes) for axes in itertools.product(range(4), (2, 5), range(3))]
    keys = table.iloc[:, :9].fillna(-1).itertuples(index=False, name=None)
    who = ("a run", "sorting", "small", 3)
    assert list(keys) == [(*who, scheme, *axes) for scheme in ("frozen", "recomputed") for axes in sums]


STRUCTURES = [
    {},
    {"norm": "pre"},
    {"norm": "none", "skip_scale": 0.5},
    {"mlp": False, "mlp_skip": False, "mask": "causal"},
]


@pytest.mark.parametrize("readout", ["normalised", "raw"])
@pytest.mark.parametrize("mlp", ["gate", "source"])
@pytest.mark.parametrize("changes", STRUCTURES, ids=str)
def test_rows_of_all_frozen_paths_by_hand(make_subject, changes, mlp, readout):
    subject = make_subject(**changes)
    table = paths.table(subject, exact_options("frozen", mlp=mlp, readout=readout))
    assert set(table.scheme) == {"frozen"} and set(table.selection) == {"all"}
    sums = sums_by_length(subject.network, subject.test.inputs, mlp)
    parts = np.concatenate([sums.by_length_KBND.numpy(), sums.bias_BND.numpy()[None]])
    norms = np.sqrt((parts**2).sum((2, 3)))
    shares = (norms / norms.sum(0)).mean(1)
    for length, (_, row) in enumerate(table.iterrows()):
        assert_scores(row, scores_by_hand(subject.network, parts[length], subject.test.targets, readout))
        assert row.norm_share == pytest.approx(shares[length], **EXACT)
        assert row.bias_norm_share == pytest.approx(shares[-1], **EXACT)
        assert row.num_paths == math.comb(3, length) * 2**length
        assert row.path_share == pytest.approx(row.num_paths / 27, rel=1e-12)
    assert table.norm_share.sum() + table.bias_norm_share.iloc[0] == pytest.approx(1, abs=1e-12)
    assert table.remainder.nunique() == 1 and table.remainder.iloc[0] == sums.remainder().max().item()
    assert (table.readout == readout).all()
    torch.testing.assert_close(  # what was split is the model's own output
        subject.network.read_out(torch.from_numpy(parts.sum(0))),
        subject.network(subject.test.inputs),
        rtol=1e-11,
        atol=1e-11,
    )


@pytest.mark.parametrize("recomputed_mlp", [False, True])
def test_rows_of_all_recomputed_paths_by_hand(make_subject, recomputed_mlp):
    subject = make_subject()
    table = paths.table(subject, exact_options("recomputed", recomputed_mlp=recomputed_mlp))
    assert set(table.scheme) == {"recomputed"} and set(table.selection) == {"all"}
    network = RecomputedNetwork(subject.network, subject.test.inputs, recomputed_mlp)
    sums = sums_of_groups(network, [all_paths(3, 2, length) for length in range(4)]).numpy()
    norms = np.sqrt((sums**2).sum((2, 3)))
    for length, (_, row) in enumerate(table.iterrows()):
        assert_scores(row, scores_by_hand(subject.network, sums[length], subject.test.targets))
        assert row.norm_share == pytest.approx((norms[length] / norms.sum(0)).mean(), **EXACT)
    assert table.norm_share.sum() == pytest.approx(1, abs=1e-12)
    assert table.remainder.isna().all()  # these paths do not add up to anything
    assert (table.bias_norm_share == 0).all()


@pytest.fixture
def seen(monkeypatch):
    """What the table asked for: (network, groups, sums) of every call of sums_of_groups but those for the floors."""
    calls = []
    monkeypatch.setattr(paths, "_floors", lambda _, test, num_groups, sums_of: [{}] * num_groups)

    def watched(network, groups):
        calls.append((network, groups, sums_of_groups(network, groups)))
        return calls[-1][2]

    monkeypatch.setattr(paths, "sums_of_groups", watched)
    return calls


@pytest.mark.parametrize("replacement", [True, False])
def test_rows_of_sampled_paths_by_hand(make_subject, seen, replacement):
    subject = make_subject()
    options = paths_options(replacement=replacement, mlp="source", recomputed_mlp=True, max_paths=1)
    table = pick(paths.table(subject, options), selection="sampled")
    (_, frozen, _), (_, recomputed, _) = seen
    assert all(np.array_equal(paths_PL, other) for paths_PL, other in zip(frozen, recomputed, strict=True))
    assert not np.array_equal(frozen[-1], frozen[-2])  # repeats are drawn anew
    for (network, groups, sums), scheme in zip(seen, ("frozen", "recomputed"), strict=True):
        _, mlps = network.layers[0]  # of which both options keep the MLP
        (mlp,) = mlps if scheme == "frozen" else [mlps]
        assert scheme == "recomputed" or mlp.gate_BNF is None is not mlp.source_BND
        rows = pick(table, scheme=scheme)
        assert len(rows) == len(groups) == len(sums) == 4 * 2 * 3
        for (_, row), group, sum_BND in zip(rows.iterrows(), groups, sums, strict=True):
            assert (np.count_nonzero(group, axis=1) == row.path_length).all()
            assert_scores(row, scores_by_hand(subject.network, sum_BND, subject.test.targets))
            available = math.comb(3, row.path_length) * 2**row.path_length
            assert row.num_paths == len(group) == (row.subset_size if replacement else min(row.subset_size, available))
            if not replacement:
                assert len({tuple(path) for path in group}) == len(group)
        assert rows[["norm_share", "remainder"]].isna().all(axis=None)


def test_subsets_are_a_function_of_the_seed(make_subject, seen):
    for seed in (3, 3, 4):
        paths.table(make_subject(seed), paths_options(schemes=["frozen"]))
    first, same, other = (groups for _, groups, _ in seen)
    assert all(np.array_equal(*pair) for pair in zip(first, same, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(first, other, strict=True))


def test_the_trained_model_is_the_one_that_is_taken_apart(make_subject):
    subject, other = make_subject(), make_subject(4)

    def table_of(**networks):
        return paths.table(dataclasses.replace(subject, networks=networks), paths_options(repeats=1, max_paths=1))

    table = table_of(**subject.networks)
    pd.testing.assert_frame_equal(table_of(**subject.networks | {"initialised": other.networks["initialised"]}), table)
    pd.testing.assert_frame_equal(table_of(initialised=subject.networks["trained"]), table)
    assert not np.allclose(table_of(**subject.networks | {"trained": other.networks["trained"]}).loss, table.loss)


def test_baselines_by_hand(make_subject):
    subject = make_subject()
    table = paths.table(subject, paths_options())
    logits, targets = subject.network(subject.test.inputs).tolist(), subject.test.targets.tolist()
    tokens = [(b, n) for b in range(len(targets)) for n in range(4)]
    right = [max(range(3), key=lambda c, z=logits[b][n]: z[c]) == targets[b][n] for b, n in tokens]
    losses = [math.log(sum(map(math.exp, logits[b][n]))) - logits[b][n][targets[b][n]] for b, n in tokens]
    trained_on = subject.train.targets.tolist()
    (commonest, most), (_, next_most), *_ = Counter(itertools.chain(*trained_on)).most_common()
    of_position = [Counter(row[n] for row in trained_on).most_common() for n in range(4)]
    # a tie between the two commonest would be decided by their order: not in these data
    assert most > next_most and all(counts[0][1] > counts[1][1] for counts in of_position)
    wanted = {
        "whole_accuracy": np.mean(right),
        "whole_loss": np.mean(losses),
        "majority_accuracy": np.mean([targets[b][n] == commonest for b, n in tokens]),
        "position_majority_accuracy": np.mean([targets[b][n] == of_position[n][0][0] for b, n in tokens]),
    }
    for column, value in wanted.items():
        assert table[column].nunique() == 1
        assert table[column].iloc[0] == pytest.approx(value, **EXACT)


@pytest.mark.parametrize(
    ("changes", "is_blind"),
    [({"positions": "none"}, True), ({"positions": "none", "mask": "causal"}, False), ({}, False)],
)
def test_repeated_tokens_limit_networks_that_cannot_tell_them_apart(make_subject, changes, is_blind):
    subject = make_subject(**changes)
    table = paths.table(subject, exact_options("frozen"))
    assert ("ceiling_accuracy" in table) == is_blind
    assert not is_blind or (table.ceiling_accuracy == repeated_token_ceiling(subject.test)).all()


def test_sequences_are_the_first_of_the_test_set(make_subject):
    subject = make_subject()
    few = dataclasses.replace(subject, test=subject.test[:5])
    pd.testing.assert_frame_equal(paths.table(subject, paths_options(sequences=5)), paths.table(few, paths_options()))


@pytest.mark.parametrize(("max_paths", "are_run"), [(27, True), (26, False)])
def test_recomputed_paths_are_all_run_up_to_a_limit(make_subject, caplog, max_paths, are_run):
    with caplog.at_level("INFO", "rankbench"):
        table = paths.table(make_subject(), paths_options(max_paths=max_paths))  # (2 + 1)^3 paths
    assert (len(pick(table, scheme="recomputed", selection="all")) == 4) == are_run
    assert len(pick(table, scheme="frozen", selection="all")) == 4
    assert len(pick(table, scheme="recomputed", selection="sampled")) == 24
    assert ("max_paths=26" in caplog.text) != are_run


def test_options_that_leave_no_path_are_refused(make_subject):
    asked = exact_options("recomputed", max_paths=26)
    said = refusal(paths.check, make_subject(), asked)
    assert said.startswith("analysis.paths.max_paths=26: leaves nothing to measure, because the network has 27 paths")
    for changes in ({"max_paths": 27}, {"subset_sizes": [1]}, {"schemes": ["frozen", "recomputed"]}):
        paths.check(make_subject(), dataclasses.replace(asked, **changes))


@pytest.mark.parametrize("norm", ["none", "post"])
def test_without_skips_every_row_has_the_whole_length(make_subject, norm):
    table = paths.table(make_subject(skip=False, mlp_skip=False, norm=norm), paths_options())
    assert (table.path_length == 3).all()
    assert table.groupby(["scheme", "selection"]).size().to_dict() == {
        (scheme, selection): count
        for scheme in ("frozen", "recomputed")
        for selection, count in (("all", 1), ("sampled", 6))
    }
    exact = pick(table, selection="all")
    assert (exact.num_paths == 8).all() and (exact.path_share == 1).all()


@pytest.mark.further
def test_how_many_sequences_are_held_at_a_time_changes_no_number(make_subject, monkeypatch):
    whole = paths.table(make_subject(), paths_options())
    monkeypatch.setattr("rankbench.analyses.paths.NUMBERS_AT_A_TIME", 1)
    few = paths.table(make_subject(), paths_options())
    # the same sums in another order: a few roundings of numbers of order 1; floors are of sequences drawn together
    floor = "relative_noise_floor"
    pd.testing.assert_frame_equal(few.drop(columns=floor), whole.drop(columns=floor), rtol=1e-12, atol=1e-15)


def test_without_values_paths_are_nothing_and_no_number_is_lost_but_the_ratio(make_subject):
    subject = make_subject(**BARE)
    for block in subject.network.blocks:
        block.attention.qkv.weight[-6:] = 0
    table = pick(paths.table(subject, paths_options()), scheme="frozen")
    used = table.path_length > 0
    assert table[used].relative_residual.isna().all() and table[~used].relative_residual.notna().all()
    assert np.isfinite(table[["accuracy", "loss", "whole_accuracy", "whole_loss"]]).all(axis=None)
    exact = pick(table, selection="all")
    assert exact.norm_share.tolist() == [1, 0, 0, 0]
    assert exact.remainder.max() == 0
    # a sum of nothing reads out as the bias of the read-out
    bias = subject.network.read_out.bias
    wanted = F.cross_entropy(bias.expand(48, 3), subject.test.targets.flatten()).item()
    assert table[used].loss.to_numpy() == pytest.approx(wanted, **EXACT)


def test_one_sequence_of_zeros_leaves_the_shares_of_the_others(make_subject):
    subject = make_subject(**BARE, positions="none")
    subject.network.read_in.weight[2] = 0
    subject.test.inputs[subject.test.inputs.eq(2).all(1)] = 3
    subject.test.inputs[1] = 2
    table = pick(paths.table(subject, paths_options(schemes=["frozen"])), selection="all")
    others = dataclasses.replace(subject, test=subject.test[[0, *range(2, 12)]])
    wanted = pick(paths.table(others, paths_options(schemes=["frozen"])), selection="all")
    assert (table.num_undefined == 1).all() and (wanted.num_undefined == 0).all()
    for name in ("norm_share", "relative_residual", "bias_norm_share"):
        assert table[name].to_numpy() == pytest.approx(wanted[name].to_numpy(), rel=1e-9)
    assert table.remainder.max() < 1e-12


def test_sums_that_rounding_does_not_explain_are_told(make_subject, monkeypatch, caplog):
    subject = make_subject()
    with caplog.at_level("INFO", "rankbench"):
        paths.table(subject, paths_options(schemes=["frozen"]))
        assert "a run seed 3" in caplog.text and "more than rounding" not in caplog.text
        lossy = sums_by_length(subject.network, subject.test.inputs)
        lossy = lossy._replace(bias_BND=lossy.bias_BND * (1 + 1e-6))
        monkeypatch.setattr(paths, "sums_by_length", lambda *_: lossy)
        table = paths.table(subject, paths_options(schemes=["frozen"]))
    assert [record.levelname for record in caplog.records if "more than rounding" in record.message] == ["WARNING"]
    assert 1e-9 < table.remainder.max() < 1e-3


def test_the_digest_of_paths_tells_means_and_baselines(make_subject):
    table = measure("paths", paths_options(), [make_subject(3), make_subject(4)])
    lines = paths.digest(table).splitlines()
    assert "2 seeds" in lines[0]
    frozen = pick(table, scheme="frozen", selection="all", path_length=1).accuracy.mean()
    words = next(line for line in lines if line.startswith("frozen")).split()
    assert words[1] == "all" and float(words[3]) == pytest.approx(frozen, abs=5e-4)
    recomputed = pick(table, scheme="recomputed", selection="sampled", subset_size=5, path_length=3).accuracy.mean()
    words = [line.split() for line in lines if "5 sampled" in line][-1]
    assert float(words[-1]) == pytest.approx(recomputed, abs=5e-4)
    whole = [float(word.strip(",")) for word in lines[-2].split() if word.strip(",").replace(".", "").isdigit()]
    columns = ["whole_accuracy", "majority_accuracy", "position_majority_accuracy"]
    assert whole == pytest.approx(table[columns].mean().tolist(), abs=5e-4)
    assert f"{table.remainder.max():.1e}" in lines[-1]
    of_regression = table.assign(accuracy=float("nan"), whole_accuracy=float("nan"))
    lines = paths.digest(of_regression).splitlines()
    frozen = pick(table, scheme="frozen", selection="all", path_length=1).loss.mean()
    words = next(line for line in lines if line.startswith("frozen")).split()
    assert lines[0].startswith("loss by path length") and float(words[3]) == pytest.approx(frozen, abs=5e-4)
    assert "commonest class" not in lines[-2] and f"{table.whole_loss.mean():.3f}" in lines[-2]


# --- residual ---------------------------------------------------------------------------------------------------------


def test_residual_has_a_row_for_each_place(make_subject):
    subject = make_subject()
    table = with_who(residual.table(subject, residual_options("full", "no_mlp")), **subject.who)
    wanted = "run task model seed weights variant view layer sublayer head"
    assert list(table)[:10] == wanted.split()
    of_layer = [("weights", 1), ("weights", 2), ("attention", 0), ("mlp", 0)]
    places = [(0, "input", 0), *((layer, *place) for layer, place in itertools.product((1, 2, 3), of_layer))]
    expected = [
        (weights, variant, *place)
        for weights, variant, place in itertools.product(("trained", "initialised"), ("full", "no_mlp"), places)
        if variant == "full" or place[1] != "mlp"
    ]
    got = table[["weights", "variant", "layer", "sublayer", "head"]].fillna({"head": 0})
    assert list(got.itertuples(index=False, name=None)) == expected
    assert (table["dtype"] == "float64").all()


def states_and_weights(model, inputs):
    """(layer, sublayer, head) and the state or the weights there, of a forward pass."""
    for number, step in enumerate(run(model, inputs)):
        if number == 0:
            yield (0, "input", 0), step.input_BND
        if step.sublayer.kind == "attention":
            for head in range(model.cfg.heads):
                yield (step.sublayer.layer, "weights", head + 1), step.weights_BHNM[:, head]
        yield (step.sublayer.layer, step.sublayer.kind, 0), step.output_BND


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_metrics_are_those_of_a_forward_pass(make_subject, mask):
    subject = make_subject(mask=mask)
    table = residual.table(subject, residual_options("full", sequences=5)).fillna({"head": 0})
    visible = torch.ones(4, 4).tril().bool() if mask == "causal" else None
    compared = 0
    for kind, model in subject.networks.items():
        for (layer, sublayer, head), x in states_and_weights(model, subject.test.inputs[:5]):
            row = pick(table, weights=kind, layer=layer, sublayer=sublayer, head=head).iloc[0]
            if sublayer == "weights":
                metrics = {name: value[:, 0] for name, value in attention_metrics(x[:, None], visible).items()}
            else:
                metrics = state_metrics(x)
            floor = own_rounding(x).mean().item()
            prefix = "attention_" if sublayer == "weights" else ""
            # the rounding of a few layers, with its margin, is some ten times that of the state alone
            assert floor < row[f"{prefix}noise_floor"] < 1000 * floor and row[f"{prefix}below_floor"] == 0
            for name, values in metrics.items():
                values = values.double().numpy()
                # singular values near the rounding of the largest are known to 1e-9 of it alone
                assert row[name] == pytest.approx(values.mean(), rel=1e-8, abs=1e-9), name
                assert row[f"{name}_sd"] == pytest.approx(values.std(ddof=1), rel=1e-6, abs=1e-9), name
                compared += 1
    assert compared > 2 * 13 * 5


def test_one_sequence_has_no_spread(make_subject):
    table = residual.table(make_subject(), residual_options("full", sequences=1))
    states = table[table.sublayer != "weights"]
    assert states.relative_residual.notna().all() and states.relative_residual_sd.isna().all()


def test_the_digest_of_residual_shows_the_state_that_leaves_each_layer(make_subject):
    table = measure("residual", residual_options("full", "no_mlp"), [make_subject(3), make_subject(4)])
    lines = residual.digest(table).splitlines()
    assert "2 seeds" in lines[0]
    words = next(line for line in lines if line.startswith("trained")).split()
    assert words[1] == "full"

    def geometric_mean(**where):
        return f"{math.sqrt(pick(table, **where).relative_residual.prod()):.1e}"  # of two seeds

    for layer, sublayer in ((0, "input"), (2, "mlp")):
        mean = geometric_mean(weights="trained", variant="full", layer=layer, sublayer=sublayer)
        assert words[2 + layer] == mean
    mean = geometric_mean(weights="initialised", variant="no_mlp", layer=3, sublayer="attention")
    assert lines[-1].split()[-1] == mean


def test_a_sequence_without_a_metric_leaves_the_mean_of_the_others(make_subject):
    """Equal tokens have no centred rank; the other sequences do, and their mean is the table's."""
    subject = make_subject(kinds=["initialised"], positions="none")
    subject.test.inputs[1] = 2
    table = residual.table(subject, residual_options("full", sequences=5))
    others = dataclasses.replace(subject, test=subject.test[[0, 2, 3, 4]])
    wanted = residual.table(others, residual_options("full", sequences=4))
    for name in ("effective_rank_centred", "mean_cosine_centred", "effective_rank_centred_sd"):
        states = table.sublayer != "weights"
        assert table[name][states].to_numpy() == pytest.approx(wanted[name][states].to_numpy(), rel=1e-9)
    assert (table.num_undefined == (table.sublayer != "weights")).all() and (wanted.num_undefined == 0).all()
    # what is defined for all is the mean over all
    rows = table[table.sublayer == "input"].iloc[0]
    x_BND = subject.network.embed(subject.test.inputs[:5])
    assert rows.effective_rank == pytest.approx(state_metrics(x_BND)["effective_rank"].mean().item())

"""The claims on knobs: each holds on a sweep that supports it, fails in its control and on sweeps that refute it."""

import math

import numpy as np
import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided
from shipped import options_of

from rankbench.analysing.runner import measure
from rankbench.judging import CLAIMS, judge
from rankbench.judging.residual_left import kept_measured

OTHERS = {"paths_sum_to_output", "blog_saturation_collapses"}
KNOBS = {name: claim for name, claim in CLAIMS.items() if name.startswith(("knob_", "paths_")) ^ (name in OTHERS)}

FLOOR = 1e-14  # of the tokens' size, in the tables written here

# --- tables: {value of the knob: what is left} ------------------------------------------------------------------------


def followed(key, kept):
    """A table of the analysis collapse: kept maps each value of the knob to the share of the embedding's relative
    residual (.5) that is left; seeds are a per cent apart."""
    rows = [
        {"seed": seed, "weights": "initialised", "variant": "full", "layer": layer, key: str(value)}
        | {"log10_relative_residual": math.log10(0.5 * (share * (1 + 0.01 * seed) if layer else 1))}
        for value, share in kept.items()
        for seed in range(5)
        for layer in (0, 24)
    ]
    return pd.DataFrame(rows)


def measured(key, kept, rank=None, seeds=5, size=20.0, **more):
    """A table of the analysis residual of two layers, likewise; what is below FLOOR is hidden by rounding of that size.
    A state behind the attention, before the MLP, must not count. rank: of the last state, by value; the first has 8."""
    rows = []
    for value, share in kept.items():
        for seed in range(seeds):
            last = 0.5 * share * (1 + 0.01 * seed)
            hidden = float(last < FLOOR)
            states = [(0, "input", 0.5), (2, "weights", math.nan), (2, "attention", 7.0), (2, "mlp", last)]
            for layer, sublayer, left in states:
                behind = layer == 2
                row = {"seed": seed, "weights": "initialised", "variant": "full", "layer": layer, "sublayer": sublayer}
                row |= {"relative_residual": left, "residual": size * left, "noise_floor": size * FLOOR}
                row |= {key: str(value), "below_floor": hidden if behind else 0.0}
                ranks = 8.0 if not behind or rank is None else rank[value] * (1 + 0.01 * seed)
                rows.append(row | {"effective_rank": ranks, "effective_rank_centred": ranks, **more})
    return pd.DataFrame(rows)


def training(key, entropy, left):
    """A table of the analysis dynamics of two layers and three steps. entropy: by value of the key, of layer 2 at the
    last step, mean over two heads, over that at the first; left: the share behind layer 2 at the middle step."""
    rows = []
    for value in entropy:
        for seed in range(5):
            for step in (0, 10, 20):
                at = {"seed": seed, "step": step, key: value}
                rows.append({**at, "layer": 0, "sublayer": "input", "relative_residual": 0.8})
                for layer in (1, 2):
                    last = layer == 2 and step == 20
                    mean = 0.9 * (entropy[value] * (1 + 0.001 * seed) if last else 1)
                    for head, offset in ((1, -0.05), (2, 0.05)):
                        weights = {"sublayer": "weights", "head": head, "attention_entropy": mean + offset}
                        rows.append({**at, "layer": layer, **weights})
                    share = 0.8 * (left[value] if layer == 2 and step == 10 else 0.9) * (1 + 0.001 * seed)
                    rows.append({**at, "layer": layer, "sublayer": "attention", "relative_residual": 3.0})
                    rows.append({**at, "layer": layer, "sublayer": "mlp", "relative_residual": share})
    return pd.DataFrame(rows)


def of_sigma(with_sigma=0.6, without=0.3):
    entropy = {"none": without, "sigma": with_sigma}
    return training("model.weight_norm", entropy, dict.fromkeys(entropy, 0.5))


def of_skips(with_skips=0.5):
    left = {"transformer": with_skips, "transformer_no_skip": 1e-3}
    return training("model", dict.fromkeys(left, 0.6), left)


def by_length(key, lengths):
    """A table of the analysis path_mass with lengths 0 and 10 alone. lengths: mean length by value of the key."""
    rows = [
        {"seed": seed, "part": "length", "path_length": length, "mass": mass, key: str(value)}
        for value, mean in lengths.items()
        for seed in range(5)
        for length, mass in ((0, 1 - mean / 10), (10, mean / 10))
    ]
    return pd.DataFrame([*rows, {**rows[0], "part": "bias", "path_length": math.nan, "mass": 99.0}])


def grown(sizes):
    """A table of the analysis residual whose last state is so many times as large, by kind of hyper-connections."""
    table = measured(HYPER, dict.fromkeys(sizes, 0.5))
    size = table[HYPER].map(sizes).where(table.layer == 2, 1.0)
    return table.assign(residual=table.residual * size)


def flat(low=0.5, high=0.51):
    """Numbers at four values of a knob that grow by less than a tenth in all, or fall if high is below low."""
    return dict(zip((0.1, 0.5, 1, 2), np.linspace(low, high, 4), strict=True))


VALUE, EMBEDDING, NORM, HYPER = "model.value_residual", "model.embedding_skip", "model.norm", "model.hyper_connections"
GROUPS, LATENT = "model.kv_groups", "model.latent_width"
BRANCH, SKIP, HEAT = "model.branch_scale", "model.skip_scale", "model.temperature"
UNIFORM, MIX, VALUES = "model.mix_uniform", "model.mix_attention", "model.values"
MEAN = 1.02  # of 1 to 1.04, over the seeds


def of_exclusive(exclusive=1e-7):
    """A table of the analysis attention of three layers: the cosine with the own value by model.exclusive."""
    return pd.DataFrame(
        {"seed": seed, "weights": "initialised", "layer": layer, "head": 1}
        | {"model.exclusive": str(is_exclusive).lower(), "value_cosine": -layer * (exclusive if is_exclusive else 0.4)}
        for is_exclusive in (False, True)
        for seed in range(5)
        for layer in (1, 2, 3)
    )


# name: (a table that supports it, the number measured on it, tables that refute it)
TABLES = {
    "knob_residual_scale": (
        followed(BRANCH, {1: 0.01, 0.5: 0.3, 0.204: 0.9, 0.1: 0.8}),
        -4 / 6,  # of six pairs five in the claimed order
        [followed(BRANCH, {1: 0.9, 0.5: 0.3, 0.204: 0.1}), followed(BRANCH, {1: 0.2, 0.5: 0.3, 0.204: 0.1})],
    ),
    "knob_residual_scale_root": (
        followed(BRANCH, {1: 0.01, 0.5: 0.01, 0.204: 0.8, 0.1: 0.01}),
        0.8 * MEAN,
        [followed(BRANCH, {1: 0.01, 0.204: 0.05, 0.1: 0.9})],
    ),
    "knob_lambda_skip": (
        followed(SKIP, {0: 1e-200, 0.5: 1e-9, 1: 1e-3, 2: 0.2}),
        1.0,
        [followed(SKIP, {0: 0.2, 1: 0.1, 2: 0.05}), followed(SKIP, flat())],
    ),
    "knob_lambda_skip_enough": (followed(SKIP, {0: 1e-200, 1: 1e-3, 2: 0.2}), 0.2 * MEAN, []),
    "blog_saturation_collapses": (
        followed(HEAT, {0.03: 0.001, 0.1: 0.01, 1: 0.2, 3: 0.5}),
        1.0,
        [followed(HEAT, {0.03: 0.5, 0.1: 0.2, 1: 0.01}), followed(HEAT, {0.03: 0.2, 0.1: 0.21, 1: 0.2})],
    ),
    "knob_temperature": (
        followed(HEAT, {0.03: 0.02, 0.1: 0.01, 1: 1e-3}),
        -1.0,
        [followed(HEAT, {0.03: 1e-3, 0.1: 0.01, 1: 0.2})],
    ),
    "knob_temperature_enough": (followed(HEAT, {0.03: 0.3, 0.1: 0.01, 1: 1e-3}), 0.3 * MEAN, []),
    "knob_mean_removal": (measured(UNIFORM, {0: 1e-3, -1: 0.7}), 0.7 * MEAN, [measured(UNIFORM, {0: 1e-3, -1: 0.05})]),
    "knob_mean_removal_rank": (
        measured(UNIFORM, {0: 1e-3, -1: 0.7}, rank={0: 1.1, -1: 6.0}),
        0.75 * MEAN,
        [measured(UNIFORM, {0: 1e-3, -1: 0.7}, rank={0: 1.1, -1: 2.0})],
    ),
    "knob_identity_mix": (
        measured(MIX, {1: 1e-16, 0.3: 1e-3, 0.1: 0.2, 0.03: 0.8}),  # one of them is hidden
        -1.0,
        [measured(MIX, {1: 0.9, 0.3: 0.5, 0.1: 0.2}), measured(MIX, flat(0.51, 0.5))],
    ),
    "knob_identity_mix_enough": (measured(MIX, {1: 1e-16, 0.03: 0.8}), 0.8 * MEAN, []),
    "knob_uniform_mix": (
        measured(UNIFORM, {-0.5: 0.5, 0: 1e-3, 1: 1e-6}),
        -1.0,
        [measured(UNIFORM, {-0.5: 1e-6, 0: 1e-3, 1: 0.5})],
    ),
    "knob_orthogonal_values": (
        measured(VALUES, {"free": 0.9, "orthogonal": 0.9}, rank={"free": 2.0, "orthogonal": 7.0}),
        7 / 8 * MEAN,
        [measured(VALUES, {"free": 0.9, "orthogonal": 0.9}, rank={"free": 2.0, "orthogonal": 3.0})],
    ),
    "knob_value_residual": (
        measured(VALUE, {0: 0.02, 0.5: 0.4, 1: 0.8}),
        1.0,
        [measured(VALUE, {0: 0.8, 0.5: 0.4, 1: 0.02})],
    ),
    "knob_value_residual_enough": (measured(VALUE, {0: 0.02, 1: 0.8}), 0.8 * MEAN, []),
    "knob_embedding_skip": (
        measured(EMBEDDING, {0: 1e-17, 0.1: 1e-3, 1: 0.7}),  # one of them is hidden
        1.0,
        [measured(EMBEDDING, {0: 0.7, 0.1: 0.2, 1: 0.1})],
    ),
    "knob_embedding_skip_enough": (measured(EMBEDDING, {0: 1e-17, 1: 0.7}), 0.7 * MEAN, []),
    "knob_norm_place": (
        followed(NORM, {"post": 1e-3, "pre": 0.3, "peri": 0.25}),
        0.25 * MEAN,
        [followed(NORM, {"post": 1e-3, "peri": 0.05})],
    ),
    "knob_hyper_connections": (
        grown({"free": 500.0, "doubly_stochastic": 2.0}),
        2.0,
        [grown({"free": 500.0, "doubly_stochastic": 20.0}), grown({"free": 500.0, "doubly_stochastic": 0.01})],
    ),
    "paths_value_residual": (
        by_length(VALUE, {0: 2.0, 0.5: 0.9, 1: 0.4}),
        -1.0,
        [by_length(VALUE, {0: 0.4, 0.5: 0.9, 1: 2.0}), by_length(VALUE, flat(5.1, 5.0))],
    ),
    "paths_embedding_skip": (
        by_length(EMBEDDING, {0: 2.0, 0.3: 0.9, 1: 0.4}),
        -1.0,
        [by_length(EMBEDDING, {0: 0.4, 0.3: 0.9, 1: 2.0})],
    ),
    "paths_norm_place": (
        by_length(NORM, {"post": 1.0, "pre": 0.5, "peri": 2.0}),
        4.0,
        [by_length(NORM, {"pre": 0.5, "peri": 0.8})],
    ),
    "paths_hyper_connections": (
        by_length(HYPER, {"none": 0.5, "free": 0.5, "doubly_stochastic": 0.5}),
        0.0,
        [by_length(HYPER, {"none": 0.5, "free": 0.5001})],
    ),
    "knob_sigma_reparam": (of_sigma(), 0.6 * 1.002, [of_sigma(with_sigma=0.3)]),
    "knob_exclusive_keeps": (
        measured("model.exclusive", {"false": 1e-3, "true": 0.7}),
        0.7 * MEAN,
        [measured("model.exclusive", {"false": 1e-3, "true": 0.05})],
    ),
    "knob_kv_groups": (
        followed(GROUPS, {1: 1e-100, 8: 1e-100}),
        0.0,
        [followed(GROUPS, {1: 1e-200, 8: 1e-100}), followed(GROUPS, {1: 1e-100, 8: 1e-200})],
    ),
    "knob_latent_width": (
        followed(LATENT, {1: 1e-100, 16: 1e-300, 64: 1e-100}),  # the ends count
        0.0,
        [followed(LATENT, {1: 1e-200, 64: 1e-100}), followed(LATENT, {1: 1e-100, 64: 1e-200})],
    ),
    "knob_exclusive": (of_exclusive(), 3e-7, [of_exclusive(exclusive=1e-3)]),
    "knob_dynamics": (of_skips(), 0.5 * 1.002, [of_skips(with_skips=0.05)]),  # though there is enough at the end
}


MIDDLE = "step == 10 and model == 'transformer'"


@pytest.mark.parametrize("name", KNOBS)
def test_claims_hold_and_fail(name):
    table, measured, refuting = TABLES[name]
    assert_holds_and_fails(name, table, refuting, measured)


@pytest.mark.parametrize(
    ("name", "table", "reason"),
    [
        # the neutral network does as well: what the knob does is not told
        ("knob_lambda_skip_enough", followed(SKIP, {0: 0.3, 2: 0.4}), "its control did not fail"),
        ("knob_sigma_reparam", of_sigma(without=0.7), "its control did not fail"),
        # the lack of an example
        ("knob_temperature_enough", followed(HEAT, {0.03: 0.02, 1: 1e-3}), "does not refute that there is one"),
        # no sweep, or not over what the paper speaks of
        ("knob_temperature", followed(HEAT, {1: 0.1}), "needs a sweep over model.temperature"),
        ("knob_residual_scale_root", followed(BRANCH, {1: 0.01, 0.5: 0.7}), "no model.branch_scale of 1/sqrt"),
        ("knob_orthogonal_values", measured(VALUES, {"free": 0.9}), "no model.values=orthogonal"),
        # rows or columns that the analysis was not asked for
        ("knob_mean_removal", measured(UNIFORM, {0: 1e-3, -1: 0.7}).assign(variant="no_skip"), "no variant full"),
        ("knob_dynamics", of_skips().drop(columns="relative_residual"), "no relative_residual; add it to"),
        ("knob_sigma_reparam", of_sigma().drop(columns="attention_entropy"), "no attention_entropy; add it to"),
        # a number that is none, in the middle of training and at its end
        (
            "knob_dynamics",
            of_skips().assign(relative_residual=lambda rows: rows.relative_residual.mask(rows.eval(MIDDLE))),
            "not measurable in every seed",
        ),
        ("knob_sigma_reparam", of_sigma(with_sigma=math.nan), "not measurable in every seed"),
        # rounding
        ("knob_identity_mix", measured(MIX, {1: 1e-16, 0.3: 1e-17, 0.1: 0.2}), "hides what is left at 2 of 3 values"),
        ("knob_identity_mix", measured(MIX, {1: 0.0, 0.3: 0.1, 0.1: 0.2}), "rounding has left nothing"),
        (
            "knob_orthogonal_values",
            measured(VALUES, {"free": 1e-16, "orthogonal": 1e-16}),
            "the residual after the last layer is rounding",
        ),
    ],
)
def test_what_cannot_be_judged_is_undecided_and_says_why(name, table, reason):
    assert_undecided(name, table, reason)


def test_a_state_that_is_all_zero_has_no_residual_to_judge():
    table = measured(UNIFORM, {0: 1e-3, -1: 0.7})
    table.loc[(table.layer == 2) & (table.seed == 3), "relative_residual"] = math.nan
    assert_undecided("knob_mean_removal", table, "all zero")


def test_what_rounding_hides_is_at_most_its_floor():
    hidden = measured(UNIFORM, {0: 1e-17}, seeds=1)
    number = kept_measured(hidden)
    assert type(number).__name__ == "AtMost" and number == pytest.approx(FLOOR / 0.5, rel=1e-12)
    seen = kept_measured(measured(UNIFORM, {0: 1e-3}, seeds=1))
    assert type(seen).__name__ == "float64" and seen == pytest.approx(1e-3, rel=1e-12)
    # sequences above the floor, too: then what is measured is more than it
    hidden = measured(UNIFORM, {0: 1e-3}, seeds=1).assign(below_floor=0.25)
    assert type(kept_measured(hidden)).__name__ == "AtMost" and kept_measured(hidden) == pytest.approx(1e-3, rel=1e-12)


def test_a_hidden_share_fails_a_claim_from_below_and_holds_none_from_above():
    (verdict,) = judge("knob_mean_removal", measured(UNIFORM, {0: 1e-3, -1: 1e-16}))
    assert (verdict["outcome"], verdict["is_bound"]) == ("failed", True)
    (verdict,) = judge("knob_dynamics", of_skips(with_skips=1e-7))
    assert (verdict["outcome"], verdict["is_bound"], verdict["measured"]) == ("failed", True, 1e-4)


# --- on networks ------------------------------------------------------------------------------------------------------

PLAIN = {"layers": 12, "width": 16, "heads": 2, "mlp": False, "mlp_skip": False, "bias": False}


def sweep(fresh_subject, analysis, key, values, **changes):
    """The table of a sweep over a key of the model, three fresh networks at each value, in float64."""
    parts = []
    for value in values:
        keys = {**PLAIN, **changes, key.removeprefix("model."): value}
        subjects = [fresh_subject(seed, **keys) for seed in range(3)]
        table = measure(analysis, options_of(analysis, variants=["full"], sequences=4), subjects)
        parts.append(table.assign(**{key: str(value)}))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.further
def test_skips_between_networks_that_collapse_far_below_rounding(fresh_subject):
    """A lambda of 0 and one of 1e-6 both leave less than rounding: in residual coordinates they are told apart."""
    table = sweep(fresh_subject, "collapse", SKIP, (0.0, 1e-6, 8.0), norm_affine=False)
    last = table[table.layer == 12].groupby(SKIP).log10_relative_residual.max()
    assert last["0.0"] < last["1e-06"] < -30 and last["8.0"] > -1
    (verdict,) = judge("knob_lambda_skip", table, SKIP)
    assert (verdict["outcome"], verdict["measured"]) == ("held", 1.0)
    assert judge("knob_lambda_skip_enough", table, SKIP)[0]["outcome"] == "held"


def test_mixes_that_rounding_hides_are_not_compared(fresh_subject):
    plain = {"skip": False, "norm": "none", "init": "glorot"}
    table = sweep(fresh_subject, "residual", MIX, (1.0, 1.5, 2.0), mix_identity=0.0, **plain)
    last = table[(table.layer == 12) & (table.sublayer == "attention")]
    assert (last.below_floor > 0).all()
    (verdict,) = judge("knob_identity_mix", table, MIX)
    assert verdict["outcome"] == "undecided" and "rounding" in verdict["reason"]


@pytest.mark.further
def test_orthogonal_values_keep_the_rank_of_the_residual(fresh_subject):
    plain = {"skip": False, "norm": "none", "init": "glorot", "mix_identity": 1.0, "mix_attention": 0.1}
    table = sweep(fresh_subject, "residual", VALUES, ("free", "orthogonal"), layers=24, **plain)
    ranks = table[(table.layer == 24) & (table.sublayer == "attention")].groupby(VALUES).effective_rank_centred.mean()
    assert ranks["orthogonal"] > 2 * ranks["free"] and np.isfinite(ranks).all()
    (verdict,) = judge("knob_orthogonal_values", table, VALUES)
    assert (verdict["kind"], verdict["outcome"]) == ("check", "passed")

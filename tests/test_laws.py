"""rankbench.measures.laws: closed forms against numbers computed apart and brute force; the analysis, its claims."""

import functools
import math

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from rankbench.analyses import ANALYSES, Subject, laws
from rankbench.claims.laws import LAWS as CLAIMS
from rankbench.config import conf_dir
from rankbench.keys import ConfigError, typed
from rankbench.measures.laws import (
    LAWS,
    cesaro,
    depth_curse,
    entropy_bound,
    long_context,
    metastable,
    norm_placement,
    residual_scale,
    spectral_gap,
)
from rankbench.model import initial_model
from rankbench.runs.tables import with_who

USUAL = OmegaConf.to_container(OmegaConf.load(conf_dir() / "analysis" / "laws.yaml"))
# By law: small sizes at which every seed is within the claim's tolerance.
SMALL = {
    "residual_scale": {"tokens": 16, "layers": 4, "samples": 8},
    "cesaro": {"tokens": 6, "layers": 4},
    "depth_curse": {"tokens": 8, "layers": 6, "width": 128},
    "long_context": {"tokens": 50, "width": 2048},
    "entropy_bound": {"tokens": 5, "samples": 4},
    "spectral_gap": {"tokens": 200},
    "metastable": {"tokens": 60},
    "norm_placement": {"tokens": 4, "width": 8},
    "first_speed": {"tokens": 5},
}


# Numbers that were computed in float64 by other code.
@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (residual_scale.cosine(1, 32, 12), 0.99225),
        (residual_scale.cosine(12**-0.5, 32, 12), 0.047988),
        (cesaro.weight_of_first(8, 3), 0.557136),
        (cesaro.weight_of_first(8, 10), 0.993490),
        (cesaro.weight_of_first(8, 10, cesaro.SHARES["a = 0.3"]), 0.519079),
        *((depth_curse.variance(layers), variance) for layers, variance in ((1, 3), (8, 17), (32, 65), (64, 129))),
        *((depth_curse.variance(layers, -0.5), v) for layers, v in ((1, 3), (8, 6.44), (32, 9.12), (64, 10.49))),
        *((long_context.output_cosine(100, gamma), c) for gamma, c in ((1, 0.9933), (2, 0.8028), (3, 0.5480))),
        *((long_context.output_cosine(10**4, gamma), c) for gamma, c in ((1, 0.99990), (2, 0.80003), (3, 0.50498))),
        *((long_context.limit(gamma), cosine) for gamma, cosine in ((1, 1), (2, 0.8), (3, 0.5))),
        *((entropy_bound.least_entropy(8, s), e) for s, e in ((1, 1.979691), (3, 0.957457), (6, 0.084114))),
        (spectral_gap.bulk(1.0) ** 2, 1.718282),
        (norm_placement.first_speed("post", 16, 1.0), 0.112878),
        *((metastable.fastest_mode(beta), mode) for beta, mode in ((2, 2), (5, 3), (9, 4), (20, 6), (50, 10))),
    ],
)
def test_closed_forms_are_the_numbers_computed_apart(got, wanted):
    digits = len(str(wanted).partition(".")[2])
    assert got == pytest.approx(wanted, abs=0.51 * 10**-digits)


def test_weights_of_the_first_token_are_those_of_matrix_powers():
    average_NN = torch.ones(9, 9, dtype=torch.float64).tril() / torch.arange(1, 10)[:, None]
    for share in cesaro.SHARES.values():
        layer_NN = (1 - float(share)) * torch.eye(9, dtype=torch.float64) + float(share) * average_NN
        for layers in (1, 7):
            power_NN = torch.linalg.matrix_power(layer_NN, layers)
            for tokens in (1, 5, 9):  # rounding of a few products
                got = cesaro.weight_of_first(tokens, layers, share)
                assert got == pytest.approx(power_NN[tokens - 1, 0].item(), abs=1e-14)


def test_the_cosine_of_outputs_is_that_of_tokens_with_exact_products():
    tokens, rho, gamma = 7, 0.5, 1.75
    gram_NN = torch.full((tokens, tokens), rho, dtype=torch.float64).fill_diagonal_(1)
    x_NN = torch.linalg.cholesky(gram_NN)
    y_NN = (gamma * math.log(tokens) * gram_NN).softmax(1) @ x_NN
    wanted = torch.cosine_similarity(y_NN[0], y_NN[1], dim=0).item()
    assert long_context.output_cosine(tokens, gamma, rho) == pytest.approx(wanted, abs=1e-13)


@pytest.fixture(scope="module")
def table_of(model_config, sorting_task):
    task, cfg = sorting_task(), model_config()
    batch = task.sample(2, torch.Generator().manual_seed(0))

    @functools.cache
    def make(law, seeds=2):
        options = typed(laws.Options, {**USUAL, "law": law, **SMALL[law]}, "analysis.laws")
        parts = []
        for seed in range(seeds):
            subject = Subject("fresh", seed, task, batch, batch, {"initialised": initial_model(cfg, task, seed)})
            parts.append(with_who(laws.table(subject, options), **subject.who))
        return pd.concat(parts, ignore_index=True)

    return make


def test_every_law_has_a_claim_and_sizes_here():
    assert set(SMALL) == set(LAWS) and set(CLAIMS) == {f"law_{name}" for name in LAWS}


@pytest.mark.parametrize("name", LAWS)
def test_measured_is_the_closed_form_and_the_control_is_not(name, table_of):
    claim, table = CLAIMS[f"law_{name}"], table_of(name)
    in_control = claim.control.doctor(table)
    for seed in range(2):
        assert (
            claim.measure(table[table.seed == seed])
            < claim.claimed.at
            < claim.measure(in_control[in_control.seed == seed])
        )


@pytest.mark.parametrize("name", LAWS)
def test_points_stand_beside_each_other_and_are_drawn(name, table_of):
    table = table_of(name)
    assert not table.isna().any(axis=None)
    points = {key: set(zip(rows.parameter, rows.x, strict=True)) for key, rows in table.groupby(["setup", "curve"])}
    form = points.pop(("claimed", "closed form"))
    assert points and {setup for setup, _ in points} == {"claimed", "control"}
    assert all(measured and measured <= form for measured in points.values())
    of_closed_form = table[table.curve == "closed form"].groupby(["parameter", "x"]).value
    assert of_closed_form.nunique().max() == 1  # no chance in it
    (axes,) = ANALYSES["laws"].figure(table, None, None).axes
    assert axes.get_xlabel() and axes.get_ylabel()
    assert laws.digest(table).startswith(f"law {name}, by {LAWS[name].x_label}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"law": "cesar"}, "analysis.laws.law=cesar: unknown, did you mean cesaro?"),
        (
            {"law": "cesaro", "width": 8},
            "analysis.laws.width=8: law=cesaro has no such size; its sizes are tokens, layers",
        ),
        ({"tokens": 1}, "analysis.laws.tokens=1: out of range"),
    ],
)
def test_what_a_law_does_not_have_is_refused(options, says):
    with pytest.raises(ConfigError) as error:
        typed(laws.Options, {**USUAL, **options}, "analysis.laws")
    assert says in str(error.value)

"""rankbench.measures.amsel_theory against mpmath, scipy, exact rational sums and networks that are run; and its
analysis."""

import math

import mpmath
import numpy as np
import pandas as pd
import pytest
import torch
from drawn import generator, normal
from scipy import integrate, special

from rankbench.analyses import ANALYSES, Subject, rank_theory
from rankbench.config.keys import typed
from rankbench.measures import amsel_theory as theory
from rankbench.model import initial_model
from rankbench.runs.tables import with_who
from rankbench.tasks.nearest_neighbor import on_sphere, orthonormal


def eta(dimension, degree):
    """The coefficient of sgn at an odd degree."""
    return (-1) ** ((degree - 1) // 2) * special.beta(degree / 2, dimension / 2) / math.pi


@pytest.mark.parametrize("dimension", [3, 5, 16])
def test_harmonics_are_counted_by_their_generating_function(dimension):
    """sum N(d, l) t^l = (1 + t) / (1 - t)^(d-1)."""
    power = [math.comb(dimension - 2 + k, k) for k in range(12)]
    for degree in range(12):
        wanted = power[degree] + (power[degree - 1] if degree else 0)
        assert theory.num_harmonics(dimension, degree) == wanted


def exact_bound(dimension, rank, heads, form, degrees):
    """By definition, with 40 digits: (the sum with what is left out bounded by nothing, and by everything)."""
    with mpmath.workdps(40):
        taken = whole = mpmath.mpf(0)
        for degree in range(1, degrees + 1, 2):
            eta = mpmath.beta(mpmath.mpf(degree) / 2, mpmath.mpf(dimension) / 2) / mpmath.pi
            number = theory.num_harmonics(dimension, degree)
            taken += eta**2 * min(number, heads * theory.num_seen(rank, degree, form))
            whole += eta**2 * number
        return float((whole - taken) / 2), float((1 - taken) / 2)


@pytest.mark.parametrize("form", theory.FORMS)
@pytest.mark.parametrize(
    ("dimension", "rank", "heads"), [(16, 1, 7), (16, 4, 16), (5, 2, 3), (5, 4, 1), (8, 7, 2), (6, 6, 1)]
)
def test_the_lower_bound_is_below_the_series_and_close_to_it(form, dimension, rank, heads):
    below, above = exact_bound(dimension, rank, heads, form, 1201)  # between which the series lies
    coarse, fine = (theory.lower_bound(dimension, rank, heads, form, degrees) for degrees in (201, 1201))
    # float64 sums of hundreds of terms
    assert coarse <= fine + 1e-12 <= above + 2e-12 and below - 1e-12 <= fine


@pytest.mark.parametrize(("rank", "error"), [(1, 0.2), (2, 0.1), (8, 0.05)])
def test_the_fewest_heads_are_the_first_that_the_bound_lets_pass(rank, error):
    fewest = theory.fewest_heads(16, rank, error, "sharp")
    assert theory.lower_bound(16, rank, fewest, "sharp") <= error
    assert fewest == 1 or theory.lower_bound(16, rank, fewest - 1, "sharp") > error


@pytest.mark.parametrize("dimension", [3, 8, 16])
def test_agreement_and_likeness_are_their_series(dimension):
    """kappa = sum eta^3 N, rho = sum eta^4 N; terms fall at least like l^(-d/2 - 2)."""
    for power, value in ((3, theory.agreement(dimension)), (4, theory.likeness(dimension))):
        odd = range(1, 4001, 2)
        series = math.fsum(eta(dimension, degree) ** power * theory.num_harmonics(dimension, degree) for degree in odd)
        assert value == pytest.approx(series, abs=2e-6 if dimension == 3 else 1e-10)


@pytest.mark.parametrize("dimension", [3, 16])
@pytest.mark.parametrize("heads", [1, 2, 5, 8])
def test_the_majority_errs_as_an_enumeration_says(dimension, heads):
    def wrong(t):
        right = 1 - math.acos(t) / math.pi
        total = 0.0
        for votes in range(heads + 1):
            chance = special.comb(heads, votes) * right**votes * (1 - right) ** (heads - votes)
            total += chance * (1 if 2 * votes < heads else 0.5 if 2 * votes == heads else 0)
        return total

    density = lambda t: (1 - t * t) ** ((dimension - 3) / 2)  # noqa: E731
    top, bottom = (integrate.quad(f, 0, 1)[0] for f in (lambda t: wrong(t) * density(t), density))
    assert theory.majority_vote(dimension, heads) == pytest.approx(2 * top / bottom, abs=1e-9)


def test_optimal_weights_are_the_least_squares_ones():
    """Against a fit on sampled u and y: its error is the formula's but for sampling, 20,000 pairs, 5 coefficients."""
    queries = on_sphere((5,), 6, generator(1))
    u, y = on_sphere((20_000,), 6, generator(2)), on_sphere((20_000,), 6, generator(3))
    features = ((u @ queries.T).sign() * (y @ queries.T).sign()).numpy()
    wanted = (u * y).sum(1).sign().numpy()
    rest = np.linalg.lstsq(features, wanted, rcond=None)[1][0] / 20_000 / 2
    assert theory.optimal_weights(queries) == pytest.approx(rest, abs=0.01)
    assert theory.optimal_weights(queries[:1]) == pytest.approx(theory.equal_weights(6, 1), abs=1e-12)
    twice = torch.cat([queries, queries])  # the same heads again are of no use
    # asin at 1 has half of the digits
    assert theory.optimal_weights(twice) == pytest.approx(theory.optimal_weights(queries), abs=1e-6)


@pytest.mark.parametrize("degree", [1, 3, 9])
def test_zonal_functions_are_gegenbauer_polynomials(degree):
    cosines = torch.linspace(-1, 1, 9, dtype=torch.float64)
    wanted = special.eval_gegenbauer(degree, 3.0, cosines.numpy()) / special.eval_gegenbauer(degree, 3.0, 1.0)
    assert theory.zonal(cosines, degree, 8).numpy() == pytest.approx(wanted, abs=1e-13)


@pytest.mark.parametrize(("dimension", "rank", "heads"), [(16, 1, 1), (16, 1, 31), (3, 1, 5), (12, 2, 3)])
def test_the_best_generalised_heads_attain_the_bound(dimension, rank, heads):
    """On sampled pairs, five standard errors, and two hundredths for the degrees that are left out."""
    best = theory.best_heads(orthonormal(heads, rank, dimension, generator(1)), generator(2))
    u, y = on_sphere((20_000,), dimension, generator(3)), on_sphere((20_000,), dimension, generator(4))
    errors = ((u * y).sum(1).sign() - best(u, y)).square() / 2
    bound = theory.lower_bound(dimension, rank, heads, "sharp")
    slack = 5 * errors.std().item() / math.sqrt(20_000)
    assert bound - slack < errors.mean().item() < bound + slack + 0.02 * bound


def test_the_best_functions_are_those_of_least_squares():
    """For one y, against a fit of free functions of what two heads see, on a grid of the circle's points in 3 D."""
    bases = orthonormal(2, 1, 3, generator())
    u, y = on_sphere((20_000,), 3, generator(1)), on_sphere((1,), 3, generator(2))
    bins = ((u @ bases[:, 0].T + 1) * 20).long().clamp(max=39)  # a function of k.u is a number for each of 40 bins
    columns = torch.nn.functional.one_hot(bins, 40).flatten(1).double()
    wanted = (u @ y[0]).sign()
    fitted = columns @ torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution
    best = theory.best_heads(bases, generator(3))(u, y.expand_as(u))
    # of a distance of 1; bins cost a few thousandths, and 80 coefficients on 20,000 points four
    least, got = ((x - wanted).square().mean().item() for x in (fitted[:, 0], best))
    assert least == pytest.approx(got, abs=0.01)


@pytest.mark.parametrize(("dimension", "rank"), [(5, 1), (5, 3), (5, 5)])
def test_the_angle_limit_is_that_of_minus_a_projection(dimension, rank):
    projection = np.diag([-1.0] * rank + [0.0] * (dimension - rank))
    cosine = np.trace(projection) / np.linalg.norm(projection) / math.sqrt(dimension)
    assert theory.angle_limit(dimension, rank) == pytest.approx(math.degrees(math.acos(cosine)), abs=1e-6)


def test_attention_is_represented_exactly_at_the_rank_of_its_scores():
    q, k = (normal(seed, 9, 3) for seed in (0, 1))
    p = (q @ (k - k.mean(0)).T).softmax(1)  # rows of the scores have mean 0
    assert theory.low_rank_attention_error(p, 3) < 1e-12 < theory.low_rank_attention_error(p, 2)


def test_the_margin_is_that_of_a_loop():
    keys = normal(0, 6, 4)
    cosines = [torch.cosine_similarity(a, b, dim=0).item() for i, a in enumerate(keys) for b in keys[:i]]
    assert theory.sparse_margin(6, 4, generator()) == pytest.approx(1 - max(cosines), abs=1e-13)


# --- the analysis -----------------------------------------------------------------------------------------------------

OPTIONS = {"dimensions": [5], "ranks": [1, 2], "heads": [1, 4], "errors": [0.3], "votes": [1, 5], "samples": 600}
OPTIONS |= {"tokens": [4], "matrices": 3}


@pytest.fixture(scope="module")
def table(model_config):
    task = rank_theory.pairs(5)
    cfg = model_config(layers=1, heads=1, width=5, positions="none", attention="dot")
    parts = []
    for seed in range(3):
        batch = task.sample(2, generator())
        subject = Subject("fresh", seed, task, batch, batch, {"initialised": initial_model(cfg, task, seed)})
        rows = rank_theory.table(subject, typed(rank_theory.Options, OPTIONS, "analysis.rank_theory"))
        parts.append(with_who(rows, **subject.who))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.further
def test_what_is_tried_out_is_what_the_formulas_say(table):
    by_form = table[table["quantity"].isin(["error", "right"])].groupby(["form", "heads", "kind"])
    mean, error = by_form.value.mean().unstack(), by_form.standard_error.mean().unstack()
    for form in ("equal_weights", "majority_vote", "one_random_head"):
        both = mean.loc[form].dropna()
        assert len(both)
        # three seeds: five standard errors of their mean
        assert ((both.measured - both.formula).abs() < 5 * error.loc[form].measured / math.sqrt(3)).all(), form


def test_the_network_of_two_layers_takes_the_vote_of_its_heads():
    queries = on_sphere((7,), 5, generator())
    network = rank_theory.construction(queries)
    batch = rank_theory.pairs(5).sample(200, generator(1))
    outputs = network(batch.inputs)[:, -1]
    for points, output in zip(batch.inputs, outputs, strict=True):
        first, second, query = points
        votes = sum(math.copysign(1, (q @ (first - second)) * (q @ query)) for q in queries)
        torch.testing.assert_close(output, first if votes > 0 else second, rtol=0, atol=1e-13)


@pytest.mark.further
def test_one_full_rank_hardmax_head_is_exact(table):
    errors = table[(table["quantity"] == "error") & (table.form == "full_rank")]
    assert len(errors) == 3 and (errors.value < 1e-28).all()


def test_the_figure_and_the_digest_are_drawn(table):
    assert not table.isna().all().any()
    assert len(ANALYSES["rank_theory"].figure(table, None, None).axes) == 2
    assert "fewest heads" in rank_theory.digest(table)

"""The laws of the papers: closed forms against numbers computed apart and brute force; the analysis, its claims."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from breadth import some
from drawn import normal
from refusals import refusal
from shipped import options_of

from rankbench import judging
from rankbench.analyses import ANALYSES, laws
from rankbench.analysing.runner import measure
from rankbench.config import plugins
from rankbench.config.model import ModelConfig
from rankbench.judging.of_laws import agrees
from rankbench.measures import causal_averages, entropy_bound
from rankbench.measures import signal_propagation as propagation
from rankbench.measures.attention_matrices import beside_independent
from rankbench.measures.law import LAWS, Law
from rankbench.model.bare import drawn_network, with_identity_values
from rankbench.model.network import run
from rankbench.model.norm import Norm
from rankbench.papers import (
    bruno_2025,
    chen_2026,
    fedorov_2026,
    giorlandino_2025,
    nait_saada_2025,
    noci_2022,
    queipo_2025,
    sun_2025,
    wu_2024,
    wu_2025,
    xie_2025,
)
from rankbench.papers.karagodin_2025 import norm_placement
from rankbench.papers.kim_2021 import power_iteration, score_biases
from rankbench.papers.own import norm_ranks, path_lengths

CLAIMS = {name: claim for name, claim in judging.CLAIMS.items() if claim.table == "laws"}
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
    "signal_propagation": {"tokens": 128, "layers": 3, "width": 256, "samples": 2},
    "antipodal": {"layers": 250, "samples": 200},
    "plateau": {"tokens": 60, "samples": 3},
    "meeting": {"tokens": 16, "layers": 480},
    "long_context_gradient": {"tokens": 40, "width": 1024, "samples": 2},
    "layernorm_rank": {"tokens": 4, "layers": 100},
    "position_bias": {"tokens": 6, "layers": 5, "width": 32, "samples": 16},
    "path_lengths": {"tokens": 16, "layers": 8, "width": 128},
    "massive_token": {"tokens": 32, "width": 64},
    "norm_ranks": {"width": 5},
    "stream_collapse": {"tokens": 8, "layers": 20, "width": 64, "samples": 4},
    "power_iteration": {"width": 400, "samples": 1},
    "score_biases": {"tokens": 5},
    "looped_collapse": {"tokens": 16, "layers": 6, "samples": 4},
    "looped_end": {"tokens": 4, "layers": 200, "width": 8},
}


def cosine_after(variant, layers):
    return next(itertools.islice(propagation.cosines(*giorlandino_2025.VARIANTS[variant]), layers, None))


# Numbers that were computed in float64 by other code.
@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (noci_2022.cosine(1, 32, 12), 0.99225),
        (noci_2022.cosine(12**-0.5, 32, 12), 0.047988),
        *((sun_2025.variance(layers), variance) for layers, variance in ((1, 3), (8, 17), (32, 65), (64, 129))),
        *((sun_2025.variance(layers, -0.5), v) for layers, v in ((1, 3), (8, 6.44), (32, 9.12), (64, 10.49))),
        *((chen_2026.gradient_limit(gamma, 4), norm) for gamma, norm in ((1, 0), (2, 0.1875), (3, 0.75))),
        *((chen_2026.limit(gamma), cosine) for gamma, cosine in ((1, 1), (2, 0.8), (3, 0.5))),
        *((entropy_bound.least_entropy(8, s), e) for s, e in ((1, 1.979691), (3, 0.957457), (6, 0.084114))),
        (nait_saada_2025.bulk(1.0) ** 2, 1.718282),
        (norm_placement.first_speed("post", 16, 1.0), 0.112878),
        *((cosine_after("post", layers), c) for layers, c in ((1, 0.337), (5, 0.893), (20, 1.000), (100, 1.000))),
        *((cosine_after("pre", layers), c) for layers, c in ((1, 0.336), (5, 0.756), (20, 0.950), (100, 0.991))),
        *((cosine_after("post, centred", n), c) for n, c in ((1, 0.205), (5, 0.223), (20, 0.287), (100, 0.525))),
        (score_biases.derivative(2.0, 2), 2.0625),  # of -.5 and 2
        *((score_biases.derivative(s, 3), value) for s, value in ((1, 1.055556), (100, 6667.055556))),
        *((bruno_2025.fastest_mode(beta), mode) for beta, mode in ((2, 2), (5, 3), (9, 4), (20, 6), (50, 10))),
    ],
)
def test_closed_forms_are_the_numbers_computed_apart(got, wanted):
    digits = len(str(wanted).partition(".")[2])
    assert got == pytest.approx(wanted, abs=0.51 * 10**-digits)


def test_weights_of_the_first_token_are_those_of_matrix_powers():
    average_NN = torch.ones(9, 9, dtype=torch.float64).tril() / torch.arange(1, 10)[:, None]
    for share in causal_averages.SHARES.values():
        layer_NN = (1 - float(share)) * torch.eye(9, dtype=torch.float64) + float(share) * average_NN
        for layers in (1, 7):
            power_NN = torch.linalg.matrix_power(layer_NN, layers)
            for tokens in (1, 5, 9):  # rounding of a few products
                got = causal_averages.weight_of_first(tokens, layers, share)
                assert got == pytest.approx(power_NN[tokens - 1, 0].item(), abs=1e-14)


def test_the_cosine_of_outputs_is_that_of_tokens_with_exact_products():
    tokens, rho, gamma = 7, 0.5, 1.75
    gram_NN = torch.full((tokens, tokens), rho, dtype=torch.float64).fill_diagonal_(1)
    x_NN = torch.linalg.cholesky(gram_NN)
    y_NN = (gamma * math.log(tokens) * gram_NN).softmax(1) @ x_NN
    wanted = torch.cosine_similarity(y_NN[0], y_NN[1], dim=0).item()
    assert chen_2026.output_cosine(tokens, gamma, rho) == pytest.approx(wanted, abs=1e-13)


@pytest.mark.parametrize("gamma", [0.5, 2.0, 3.5])
def test_the_gradient_norm_is_that_of_the_jacobian(gamma):
    tokens, rho = 6, 0.5
    gram_NN = torch.full((tokens, tokens), rho, dtype=torch.float64).fill_diagonal_(1)
    x_ND = torch.nn.functional.pad(torch.linalg.cholesky(gram_NN), (0, 2))  # in 8 dimensions

    def attended(x_ND):
        u_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
        return (gamma * math.log(tokens) * u_ND @ u_ND.T).softmax(1) @ u_ND

    wanted = torch.func.jacrev(attended)(x_ND).square().sum().item() / (tokens * 8)
    assert chen_2026.gradient_norm(tokens, 8, gamma, rho) == pytest.approx(wanted, rel=1e-12)


def test_gradient_norms_tend_to_their_limits():
    """By the order of the terms that are left, log(n)^2/n times a few."""
    for gamma in (1.0, 2.0, 3.5):
        norms = [chen_2026.gradient_norm(n, n, gamma) for n in (10**4, 10**6)]
        assert norms[-1] == pytest.approx(chen_2026.gradient_limit(gamma, 10**6), abs=0.002)
        assert abs(norms[1] - norms[0]) > abs(norms[1] - chen_2026.gradient_limit(gamma, 10**6))


def test_power_iteration_is_at_most_the_norm_and_takes_the_mean_of_catalan_numbers():
    """The estimates by singular values and parts of the start; the share by ratios of binomials."""
    generator = torch.Generator().manual_seed(0)
    matrix_DD = torch.randn(20, 20, dtype=torch.float64, generator=generator)
    start_D = torch.randn(20, dtype=torch.float64, generator=generator)
    _, s_D, right_DD = torch.linalg.svd(matrix_DD)
    parts_D = (right_DD @ start_D).square()
    estimates = power_iteration.estimates(matrix_DD, start_D)
    for k, estimate in zip(power_iteration.ITERATIONS, estimates, strict=True):
        powers_D = parts_D * (s_D / s_D[0]) ** (4 * k)
        assert estimate.item() == pytest.approx(((powers_D * s_D**2).sum() / powers_D.sum()).sqrt().item(), rel=1e-12)
        catalan = [math.comb(2 * j, j) / (j + 1) for j in (2 * k, 2 * k + 1)]
        assert power_iteration.share_of_norm(k) == pytest.approx(math.sqrt(catalan[1] / catalan[0]) / 2, rel=1e-12)
    assert (estimates < s_D[0]).all() and (estimates.diff() > 0).all()


def test_shares_of_path_lengths_count_the_cycles_of_permutations():
    layers = 4
    cycles = [0] * (layers + 2)
    for permutation in itertools.permutations(range(layers + 1)):
        unseen, number = set(range(layers + 1)), 0
        while unseen:
            at, number = unseen.pop(), number + 1
            while (at := permutation[at]) in unseen:
                unseen.remove(at)
        cycles[number] += 1
    wanted = [count / math.factorial(layers + 1) for count in cycles[1:]]
    assert path_lengths.shares(layers) == pytest.approx(wanted, rel=1e-15)
    mean = sum(length * share for length, share in enumerate(path_lengths.shares(1000)))
    assert mean == pytest.approx(math.log(1001) + np.euler_gamma - 1, abs=1e-3)  # 1 for each factor e of depth


def test_no_stable_rank_is_above_the_bound_of_its_massive_token():
    x_ND = normal(0, 20, 8)
    for factor in (1.0, 3.0, 10.0):
        states = x_ND * torch.tensor([factor] + 19 * [1.0], dtype=torch.float64)[:, None]
        squares = states.square().sum(1)
        massive, rest = squares[0], squares[1:].sum()
        cosines = torch.nn.functional.cosine_similarity(states[1:], states[:1])
        alpha = (squares[1:] * cosines.square()).sum() / rest
        stable = squares.sum() / torch.linalg.matrix_norm(states, 2) ** 2
        assert stable <= (massive + rest) / (massive + alpha * rest)
    assert queipo_2025.bound(8, 64, 64) == pytest.approx((64 + 63) / (64 + 63 / 64), rel=1e-15)


@pytest.mark.parametrize(("kind", "share"), xie_2025.MIXES.values())
def test_streams_are_as_far_apart_as_every_mixing_matrix_says(kind, share):
    """Second moments of the streams of one coordinate, averaged over all permutations in each sub-layer. Rounding of a
    few dozen products of order 1."""
    S = xie_2025.STREAMS
    centred_SS = np.eye(S) - 1 / S
    orders = [np.eye(S)[list(order)] for order in itertools.permutations(range(S))]
    mixes = [(1 - share) * np.eye(S) + share * (np.full((S, S), 1 / S) if kind == "average" else pi) for pi in orders]
    moments_SS = np.ones((S, S))
    for layer in range(1, 6):
        moments_SS = np.mean([mix @ moments_SS @ mix.T for mix in mixes], axis=0)
        moments_SS += np.outer(np.eye(S)[layer % S], np.eye(S)[layer % S])
        wanted = math.sqrt(np.trace(centred_SS @ moments_SS) / np.trace(moments_SS))
        assert xie_2025.apart(layer, xie_2025.kept(kind, share)) == pytest.approx(wanted, rel=1e-13)
    drawn_SS = xie_2025.mixing(kind, share, torch.Generator().manual_seed(0)).numpy()
    assert any(np.allclose(drawn_SS, mix, rtol=0, atol=1e-15) for mix in mixes)


def test_cosines_are_a_half_at_the_times_computed_apart():
    for place, time in {"post": 3.82, "pre": 8.16, "peri": 3.72, "nGPT": 1.62}.items():
        (half,) = norm_placement.cosines(place, 256, 5.0, [time])
        assert half == pytest.approx(0.5, abs=0.01)  # two decimals of the time, at a speed of up to 1


def test_shares_of_antipodal_pairs_are_those_of_simulations_made_apart():
    # by width: shares at beta 0, 1, 4; of about a hundred runs each, whose shares have a standard deviation of .05
    for width, shares in {2: (0.46, 0.56, 0.40), 8: (0, 0, 0.27)}.items():
        for beta, share in zip((0, 1, 4), shares, strict=True):
            assert fedorov_2026.antipodal_share(width, beta) == pytest.approx(share, abs=0.11 if share else 0)


def test_drift_and_variance_of_a_pair_are_those_that_the_probability_assumes():
    """One short step of many pairs, by the law's own attention, against the two formulas of the docstring."""
    width, beta, s, dt = 5, 1.5, 0.3, 1e-3
    generator = torch.Generator().manual_seed(0)
    pair_ND = torch.zeros(2, width, dtype=torch.float64)
    pair_ND[0, 0], pair_ND[1, 0], pair_ND[1, 1] = 1, s, math.sqrt(1 - s**2)
    moved_RND = fedorov_2026.attended(pair_ND[None], beta)
    half_RDD = torch.randn(10**5, width, width, dtype=torch.float64, generator=generator) * math.sqrt(dt)
    draws_RDD = torch.cat([half_RDD, -half_RDD])  # the drift is second order: the first order cancels between the two
    changes_R = torch.cosine_similarity(*(pair_ND + moved_RND @ draws_RDD).unbind(1), dim=-1) - s
    t2 = math.tanh(beta * (1 - s) / 2) ** 2
    drift = (1 - s**2) * (width - 2 - s - t2 * (width - 2 + s)) / 2
    variance = (1 - s**2) ** 2 * (1 + t2)
    # higher orders are a few dt; chance is 1/sqrt(10^5) of the second order
    assert changes_R.mean().item() / dt == pytest.approx(drift, abs=0.02)
    assert changes_R.var().item() / dt == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.003, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(("deviation", "tokens"), [(0.05, 8), (1.0, 8), (3.0, 512), (13.4, 512)])
def test_overlap_of_random_weights_is_its_integral(deviation, correlation, tokens):
    noise_3RN = normal(0, 3, 2000, tokens)
    shared, *own = noise_3RN
    logits = (correlation**0.5 * shared + (1 - correlation) ** 0.5 * noise for noise in own)
    first, second = ((deviation * logits_RN).softmax(1) for logits_RN in logits)
    sums_R = (first * second).sum(1)
    standard_error = sums_R.std().item() / len(sums_R) ** 0.5
    integral = propagation.mean_overlap(deviation, correlation, tokens)
    assert integral == pytest.approx(sums_R.mean().item(), abs=4 * standard_error)


def test_attention_tends_to_the_map_of_many_tokens():
    """The limit is approached as 1/log(tokens): twice the logarithm halves the distance."""
    limit, _ = propagation.after_attention(1.0, 0.2, 4.0, centred=True)
    after = [propagation.after_attention(1.0, 0.2, 4.0, True, 10**digits) for digits in (3, 6, 12)]
    off = [q - limit for q, _ in after]
    assert off[0] > off[1] > off[2] > 0
    assert off[2] / off[1] == pytest.approx(0.5, abs=0.15)
    overlaps = [p for _, p in after]
    assert 0.1 * overlaps[0] > overlaps[1] > 100 * overlaps[2] > 0
    assert propagation.after_attention(1.0, 0.2, 1.5, centred=False) == (0.2, 0.2)  # below beta_c = 1.58


@pytest.mark.parametrize(("ratio", "rank"), [(1.1, 1), (1.65, 4), (1.9, 5), (3.0, 6)])
def test_tokens_under_a_norm_end_in_their_equilibrium_of_any_rank(ratio, rank):
    """Against plain iteration from positive tokens; the rank counts directions without rounding."""
    values_N = ratio ** np.arange(6)
    x_NN = np.tril(np.random.default_rng(0).random((6, 6)))
    for _ in range(4000):
        x_NN = x_NN.cumsum(0) * values_N
        x_NN /= np.linalg.norm(x_NN, axis=1, keepdims=True)
    equilibrium_NN = np.array(wu_2024.equilibrium(ratio, 6))
    np.testing.assert_allclose(x_NN, equilibrium_NN, atol=1e-9)
    assert np.linalg.matrix_rank(equilibrium_NN, tol=1e-6) == rank
    assert equilibrium_NN[1, 0] == pytest.approx(min(1, 1 / (ratio - 1)))


def test_the_longest_plateau_is_that_of_simulations_made_apart():
    """At beta 20, where 6.1 clusters last longest, mean over runs; beside k* = 6."""
    of_claimed = itertools.islice(bruno_2025.simulated_plateau(torch.Generator().manual_seed(0), 100, 2), 5)
    by_beta = {beta: value for *_, beta, value in of_claimed}
    assert by_beta[20.0] == pytest.approx(6.1, abs=1.2)  # one run scatters by one
    assert bruno_2025.num_clusters(torch.tensor([[0.0, 0.05, 1.0, 6.25], [0.0, 1.0, 2.0, 3.0]])).tolist() == [2, 4]
    assert bruno_2025.longest([9, 9, 4, 4, 4, 9, 9]) == 4


@pytest.mark.parametrize(
    ("place", "time", "wanted"),
    [
        ("post", lambda t: t, -1.999),
        ("pre", math.log, -2.085),
        ("peri", math.log, -2.011),
        ("post, branch / sqrt(t)", math.sqrt, -3.999),
    ],
)
def test_late_rates_are_the_slopes_fitted_apart(place, time, wanted):
    """Slopes of log(1 - cos) against t, log t and sqrt t, which tend to -2 and -4; those wanted are of other times, at
    which the one against log t is .085 from its limit."""
    x_ND = torch.nn.functional.normalize(normal(0, 16, 8))
    distances = norm_placement._distances(place, x_ND, alone=False)
    late = norm_placement._late_times(place)
    slope = np.polyfit([time(t) for t in late], [math.log(distances[t]) for t in late], 1)[0]
    assert slope == pytest.approx(wanted, abs=0.085)


def test_independent_weights_are_at_the_law_and_others_beyond_it():
    generator = torch.Generator().manual_seed(0)
    draw = {"dtype": torch.float64, "generator": generator}
    independent = torch.randn(1, 2, 500, 500, **draw).mul(0.5).softmax(-1)
    got = beside_independent(independent, generator)
    for name in ("singular_over_law", "shuffled_over_law", "eigenvalue_over_law"):
        assert got[name].numpy() == pytest.approx(1, abs=0.05)  # the largest of 500 values lifts the edge by 3 %
    wide = beside_independent(independent[..., :100, :], generator)
    assert wide["singular_over_law"].numpy() == pytest.approx(1, abs=0.05) and wide["eigenvalue_over_law"].isnan().all()
    rank_one = (torch.randn(1, 1, 500, 1, **draw) * torch.randn(500, **draw)).softmax(-1)
    alike = beside_independent(rank_one, generator)
    assert alike["singular_over_law"] > 3 and alike["shuffled_over_law"] < alike["singular_over_law"] / 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_bounds_of_heads_by_hand(random_network, bias, norm):
    model, batch = random_network(6, seed=1, bias=bias, norm=norm, temperature=1.5)
    seen = 0
    for sequence in batch.inputs:
        steps = [step for step in run(model, sequence[None]) if step.sublayer.kind == "attention"]
        for step, (layer, values) in zip(steps, entropy_bound.of_heads(model, sequence), strict=True):
            heads, x_ND = step.sublayer.part, step.input_BND[0]
            x_ND = step.sublayer.norm(x_ND) if norm == "pre" else x_ND
            q_HNK, k_HMK, _ = (y_BHNK[0] for y_BHNK in heads.queries_keys_values(x_ND[None]))
            rows = q_HNK @ k_HMK.mT / (heads.head_width**0.5 * 1.5)
            norm_H = (rows - rows.mean(-1, keepdim=True)).norm(dim=-1).amax(-1)
            assert layer == step.sublayer.layer and (norm_H <= values["score_norm_bound"]).all()
            entropy_HN = torch.distributions.Categorical(logits=rows).entropy()
            assert values["entropy_nats"].numpy() == pytest.approx(entropy_HN.mean(-1).numpy())
            assert values["least_entropy_nats"].numpy() == pytest.approx(entropy_HN.amin(-1).numpy())
            assert (values["least_entropy_nats"] >= values["entropy_bound_nats"]).all()
            if not bias:
                w, size = heads.maps(), np.linalg.norm(x_ND.numpy(), 2)
                products_HDD = (w.w_q_HDK @ w.w_k_HDK.mT).numpy() / (heads.head_width**0.5 * 1.5)
                wanted = [np.linalg.norm(product_DD, 2) * size**2 for product_DD in products_HDD]
                assert values["score_norm_bound"].numpy() == pytest.approx(wanted)
            wanted = [entropy_bound.least_entropy(4, sigma.item()) for sigma in values["score_norm_bound"]]
            assert values["entropy_bound_nats"].tolist() == wanted
            seen += 1
    assert seen == 12
    masked, batch = random_network(1, seed=1, mask="causal")
    assert not list(entropy_bound.of_heads(masked, batch.inputs[0]))


@pytest.mark.parametrize("streams", [{"embedding_skip": 10.0}, {"hyper_connections": "free", "stream_deviation": 3.0}])
def test_bounds_of_heads_that_read_a_sum_of_streams(random_network, streams):
    model, batch = random_network(2, seed=1, norm="none", **streams)
    for sequence in batch.inputs:
        weights = [step.weights_BHNM[0] for step in run(model, sequence[None]) if step.sublayer.kind == "attention"]
        for p_HNM, (_, values) in zip(weights, entropy_bound.of_heads(model, sequence), strict=True):
            seen_HNM = p_HNM.log().clamp(min=-700)  # scores up to a constant of each row
            norm_H = (seen_HNM - seen_HNM.mean(-1, keepdim=True)).norm(dim=-1).amax(-1)
            assert (norm_H <= values["score_norm_bound"]).all()


def test_accumulated_weights_are_those_that_make_the_states():
    keys = {"width": 6, "layers": 3, "mask": "causal", "skip": True, "skip_scale": 0.7, "branch_scale": 0.3}
    generator = torch.Generator().manual_seed(0)
    drawn = with_identity_values(drawn_network(generator, 6, **keys))
    x_NN = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    weights = [torch.linalg.solve(x_NN, step.output_BND[0], left=False)[-1, 0] for step in run(drawn, x_NN[None])]
    got_L = wu_2025.accumulated(drawn, x_NN[None], 0.3)
    assert got_L.tolist() == pytest.approx(torch.stack(weights).tolist(), abs=1e-10)  # condition of x, up to 1e4


@pytest.fixture(scope="module")
def table_of(fresh_subject):
    subjects = [fresh_subject(seed) for seed in (0, 1)]
    two_seeds = set(list(LAWS)[::6])  # what differs between seeds is the same code for all laws
    return functools.cache(
        lambda law: measure("laws", options_of("laws", law=law, **SMALL[law]), subjects[: 1 + (law in two_seeds)])
    )


def test_every_law_has_a_claim_and_sizes_here():
    assert set(SMALL) == set(LAWS) and set(CLAIMS) == {f"law_{name}" for name in LAWS}


@pytest.mark.parametrize("name", some(LAWS, 3))
def test_measured_is_the_closed_form_and_the_control_is_not(name, table_of):
    claim, table = CLAIMS[f"law_{name}"], table_of(name)
    in_control = claim.control.falsify(table)
    for seed in table.seed.unique():
        ours, controls = (claim.measure(rows[rows.seed == seed]) for rows in (table, in_control))
        assert ours < claim.claimed.at < controls


@pytest.mark.parametrize("tokens", [2, 4])
def test_an_even_number_of_tokens_has_a_derivative_too(tokens, fresh_subject):
    table = measure("laws", options_of("laws", law="score_biases", tokens=tokens), [fresh_subject(0)])
    assert CLAIMS["law_score_biases"].measure(table) < 1e-12


@pytest.mark.parametrize(("law", "width", "said"), [("position_bias", 3, "from 4"), ("looped_end", 6, "multiple of 4")])
def test_a_width_that_the_heads_of_a_law_do_not_have_is_refused(law, width, said, fresh_subject):
    options = options_of("laws", law=law, tokens=4, layers=1, width=width)
    line = refusal(measure, "laws", options, [fresh_subject(0)])
    assert line.startswith(f"analysis.laws.width={width}: law={law} has 4 heads; use a ") and line.endswith(said)


def law_of(*points):
    """A law with one curve, the identity at 1 and 2, and these measurements."""
    return Law({}, lambda: (("a", x, x) for x in (1, 2)), "x", "value", simulated=lambda generator: iter(points))


@pytest.mark.parametrize(("point", "measured"), [((2, 2.5), 0.5), ((2, math.nan), math.nan), ((3, 3), math.nan)])
def test_a_point_without_a_number_or_a_form_is_no_agreement(monkeypatch, fresh_subject, point, measured):
    points = [(1, 1.0), (2, 2.0), point]
    monkeypatch.setitem(LAWS, "own", law_of(*(("claimed", "a", *each) for each in points)))
    claim = agrees("own", line=0.1, statement="", source="", control="")
    table = measure("laws", options_of("laws", law="own"), [fresh_subject(0)])
    assert claim.measure(table) == pytest.approx(measured, nan_ok=True)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([("a", 1, 1.0)], "analysis.laws.law=own: not enough values to unpack (expected 4, got 3); predicted yields ("),
        ([("claimed", "a", "one", 1.0)], "analysis.laws.law=own: could not convert string to float: 'one'"),
        ([("claimd", "a", 1, 1.0)], "own: setup=claimd: unknown, did you mean claimed?; allowed are claimed, control"),
    ],
)
def test_points_of_a_plugins_law_that_are_none_are_one_line(monkeypatch, fresh_subject, points, said):
    monkeypatch.setitem(LAWS, "own", law_of(*points))
    monkeypatch.setattr(plugins, "brought", lambda kind: ["own"])
    monkeypatch.setattr(plugins, "frames_of_user", lambda error: [])  # this file is no plug-in
    assert refusal(measure, "laws", options_of("laws", law="own"), [fresh_subject(0)]).startswith(said)
    assert refusal(replace, law_of(), sizes={"token": 3}).startswith("sizes=token: unknown, did you mean tokens?")
    assert refusal(replace, law_of(), simulated=None).startswith("simulated and network are both None")


@pytest.mark.parametrize("name", some(LAWS, 3))
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


def test_norms_lower_the_ranks_of_the_smallest_examples():
    """Tokens v and 2 v, and the identity, of which LayerNorm makes [[1, -1], [-1, 1]]."""
    v = torch.tensor([[3.0, 4.0, 0.0]]).double()
    ray, identity = torch.cat([v, 2 * v]), torch.eye(2).double()
    for kind, left in (("rmsnorm", 2), ("layernorm", 1)):
        of = {}
        for width in (2, 3):
            of[width] = Norm(ModelConfig(width=width, norm_kind=kind), affine=False)
            of[width].epsilon = 0.0
        assert norm_ranks.rank(ray[1:] - ray[:1]) == 1 and norm_ranks.rank(of[3](ray)[1:] - of[3](ray)[:1]) == 0
        assert norm_ranks.rank(identity) == 2 and norm_ranks.rank(of[2](identity)) == left
    np.testing.assert_allclose(of[2](identity), [[1, -1], [-1, 1]], atol=1e-15)

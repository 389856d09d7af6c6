"""Laws of newer theory, as tests on the table `laws`: what is measured agrees with the closed form.

A law's measure is the largest deviation of one seed over all parameters and x. Its line is a tolerance with a reason.
In its control the measurements of the control set-up are compared with the same closed form, and must be farther off.
"""

from functools import partial

import pandas as pd

from rankbench.claims.claim import Claim, Control, below, has_row

FORM = "closed form"


def _deviation(rows: pd.DataFrame, law: str, relative: bool) -> float:
    """Largest distance of a law's measurements from its closed form, relative to the form or absolute."""
    claimed = rows[(rows.law == law) & (rows.setup == "claimed")]
    forms = claimed[claimed.curve == FORM].set_index(["parameter", "x"]).value
    measured = claimed[claimed.curve != FORM].set_index(["parameter", "x"]).value
    forms = forms.reindex(measured.index)
    off = (measured - forms).abs()
    return (off / forms.abs() if relative else off).max()


def _measured_in_control(rows: pd.DataFrame) -> pd.DataFrame:
    kept = rows[(rows.curve == FORM) | (rows.setup == "control")]
    return kept.assign(setup="claimed")


def _agrees(
    law: str, line: float, statement: str, source: str, control: str, relative: bool = False, exact: bool = False
) -> Claim:
    """Claim that a law's measurements agree with its closed form within the line. exact: it is a check, without
    chance."""
    return Claim(
        statement=f"{statement} ({'relative ' if relative else ''}distance from the closed form, the largest).",
        source=source,
        table="laws",
        measure=partial(_deviation, law=law, relative=relative),
        claimed=below(line),
        scale="positive",
        why_untrained=None,
        is_check=exact,
        exact=exact,
        applies=partial(has_row, law=law),
        control=Control(control, _measured_in_control),
    )


CHEN = "Chen, Lin, Polyanskiy and Rigollet 2026, Critical attention scaling in long-context transformers"
KARAGODIN = "Karagodin, Ge, Polyanskiy and Rigollet 2025, Normalization in attention dynamics"

LAWS: dict[str, Claim] = {
    # the line: twice 1/sqrt(256), by which products of one network's tokens err; it can grow where cosines do. Above
    # the critical beta, where few scores decide, the mean over 4 networks errs by as much
    "law_signal_propagation": _agrees(
        law="signal_propagation",
        line=0.12,
        statement="The cosine of two tokens in a fresh Transformer follows the map of (q, p): to 1 with post-norm, "
        "more slowly with pre-norm, and hardly away from its start with centred attention; above the critical beta the "
        "more slowly the larger beta is",
        source="Giorlandino and Goldt 2025, Two failure modes of deep transformers; mean for n tokens derived here",
        control="values that are the identity in place of random ones",
    ),
    # the line: four standard deviations of a share of 400 pairs
    "law_antipodal": _agrees(
        law="antipodal",
        line=0.1,
        statement="With random values that are new in each layer two tokens end antipodal with the probability of the "
        "diffusion: 0 where cosh(2 beta) <= d - 2, up to a half above. Such tokens have rank one, and are all residual",
        source="Fedorov et al. 2026, Clustering in deep stochastic transformers; closed form derived here",
        control="values that are the identity in place of random ones",
    ),
    # the line: below .048, the cosine that is left of 1 at a = 1/sqrt(12); the mean over 16 networks errs by .02
    "law_residual_scale": _agrees(
        law="residual_scale",
        line=0.04,
        statement="With skips, uniform attention and random values, the cosine of two tokens after L layers is (g - "
        "1)/(n + g - 1), g = (1 + a^2)^L, for branches scaled by a",
        source="Noci et al. 2022, Signal propagation in transformers; closed form derived here",
        control="values that are the identity in place of random ones",
    ),
    # the line: rounding of a random 8 x 8 system that is solved, with a condition of up to 1e5
    "law_cesaro": _agrees(
        law="cesaro",
        line=1e-9,
        statement="Causal uniform attention is a Hausdorff matrix with any skip: the first token's weight in token n "
        "is sum_k (-1)^k binom(n-1, k) (1 - a + a/(k+1))^t after t layers",
        source="Hausdorff 1921; derived here",
        control="attention without a mask",
        exact=True,
    ),
    # the line: the random error of 16 networks of 4 heads, .02 to .03, and what norms and tokens that become alike add
    "law_position_bias": _agrees(
        law="position_bias",
        line=0.1,
        statement="Causal attention with random queries and keys leads to the first token as uniform causal attention "
        "does: its weight in the last token grows with depth to 1, and with a skip more slowly",
        source="Wu et al. 2025, On the emergence of position bias in transformers; closed form derived here",
        control="attention without a mask",
    ),
    # the line: how far tokens still move after 600 layers at ratios next to a threshold, where they part most slowly
    "law_layernorm_rank": _agrees(
        law="layernorm_rank",
        line=1e-3,
        statement="With some value matrices, and tokens that begin in fewer directions the earlier they stand, "
        "attention alone with a norm keeps tokens apart: any number of them is a direction of its own, by the ratio of "
        "the values",
        source="Wu et al. 2024, On the role of attention masks and LayerNorm in transformers; example derived here",
        control="values that are the identity",
    ),
    # the line: twice the random error of one network, whose early layers err by sqrt(2/128) of themselves
    "law_depth_curse": _agrees(
        law="depth_curse",
        line=0.25,
        statement="The variance of a fresh pre-norm network grows as 1 + 2 sum of s_l^2: linearly, and with LayerNorm "
        "scaling, s_l = 1/sqrt(l), logarithmically",
        source="Sun et al. 2025, The curse of depth in large language models; closed form derived here",
        control="norms behind the branches in place of before them",
        relative=True,
    ),
    # the line: products of random tokens err by 1/sqrt(4096) = .016, which the mean over pairs reduces
    "law_long_context": _agrees(
        law="long_context",
        line=0.02,
        statement="Attention with beta = gamma log n has a critical gamma, 1/(1-rho): below it outputs become alike, "
        "above it they stay as they were, and for n tokens the cosine is the closed form's",
        source=CHEN,
        control="beta = gamma, which does not grow with the number of tokens",
    ),
    # the line: beta times the products' error, 1/sqrt(1024), moves the weights by up to a tenth where they are a half
    "law_long_context_gradient": _agrees(
        law="long_context_gradient",
        line=0.1,
        statement="With beta = gamma log n gradients vanish for gamma below the critical one and are those of the norm "
        "above it; for n tokens they are the closed form's",
        source=CHEN,
        control="beta = gamma, which does not grow with the number of tokens",
    ),
    # the line: the descent ends where its steps turn in place, at rounding
    "law_entropy_bound": _agrees(
        law="entropy_bound",
        line=1e-9,
        statement="Among scores of norm sigma the least entropy that a search finds is the bound of the theorem",
        source="Zhai et al. 2023, Theorem 3.1",
        control="scores whose largest entry, not whose norm, is sigma",
        relative=True,
        exact=True,
    ),
    # the line: among 400 x 400 log-normal weights the largest still lift sigma_2, at sigma = 1 by .15
    "law_spectral_gap": _agrees(
        law="spectral_gap",
        line=0.3,
        statement="The second singular value and eigenvalue of random attention fall as 2 s/sqrt(n) and s/sqrt(n), s "
        "the relative standard deviation of the weights",
        source="Nait Saada et al. 2025, Mind the gap; Bordenave et al. 2012",
        control="scores of the same variance and of rank one",
        relative=True,
    ),
    # the line: the midpoint rule errs by 4e-4 in 20 steps, and second-order terms of the disturbance are far smaller
    "law_metastable": _agrees(
        law="metastable",
        line=0.005,
        statement="Modes of tokens on the circle grow at rates in proportion to k^2 I_k(beta), and so the one of the "
        "metastable clusters, k*, grows fastest",
        source="Bruno, Pasqualotto and Agazzi 2025, Emergence of meta-stable clustering in mean-field transformers",
        control="tokens that repel",
    ),
    # the line: runs scatter by one around k*, the mode that grows fastest, because its neighbours grow nearly as fast
    "law_plateau": _agrees(
        law="plateau",
        line=2.0,
        statement="Random tokens on the circle stay longest in k* = argmax k^2 I_k(beta) clusters, give or take two",
        source="Bruno, Pasqualotto and Agazzi 2025, Emergence of meta-stable clustering in mean-field transformers",
        control="tokens that repel",
    ),
    # the line: at the first late time, 100, the length of a pre-norm state differs from t by the time until tokens met,
    # which is a few
    "law_norm_placement": _agrees(
        law="norm_placement",
        line=0.05,
        statement="Tokens become one cluster at the rates exp(-2 t) with post-norm and nGPT, t^-2 with pre-norm and "
        "peri-norm, and exp(-4 sqrt(t)) with branches over sqrt(t)",
        source=KARAGODIN,
        control="tokens that attend to themselves alone",
        relative=True,
    ),
    # the line: two steps of 6/480, because Euler's rule errs by the order of a step at speeds of about 1
    "law_meeting": _agrees(
        law="meeting",
        line=0.025,
        statement="The cosine of orthonormal tokens grows with time as one differential equation for each place of the "
        "norm has it: fastest with nGPT, and slowest with pre-norm",
        source=KARAGODIN,
        control="tokens that attend to themselves alone",
    ),
    # the line: second-order terms of a step of 1e-6, and rounding over that step, are below 1e-5
    "law_first_speed": _agrees(
        law="first_speed",
        line=1e-4,
        statement="The cosine of orthonormal tokens begins to grow at 2/(exp(beta) + n - 1) with post-norm and "
        "pre-norm, and at 2/sqrt(exp(2 beta) + n - 1) with peri-norm and nGPT",
        source=KARAGODIN,
        control="tokens that attend to themselves alone",
        relative=True,
        exact=True,
    ),
    # the line: the norm of 400 x 400 random entries is below its limit by 400^(-2/3) of it, .02, and scatters as much
    "law_power_iteration": _agrees(
        law="power_iteration",
        line=0.03,
        statement="Power iteration underestimates a spectral norm: of a random square matrix it gives sqrt((4k + 1)/"
        "(4k + 4)) after k iterations, .935 after five",
        source="Kim et al. 2021, app. B; closed form derived here",
        control="matrices with one singular value far above the others",
    ),
    # the line: rounding of a sum of squares of up to 1e6
    "law_score_biases": _agrees(
        law="score_biases",
        line=1e-9,
        statement="Biases of queries and keys do not help: the derivative of a token where x W_Q + b_Q = 0 has the "
        "variance of the tokens, which nothing bounds",
        source="Kim et al. 2021, app. D; closed form derived here",
        control="the same inputs without biases",
        relative=True,
        exact=True,
    ),
}

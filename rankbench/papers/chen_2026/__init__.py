"""Critical scaling of attention over long contexts (Chen, Lin, Polyanskiy and Rigollet, ICLR 2026).

Scores beta <x_i, x_j> with beta = gamma log n, for n unit tokens of pairwise inner product rho. A token gives itself
the weight w = 1 / (1 + (n-1) n^(-gamma (1-rho))) and each other token q = (1-w)/(n-1). With x_i = sqrt(rho) u +
sqrt(1-rho) e_i, e_i orthonormal, the outputs have the cosine below, derived here; its limits are the source's: 1 for
gamma below 1/(1-rho), 4 rho/(1 + 3 rho) at it, rho above.

For n states x_i in d dimensions, of squared length Q and normed before the attention, |J|_F^2/(n d) is derived here
too, with J the Jacobian of all outputs with respect to all states (law `long_context_gradient`). Its limits for d >= n
are the source's: 0 below the critical gamma, (1 - 1/d)/(4 Q) at it, and (1 - 1/d)/Q above. Here Q = 1.

Control: beta = gamma, which does not grow with log n. Then every gamma here gives nearly the average of all tokens.

Shapes: N token, D width.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rankbench.judging.of_laws import agrees
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted

RHO = 0.5
GAMMAS = [number / 4 for number in range(2, 17)]  # 1/(1-rho) = 2, the critical one, is in the middle


def output_cosine(tokens: int, gamma: float, rho: float = RHO) -> float:
    """Cosine of two tokens' outputs, among this many tokens."""
    own = 1 / (1 + (tokens - 1) * tokens ** (-gamma * (1 - rho)))
    other = (1 - own) / (tokens - 1)
    product = rho + (1 - rho) * (2 * own * other + (tokens - 2) * other**2)
    return product / (rho + (1 - rho) * (own**2 + (tokens - 1) * other**2))


def limit(gamma: float) -> float:
    """The cosine for infinitely many tokens."""
    if gamma == 1 / (1 - RHO):
        return 4 * RHO / (1 + 3 * RHO)
    return 1.0 if gamma < 1 / (1 - RHO) else RHO


def gradient_norm(tokens: int, width: int, gamma: float, rho: float = RHO) -> float:
    """|J|_F^2/(n d) for this many tokens of this width and Q = 1.

    d y_i/d x_k = B_ik (1 - x_k x_k^T), with m = y_i: B_ii = P_ii 1 + beta Cov_i, up to a term that the projection
    removes, and B_ik = P_ik (1 + beta (x_k - m) x_i^T).
    """
    n, beta = tokens, gamma * math.log(tokens)
    w = 1 / (1 + (n - 1) * tokens ** (-gamma * (1 - rho)))
    o = (1 - w) / (n - 1)
    s = w + (1 - w) * rho  # <x_i, m>
    r = w * rho + o + (n - 2) * o * rho  # <x_k, m>
    mean = w * s + (1 - w) * r  # |m|^2
    along = rho - s - rho * (1 - r)  # <x_i, (1 - x_k x_k^T) (x_k - m)>
    of_other = o**2 * (width - 1 + 2 * beta * along + beta**2 * (1 - 2 * r + mean) * (1 - rho**2))
    trace = 1 - mean - (w + (1 - w) * rho**2 - s**2)  # of Cov_i (1 - x_i x_i^T)
    products = w**2 + 2 * w * (1 - w) * rho**2 + o**2 * (n - 1) * (1 + (n - 2) * rho**2)
    squared = products - 2 * (w * s**2 + (1 - w) * r**2) + mean**2  # |Cov_i|_F^2
    a, b = w * (1 - s), o * (rho - s)  # Cov_i x_i = a x_i + b sum of the others
    image = a**2 + 2 * a * b * (n - 1) * rho + b**2 * (n - 1) * (1 + (n - 2) * rho)
    of_own = w**2 * (width - 1) + 2 * w * beta * trace + beta**2 * (squared - image)
    return (of_own + (n - 1) * of_other) / width


def gradient_limit(gamma: float, width: int) -> float:
    """The same for infinitely many tokens."""
    critical = 1 / (1 - RHO)
    return 0.0 if gamma < critical else (1 - 1 / width) / (4 if gamma == critical else 1)


def predicted_gradient(tokens: int, width: int, **_: int) -> Predicted:
    """|J|_F^2/(n d) by gamma, for this many tokens and in the limit."""
    for gamma in GAMMAS:
        yield f"n = {tokens}", gamma, gradient_norm(tokens, width, gamma)
        yield "n to infinity", gamma, gradient_limit(gamma, width)


def predicted(tokens: int, **_: int) -> Predicted:
    """The cosine by gamma, for this many tokens and in the limit."""
    for gamma in GAMMAS:
        yield f"n = {tokens}", gamma, output_cosine(tokens, gamma)
        yield "n to infinity", gamma, limit(gamma)


def simulated(generator: torch.Generator, tokens: int, width: int) -> Measured:
    """The same for random tokens, whose pairwise products are rho up to 1/sqrt(width)."""
    x_ND = _tokens(generator, tokens, width)
    gram_NN = x_ND @ x_ND.T
    for setup, gamma, beta in _betas(tokens):
        yield setup, f"n = {tokens}", gamma, _mean_cosine((beta * gram_NN).softmax(1), gram_NN)


def simulated_gradient(generator: torch.Generator, tokens: int, width: int, samples: int) -> Measured:
    """|J|_F^2/(n d) for random tokens, as the mean of |J^T v|^2 over `samples` random v of variance 1/(n d)."""
    x_ND = _tokens(generator, tokens, width)
    for setup, gamma, beta in _betas(tokens):

        def attended(x_ND: Tensor, beta: float = beta) -> Tensor:
            u_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
            return (beta * u_ND @ u_ND.T).softmax(1) @ u_ND

        _, pulled_back, *_ = torch.func.vjp(attended, x_ND)
        squares = []
        for _ in range(samples):
            v_ND = torch.randn(tokens, width, dtype=torch.float64, generator=generator) / math.sqrt(tokens * width)
            squares.append(pulled_back(v_ND)[0].square().sum().item())
        yield setup, f"n = {tokens}", gamma, sum(squares) / samples


def _betas(tokens: int) -> Iterator[tuple[str, float, float]]:
    """Set-up, gamma and beta of each measurement."""
    for gamma in GAMMAS:
        yield CLAIMED, gamma, gamma * math.log(tokens)
        yield CONTROL, gamma, gamma


def _tokens(generator: torch.Generator, tokens: int, width: int) -> Tensor:
    """Random unit tokens whose pairwise products are RHO up to 1/sqrt(width)."""
    noise_ND = torch.randn(tokens + 1, width, dtype=torch.float64, generator=generator)
    unit_ND = noise_ND / noise_ND.norm(dim=1, keepdim=True)
    x_ND = math.sqrt(RHO) * unit_ND[0] + math.sqrt(1 - RHO) * unit_ND[1:]
    return x_ND / x_ND.norm(dim=1, keepdim=True)


def _mean_cosine(p_NN: Tensor, gram_NN: Tensor) -> float:
    """Mean cosine of two different outputs P X, from X X^T."""
    lengths_N = ((p_NN @ gram_NN) * p_NN).sum(1).sqrt()
    sum_N = (1 / lengths_N) @ p_NN  # the sum of the outputs' directions, in terms of the tokens
    tokens = len(p_NN)
    return ((sum_N @ gram_NN @ sum_N - tokens) / (tokens * (tokens - 1))).item()


PAPERS = {"Chen, Lin, Polyanskiy and Rigollet 2026": "Critical attention scaling in long-context transformers"}
LAWS = {
    "long_context": Law(
        sizes={"tokens": 100, "width": 4096},
        predicted=predicted,
        simulated=simulated,
        x_label="gamma (beta = gamma log n)",
        value_label="cosine of two outputs",
    ),
    "long_context_gradient": Law(
        sizes={"tokens": 100, "width": 1024, "samples": 4},
        predicted=predicted_gradient,
        simulated=simulated_gradient,
        x_label="gamma (beta = gamma log n)",
        value_label="squared Jacobian, per entry",
    ),
}
CHEN = "Chen, Lin, Polyanskiy and Rigollet 2026, Critical attention scaling in long-context transformers"
CLAIMS = {
    # threshold: products of random tokens err by 1/sqrt(4096) = .016, which the mean over pairs reduces
    "law_long_context": agrees(
        law="long_context",
        line=0.02,
        statement="Attention with beta = gamma log n has a critical gamma, 1/(1-rho): below it outputs become alike, "
        "above it they stay as they were, and for n tokens the cosine is the closed form's",
        source=CHEN,
        control="beta = gamma, which does not grow with the number of tokens",
    ),
    # threshold: beta times the products' error, 1/sqrt(1024), moves the weights by up to a tenth where they are a half
    "law_long_context_gradient": agrees(
        law="long_context_gradient",
        line=0.1,
        statement="With beta = gamma log n gradients vanish for gamma below the critical one and are those of the norm "
        "above it; for n tokens they are the closed form's",
        source=CHEN,
        control="beta = gamma, which does not grow with the number of tokens",
    ),
}

"""How attention computes its weights P from queries and keys: one object for each kind, in ATTENTIONS.

A new kind is an instance, here or in a plug-in; the rest of the package asks for its properties, not for its name.

Shapes: B batch, N query token, M key token, D width, H head, K head width, E width of a factor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from rankbench.config.keys import ConfigError
from rankbench.model.linear import HeadMaps
from rankbench.seeds import random_bits, state_of, streams_of

SHORT_ROW = 32
COSINE_EPSILON = 1e-6  # added to squared lengths: the cosine's Lipschitz constant grows as COSINE_EPSILON^(-1/2)
LAMBDA_DEVIATION = 0.1  # of the initial vectors of differential attention, as in its authors' code

# Result of a score function: q' (B, H, N, E), k' (B, H, M, E) and c, for scores c q' k'^T, (B, H, N, M).
Factors = tuple[Tensor, Tensor, float]


class HeadsOfLayer(Protocol):
    """The part of model.attention.Heads that a weighting sees."""

    head_width: int
    temperature: float
    layer: int  # from 1
    own: nn.ParameterDict  # the parameters that the weighting asked for

    def factors(self, q_BHNK: Tensor, k_BHMK: Tensor) -> Factors:
        """The scores of a softmax as a product, before the temperature."""

    def score_bias(self, q_BHNK: Tensor) -> Tensor | None:
        """Term that is added to the product of the factors."""


class Start(NamedTuple):
    """A parameter of a weighting: its shape, and the function that draws its first value in place."""

    shape: tuple[int, ...]
    draw: Callable[[Tensor, torch.Generator], object]


@dataclass(frozen=True)
class Weighting:
    """How attention computes its weights. A subclass defines `weights` and overrides what else differs.

    stochastic: whether every row of P holds probabilities. fusible: whether torch's fused kernel computes it. by_head:
    whether a head's P depends on the queries and keys of that head alone, so that a path through it can be run as a
    network of its own.
    """

    stochastic: bool = True
    fusible: bool = False
    by_head: bool = True

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None, heads: HeadsOfLayer) -> Tensor:
        """P, (B, H, N, M), zero where a query does not see the key.

        seen_NM: bool, with absent tokens (B, 1, N or 1, M); None: all are seen. (P, B), P paths, can replace (B, H).
        """
        raise NotImplementedError

    def factors(self, q_BHNK: Tensor, k_BHMK: Tensor, /) -> Factors:
        """Of a softmax: the scores as a product, before the temperature."""
        raise NotImplementedError

    def gate(self, q_BHNK: Tensor, heads: HeadsOfLayer) -> Tensor | None:
        """Factor of each query's output P v, (B, H, N); None for 1. It is no part of P. (P, B) can replace (B, H)."""
        return None

    def parameters(self, heads: HeadsOfLayer) -> dict[str, Start]:
        """The parameters of a layer besides those of its maps, by their names in heads.own."""
        return {}

    def qk_maps(self, maps: HeadMaps, heads: HeadsOfLayer) -> dict[str, tuple[Tensor, Tensor]]:
        """W_QK of each head by name, each as (left, right) with the matrix left right^T, both (H, D, K): the bilinear
        form of the scores, d^2 score_ij / d x_i d x_j."""
        return {"qk": (maps.w_q_HDK * (heads.head_width**-0.5 / heads.temperature), maps.w_k_HDK)}


def dot_scores(q_BHNK: Tensor, k_BHMK: Tensor) -> Factors:
    """Scaled dot products q k^T / sqrt(K). Vaswani et al. 2017, eq. 1."""
    return q_BHNK, k_BHMK, q_BHNK.shape[-1] ** -0.5


def l2_scores(q_BHNK: Tensor, k_BHMK: Tensor) -> Factors:
    """-||q_i - k_j||^2 / sqrt(K) without ||q_i||^2, which cancels in the softmax: (2 q_i k_j - ||k_j||^2) / sqrt(K).

    An extra column, 1 in q' and -||k_j||^2 / 2 in k', makes it a dot product. Kim et al. 2021, eq. 10 and 16, where K =
    D/H. For other head widths K sets the scale, as in the dot product. In bfloat16 this number is split over two
    columns: the part that bfloat16's three digits hold, and the rest.
    """
    if k_BHMK.dtype == torch.bfloat16:
        half_BHM1 = -0.5 * k_BHMK.float().square().sum(-1, keepdim=True)
        columns = [half_BHM1.bfloat16(), (half_BHM1 - half_BHM1.bfloat16()).bfloat16()]
    else:
        columns = [-0.5 * k_BHMK.square().sum(-1, keepdim=True)]
    with_ones = F.pad(q_BHNK, (0, len(columns)), value=1.0)
    return with_ones, torch.cat([k_BHMK, *columns], -1), 2 * q_BHNK.shape[-1] ** -0.5


def cosine_scores(q_BHNK: Tensor, k_BHMK: Tensor) -> Factors:
    """Cosine similarity of q_i and k_j. Qi et al. 2023 (LipsFormer); their tau is 1 / temperature."""
    return q_BHNK * inverse_length(q_BHNK), k_BHMK * inverse_length(k_BHMK), 1.0


def inverse_length(x: Tensor) -> Tensor:
    """1 / sqrt(||x||^2 + epsilon) over the last axis, which is kept with length 1."""
    return (x.square().sum(-1, keepdim=True) + COSINE_EPSILON).rsqrt()


def softmax_of_rows(scores: Tensor) -> Tensor:
    """Softmax over the last axis, written out for short rows on a CPU.

    torch's kernel processes rows one by one there and takes five times as long for rows of 8. A mode that watches
    torch's functions, as the tape does, sees one call of this function, and so knows from what the weights were made.
    """
    if scores.device.type != "cpu" or scores.shape[-1] > SHORT_ROW:
        return scores.softmax(-1)
    if has_torch_function_unary(scores):
        return handle_torch_function(softmax_of_rows, (scores,), scores)
    powers = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def as_weights(p_BHNM: Tensor) -> Tensor:
    """Return P. This call tells a mode that watches torch's functions that P holds attention weights."""
    if has_torch_function_unary(p_BHNM):
        return handle_torch_function(as_weights, (p_BHNM,), p_BHNM)
    return p_BHNM


def dot_products(q_BHNK: Tensor, k_BHMK: Tensor, temperature: float) -> Tensor:
    """q k^T / (sqrt(K) temperature), (B, H, N, M)."""
    return (q_BHNK * (q_BHNK.shape[-1] ** -0.5 / temperature)) @ k_BHMK.mT


def number_of_keys(k_BHMK: Tensor, seen_NM: Tensor | None) -> int | Tensor:
    """How many keys each query sees: a number, or (..., N or 1, 1)."""
    return k_BHMK.shape[-2] if seen_NM is None else seen_NM.sum(-1, keepdim=True)


def hidden_as(value: float, x_BHNM: Tensor, seen_NM: Tensor | None) -> Tensor:
    """X with this value where a query does not see the key."""
    return x_BHNM if seen_NM is None else x_BHNM.masked_fill(~seen_NM, value)


@dataclass(frozen=True)
class Softmax(Weighting):
    """The softmax over the keys of scores that are a product of two factors, plus heads.score_bias."""

    factors: Callable[[Tensor, Tensor], Factors] = dot_scores
    fusible: bool = True

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None, heads: HeadsOfLayer) -> Tensor:
        q_BHNE, k_BHME, scale = heads.factors(q_BHNK, k_BHMK)
        scores_BHNM = (q_BHNE * (scale / heads.temperature)) @ k_BHME.transpose(-2, -1)
        if (bias_BHNM := heads.score_bias(q_BHNK)) is not None:
            scores_BHNM = scores_BHNM + bias_BHNM
        return softmax_of_rows(hidden_as(-math.inf, scores_BHNM, seen_NM))

    def qk_maps(self, maps: HeadMaps, heads: HeadsOfLayer) -> dict[str, tuple[Tensor, Tensor]]:
        """As in Weighting; for L2, twice that of dot products. Cosine scores are not a bilinear form, so theirs is that
        of the scores times the lengths of query and key."""
        one_token = torch.zeros(1, 1, 1, heads.head_width)
        return {"qk": (maps.w_q_HDK * (heads.factors(one_token, one_token)[2] / heads.temperature), maps.w_k_HDK)}


@dataclass(frozen=True)
class Gated(Softmax):
    """The softmax of dot products, and after P v a gate sigma(w q) of each query and head.

    Qiu et al. 2025, Gated attention, where each head has a map of its own from the state to its gate; here the heads of
    a layer share w, a vector, because the query is the head's own already. w begins at 0, and so all gates at a half.
    """

    def gate(self, q_BHNK: Tensor, heads: HeadsOfLayer) -> Tensor:
        return (q_BHNK @ heads.own["gate"]).sigmoid()

    def parameters(self, heads: HeadsOfLayer) -> dict[str, Start]:
        return {"gate": Start((heads.head_width,), lambda w_K, generator: w_K.zero_())}


@dataclass(frozen=True)
class Sigmoid(Weighting):
    """sigmoid(s_ij - log n_i) of dot products s, n_i the number of keys that query i sees.

    Ramapuram et al. 2024, Theory, analysis and best practices for sigmoid self-attention; there n is the length of the
    sequence, which is n_i without a mask.
    """

    stochastic: bool = False

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None, heads: HeadsOfLayer) -> Tensor:
        scores_BHNM = dot_products(q_BHNK, k_BHMK, heads.temperature)
        number = number_of_keys(k_BHMK, seen_NM)
        bias = math.log(number) if isinstance(number, int) else number.to(scores_BHNM.dtype).log()
        return hidden_as(0.0, (scores_BHNM - bias).sigmoid(), seen_NM)


@dataclass(frozen=True)
class Relu(Weighting):
    """max(s_ij, 0) / n_i of dot products s, n_i the number of keys that query i sees.

    Wortsman et al. 2023, Replacing softmax with ReLU in vision transformers; n as in Sigmoid.
    """

    stochastic: bool = False

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None, heads: HeadsOfLayer) -> Tensor:
        scores_BHNM = dot_products(q_BHNK, k_BHMK, heads.temperature)
        return hidden_as(0.0, scores_BHNM.relu() / number_of_keys(k_BHMK, seen_NM), seen_NM)


@dataclass(frozen=True)
class Differential(Weighting):
    """softmax(s) - lambda softmax(s'), s of the first halves of queries and keys, s' of the second halves.

    lambda = exp(a b) - exp(a' b') + lambda_0 with vectors a, b, a', b' that the heads of a layer share, and lambda_0 =
    .8 - .6 exp(-.3 (layer - 1)): Ye et al. 2024, Differential Transformer, eq. 1 to 3. Each row sums to 1 - lambda. The
    paper also norms each head's output, which is not part of P and which rankbench leaves out.
    """

    stochastic: bool = False

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None, heads: HeadsOfLayer) -> Tensor:
        halves = zip(q_BHNK.chunk(2, -1), k_BHMK.chunk(2, -1), strict=True)
        scores = (dot_products(q_BHNE, k_BHME, heads.temperature) for q_BHNE, k_BHME in halves)
        first_BHNM, second_BHNM = (softmax_of_rows(hidden_as(-math.inf, s_BHNM, seen_NM)) for s_BHNM in scores)
        return first_BHNM - self.factor(heads) * second_BHNM

    def factor(self, heads: HeadsOfLayer) -> Tensor:
        """Weight lambda of the second softmax."""
        own = heads.own
        learned = (own["first_q"] * own["first_k"]).sum().exp() - (own["second_q"] * own["second_k"]).sum().exp()
        return learned + 0.8 - 0.6 * math.exp(-0.3 * (heads.layer - 1))

    def parameters(self, heads: HeadsOfLayer) -> dict[str, Start]:
        if heads.head_width % 2:
            raise ConfigError(
                f"model.head_width={heads.head_width}: model.attention=differential takes the two halves of queries "
                "and keys; use an even width"
            )

        def draw(vector: Tensor, generator: torch.Generator) -> None:
            vector.normal_(0, LAMBDA_DEVIATION, generator=generator)

        names = ("first_q", "first_k", "second_q", "second_k")
        return {name: Start((heads.head_width // 2,), draw) for name in names}

    def qk_maps(self, maps: HeadMaps, heads: HeadsOfLayer) -> dict[str, tuple[Tensor, Tensor]]:
        """W_QK of each head for each of the two softmaxes."""
        scale = (heads.head_width // 2) ** -0.5 / heads.temperature
        halves = zip(maps.w_q_HDK.chunk(2, -1), maps.w_k_HDK.chunk(2, -1), strict=True)
        return {f"qk_{name}": (q * scale, k) for name, (q, k) in zip(("first", "second"), halves, strict=True)}


@dataclass(frozen=True)
class Kernel(Weighting):
    """phi(q_i) phi(k_j)^T over its sum over the keys, phi(x) = elu(x) + 1, so that the rank of P is at most K.

    Katharopoulos et al. 2020, Transformers are RNNs, eq. 7. Nothing is divided by sqrt(K); the temperature divides
    queries and keys. The scores are not a bilinear form; `qk_maps` are those of dot products.
    """

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None, heads: HeadsOfLayer) -> Tensor:
        phi_BHNK, phi_BHMK = (_elu_plus_one(x / heads.temperature) for x in (q_BHNK, k_BHMK))
        products_BHNM = hidden_as(0.0, phi_BHNK @ phi_BHMK.mT, seen_NM)
        return products_BHNM / products_BHNM.sum(-1, keepdim=True)


def _elu_plus_one(x: Tensor) -> Tensor:
    return x.clamp(max=0).exp() + x.relu()  # elu(x) + 1 would round to 0 from -17 on


@dataclass(frozen=True)
class Sparse(Weighting):
    """The softmax of dot products over a random part of the keys: a query's own, and each other one with `share`.

    The parts are drawn once for each layer, for all heads, seeds and sequences alike. They depend on the two positions
    alone, so that a longer sequence adds keys and changes none. A query that sees no key of its part reads all that it
    sees. Random patterns as in Zaheer et al. 2020, Big Bird.
    """

    share: float = 0.25

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None, heads: HeadsOfLayer) -> Tensor:
        read_NM = self.part(heads.layer, q_BHNK.shape[-2], k_BHMK.shape[-2], q_BHNK.device)
        if seen_NM is not None:
            read_NM = read_NM & seen_NM
            read_NM = read_NM | (seen_NM & ~read_NM.any(-1, keepdim=True))
        return softmax_of_rows(hidden_as(-math.inf, dot_products(q_BHNK, k_BHMK, heads.temperature), read_NM))

    def part(self, layer: int, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """Whether a query sees a key, bool (N, M)."""
        stream_12 = streams_of([state_of(layer, "sparse")]).to(device, non_blocking=True)
        bits = random_bits(stream_12, max(queries, keys) ** 2)[0]
        n_N1, m_M = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
        # numbers pairs shell by shell: those of a shorter sequence are the first ones
        pair_NM = torch.where(n_N1 < m_M, m_M * m_M + n_N1, n_N1 * n_N1 + n_N1 + m_M)
        return (bits[pair_NM] < self.share * 2**32 - 2**31) | (n_N1 == m_M)


ATTENTIONS: dict[str, Weighting] = {
    "dot": Softmax(factors=dot_scores),
    "l2": Softmax(factors=l2_scores),
    "contractive_l2": Softmax(factors=l2_scores),
    "cosine": Softmax(factors=cosine_scores),
    "gated": Gated(),
    "sigmoid": Sigmoid(),
    "relu": Relu(),
    "differential": Differential(),
    "kernel": Kernel(),
    "sparse": Sparse(),
}

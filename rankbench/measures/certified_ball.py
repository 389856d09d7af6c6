"""A bound on Lip_2 of a whole network on a ball around one sequence, by telescoping its Jacobian. Rankbench's own.

Norms, scores, softmax, products P v and activations are the operations; all else is linear. If the Jacobian of one
operation after the other is replaced by the one at the centre x_0, the Jacobian at x of any value t in the network is

    J_t(x) = J_t(x_0) + sum_e S_et (J_e(x) - J_e(x_0)) G_e(x)

over the operations e before t: S_et is the derivative of t by e's output with the rest at the centre, G_e the Jacobian
of e's input. So with diagonal weights W_e, for all x with ||x - x_0||_F <= r,

    U_t(r) = ||J_t(x_0)|| + sum_e ||S_et W_e|| c_e(r),    c_e(r) >= ||W_e^-1 (J_e(x) - J_e(x_0)) G_e(x)||

bounds ||J_t(x)||_2, and integral_0^r U_t bounds how far t moves. The c_e are in rankbench.measures.jacobian_changes;
each follows from bounds on the inputs of e alone, in the order of the operations. As r goes to 0, the bound becomes the
norm of the exact Jacobian.

Shapes: N query token, M key token, D width, F hidden width of the MLP, H head, K head width, S number of a source: an
entry of the input, or of what an operation adds.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.measures.attention_layer import AttentionLayer
from rankbench.measures.jacobian_ascent import ascend_on_balls
from rankbench.measures.jacobian_changes import (
    EXTREMA_OF_SLOPE,
    SLOPES,
    Reach,
    activation_change,
    norm_change,
    product_change,
    softmax_change,
)
from rankbench.measures.lipschitz_of_networks import is_layer, layer_of
from rankbench.measures.sources import Value, Watched, diagonal, through, times, weighted_sum
from rankbench.model.mlp import MLP
from rankbench.model.network import Network
from rankbench.model.norm import Norm
from rankbench.model.sublayers import AnySublayer, MlpSublayer

MOST_NUMBERS, MOST_MEMORY = 1024, 16 * 2**30  # of a sequence's states: some GiB and minutes; bytes, for many tokens
RADII_PER_DECADE = 25  # of the sum that bounds the integral; with more the bounds fall by a few percent
LEAST_WEIGHT = 0.01  # of a block in W_e, over the largest: else a block of no slope could not be divided by
COPIES = 3  # of the largest table of derivatives, held at the same time


class Operation(NamedTuple):
    """name: layer, sub-layer and operation. change: c_e from the reaches of `watched`, in that order."""

    name: str
    watched: Sequence[Watched]
    change: Callable[..., Tensor]


class BallBound(NamedTuple):
    """The bound on the ball of this radius; the operation with the largest part of it, and that part's share."""

    radius: float
    bound: float
    operation: str
    share: float


class CertifiedBall:
    """The bound of one network around one sequence x_ND, for any number of radii."""

    def __init__(self, network: Network, x_ND: Tensor) -> None:
        check_covered(network, len(x_ND))
        self.operations: list[Operation] = []
        value = Value(x_ND, {0: torch.eye(x_ND.numel(), dtype=x_ND.dtype, device=x_ND.device).view(*x_ND.shape, -1)})
        for sublayer in network.sublayers:
            name = f"{sublayer.layer}.{sublayer.kind}"
            value = sublayer.apply(
                value,
                part=functools.partial(self._part, name, sublayer),
                norm=functools.partial(self._norm, f"{name}.norm", sublayer.norm),
                add=weighted_sum,
                branch_norm=functools.partial(self._norm, f"{name}.branch_norm", sublayer.branch_norm),
            )
        if network.last_norm is not None:
            value = self._norm("last_norm", network.last_norm, value)
        assert torch.allclose(value.centre, state_of(network, x_ND[None])[0], rtol=1e-8, atol=1e-8)  # the same function
        self.output = Watched.of(value, 0)

    def bounds(self, radii: Sequence[float]) -> list[BallBound]:
        """The bounds on balls of these radii; infinite from the radius on at which an operation's bound overflows."""
        found: dict[float, BallBound] = {}
        moves = [[torch.zeros_like(watched.at_centre) for watched in each.watched] for each in self.operations]
        before = 0.0
        for radius in _grid(radii):
            changes = self._changes(radius - before, moves)
            if not changes.isfinite().all():
                break
            before = radius
            parts = changes[self.output.sources] * self.output.norms
            bound, largest = parts.sum(), 1 + int(parts[1:].argmax())  # 0 is the centre
            operation = self.operations[self.output.sources[largest] - 1].name
            found[radius] = BallBound(radius, bound.item(), operation, (parts[largest] / bound).item())
        return [found.get(radius, BallBound(radius, math.inf, "", math.nan)) for radius in radii]

    def _changes(self, wider: float, moves: list[list[Tensor]]) -> Tensor:
        """1 and c_e of each operation, on a ball that is wider by this than the last. `moves` is brought up to date."""
        changes = self.output.norms.new_zeros(1 + len(self.operations))
        changes[0] = 1.0
        for number, (operation, moves_of_operation) in enumerate(zip(self.operations, moves, strict=True), 1):
            reaches = []
            for place, watched in enumerate(operation.watched):
                slope = watched.slope(changes)
                # the slope grows with the radius, so that its value here bounds it on the way
                moves_of_operation[place] = moves_of_operation[place] + wider * slope
                reaches.append(Reach(slope, moves_of_operation[place]))
            changes[number] = operation.change(*reaches)
        return changes

    def _operation(
        self, name: str, value: Value, watched: Sequence[Watched], change: Callable[..., Tensor], added: Tensor
    ) -> Value:
        """Enter an operation, whose output at the centre is `value`. added: its W_e, as derivatives of that output by
        the source that it is from now on, (..., S)."""
        self.operations.append(Operation(name, watched, change))
        return Value(value.centre, value.slopes | {len(self.operations): added})

    def _norm(self, name: str, norm: Norm | None, x: Value) -> Value:
        assert norm is not None  # as the place says
        if norm.kind == "layernorm":
            x = x.mapped(lambda x_ND: x_ND - x_ND.mean(1, keepdim=True))
        gain = 1.0 if norm.kind == "l2norm" else norm.width**0.5
        floor = gain * norm.epsilon**0.5
        length_N = x.centre.norm(dim=1)
        scale_N = gain / (length_N.square() + floor**2).sqrt()
        unit_ND = x.centre * (scale_N / gain)[:, None]
        direction_ND = x.centre / length_N.clamp(min=torch.finfo(length_N.dtype).tiny)[:, None]
        whole, tokens = Watched.of(x, 0), Watched.of(x, 1)
        along = Watched.of(x.mapped(lambda x_ND: torch.einsum("nd,nd...->n...", direction_ND, x_ND)), 1)
        weight_N = _weights(scale_N.square() * tokens.at_centre)

        def change(whole: Reach, tokens: Reach, along: Reach) -> Tensor:
            change_N = norm_change(length_N, floor, gain, tokens.move, along.move)
            return _of_blocks(change_N / weight_N, whole, tokens)

        def derivative(t_NDS: Tensor) -> Tensor:
            across_NDS = t_NDS - unit_ND[..., None] * torch.einsum("nd,nds->ns", unit_ND, t_NDS)[:, None]
            return scale_N[:, None, None] * across_NDS

        normed = Value(gain * unit_ND, {source: derivative(t_NDS) for source, t_NDS in x.slopes.items()})
        added = diagonal(weight_N[:, None].expand_as(unit_ND))
        normed = self._operation(name, normed, (whole, tokens, along), change, added)
        learned_D = unit_ND.new_tensor(norm.factor) if norm.weight is None else norm.factor * norm.weight
        shift = 0.0 if norm.shift is None else norm.factor * norm.shift
        return normed.mapped(lambda x_ND: times(learned_D.expand_as(unit_ND), x_ND), shift)

    def _part(self, name: str, sublayer: AnySublayer, x: Value) -> Value:
        if isinstance(sublayer, MlpSublayer):
            return self._mlp(f"{name}.activation", sublayer.part, x)
        layer = layer_of(sublayer.part, len(x.centre))
        assert layer is not None  # as check_covered says
        return self._attention(name, layer, x)

    def _mlp(self, name: str, mlp: MLP, x: Value) -> Value:
        z = through(mlp.up.weight, mlp.up.bias, x)
        whole, units = Watched.of(z, 0), Watched.of(z, 2)
        z_NF, activation = z.centre, mlp.activation_name
        slope_NF, weight_NF = SLOPES[activation](z_NF), torch.ones_like(z_NF)
        if activation != "relu":  # weights after the change on a small ball, which no kink makes jump
            weight_NF = _weights(activation_change(activation, z_NF, 0.01 * units.at_centre) * units.at_centre)

        def change(whole: Reach, units: Reach) -> Tensor:
            return _of_blocks(activation_change(activation, z_NF, units.move) / weight_NF, whole, units)

        hidden = Value(mlp.activation(z_NF), {source: times(slope_NF, t_NFS) for source, t_NFS in z.slopes.items()})
        hidden = self._operation(name, hidden, (whole, units), change, diagonal(weight_NF))
        return through(mlp.down.weight, mlp.down.bias, hidden)

    def _attention(self, name: str, layer: AttentionLayer, x: Value) -> Value:
        maps = layer.maps
        read = ((maps.w_q_HDK, maps.b_q_HK), (maps.w_k_HDK, maps.b_k_HK), (layer.read_HDK, maps.b_v_HK / layer.divisor))
        q, k, v = (
            x.mapped(functools.partial(torch.einsum, "hdk,nd...->hnk...", w_HDK), b_HK[:, None]) for w_HDK, b_HK in read
        )
        num_tokens = len(x.centre)
        seen_NM = layer.seen_NM
        if seen_NM is None:
            seen_NM = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=x.centre.device)
        scores = self._scores(name, layer, seen_NM, q, k)
        p = self._softmax(f"{name}.softmax", seen_NM, scores)
        mixed = self._mixing(f"{name}.mixing", p, v)
        return mixed.mapped(functools.partial(torch.einsum, "hkd,hnk...->nd...", maps.w_o_HKD), maps.b_o_D)

    def _scores(self, name: str, layer: AttentionLayer, seen_NM: Tensor, q: Value, k: Value) -> Value:
        factor = layer.slope / layer.scale
        queries, keys = Watched.of(q, 1), Watched.of(k, 1)
        weight_H = _weights(factor * queries.at_centre * keys.at_centre)

        def change(queries: Reach, keys: Reach) -> Tensor:
            return (factor * product_change(queries, keys) / weight_H).norm()

        def derivative(q_HNKS: Tensor, k_HMKS: Tensor) -> Tensor:
            of_queries_HNMS = torch.einsum("hnks,hmk->hnms", q_HNKS, k.centre)
            return factor * (of_queries_HNMS + torch.einsum("hnk,hmks->hnms", q.centre, k_HMKS)) * seen_NM[..., None]

        slopes = {source: derivative(q.slopes[source], k.slopes[source]) for source in q.slopes}
        weight_HNM = weight_H[:, None, None].expand(-1, *seen_NM.shape)
        scores = Value(factor * q.centre @ k.centre.mT, slopes)
        scores = self._operation(f"{name}.scores", scores, (queries, keys), change, diagonal(weight_HNM, seen_NM))
        return scores if layer.kind == "dot" else self._squared_keys(f"{name}.squared_keys", layer, seen_NM, k, scores)

    def _squared_keys(self, name: str, layer: AttentionLayer, seen_NM: Tensor, k: Value, scores: Value) -> Value:
        """The scores of l2 with the term -||k||^2 / s, the same for every query."""
        factor = layer.slope / layer.scale
        heads, tokens = Watched.of(k, 1), Watched.of(k, 2)
        weight_HM = _weights(factor * tokens.at_centre)

        def change(heads: Reach, tokens: Reach) -> Tensor:
            whole = Reach(heads.slope.norm(), heads.move)
            return _of_blocks(factor * tokens.move / weight_HM, whole, tokens)

        def with_keys(scores_HNMS: Tensor, k_HMKS: Tensor | None) -> Tensor:
            if k_HMKS is None:
                return scores_HNMS
            of_keys_HMS = factor * torch.einsum("hmk,hmks->hms", k.centre, k_HMKS)
            return scores_HNMS - of_keys_HMS[:, None] * seen_NM[..., None]

        slopes = {source: with_keys(t_HNMS, k.slopes.get(source)) for source, t_HNMS in scores.slopes.items()}
        centre_HNM = scores.centre - factor / 2 * k.centre.square().sum(-1)[:, None]
        added_HNMS = diagonal(weight_HM)[:, None] * seen_NM[..., None]
        return self._operation(name, Value(centre_HNM, slopes), (heads, tokens), change, added_HNMS)

    def _softmax(self, name: str, seen_NM: Tensor, scores: Value) -> Value:
        p_HNM = scores.centre.masked_fill(~seen_NM, -math.inf).softmax(-1)
        root_HNM = p_HNM.sqrt()

        def centred(t_HNMS: Tensor) -> Tensor:
            return t_HNMS - torch.einsum("hnm,hnms->hns", p_HNM, t_HNMS)[:, :, None]

        centred_scores = Value(p_HNM, {source: centred(t) for source, t in scores.slopes.items()})
        visible = Value(p_HNM, {source: t * seen_NM[..., None] for source, t in centred_scores.slopes.items()})
        rooted = Value(p_HNM, {source: times(root_HNM, t) for source, t in centred_scores.slopes.items()})
        entries, whole, rows = Watched.of(visible, 3), Watched.of(rooted, 0), Watched.of(rooted, 2)
        weight_HN = _weights(entries.at_centre.amax(-1))

        def change(entries: Reach, whole: Reach, rows: Reach) -> Tensor:
            factor_HN, change_HN = softmax_change(p_HNM, entries, rows)
            return torch.minimum((factor_HN / weight_HN).max() * whole.slope, (change_HN / weight_HN).norm())

        p = Value(p_HNM, {source: times(root_HNM, t) for source, t in rooted.slopes.items()})
        added = diagonal(weight_HN[..., None] * root_HNM, seen_NM)
        return self._operation(name, p, (entries, whole, rows), change, added)

    def _mixing(self, name: str, p: Value, v: Value) -> Value:
        tables, values = Watched.of(p, 1), Watched.of(v, 1)
        weight_H = _weights(tables.at_centre * values.at_centre)

        def change(tables: Reach, values: Reach) -> Tensor:
            return (product_change(tables, values) / weight_H).norm()

        slopes = {source: torch.einsum("hnms,hmk->hnks", t, v.centre) for source, t in p.slopes.items()}
        for source, v_HMKS in v.slopes.items():
            slopes[source] = slopes[source] + torch.einsum("hnm,hmks->hnks", p.centre, v_HMKS)
        mixed = Value(p.centre @ v.centre, slopes)
        weight_HNK = weight_H[:, None, None].expand_as(mixed.centre)
        return self._operation(name, mixed, (tables, values), change, diagonal(weight_HNK))


def on_balls(
    network: Network, states: Iterable[Tensor], radii: Sequence[float], theorem: float, generator: torch.Generator
) -> list[tuple[BallBound, float]]:
    """For each radius in increasing order, the largest bound over sequences x_ND, and the largest ||J||_2 found.

    theorem: another bound, which holds everywhere; where it is smaller it replaces the operation.
    """
    radii, by_sequence = sorted(radii), []
    for x_ND in states:
        found = ascend_on_balls(functools.partial(state_of, network), x_ND, radii, generator)
        by_sequence.append(zip(CertifiedBall(network, x_ND).bounds(radii), found, strict=True))
    largest = []
    for of_radius in zip(*by_sequence, strict=True):
        bound = max((bound for bound, _ in of_radius), key=lambda bound: bound.bound)
        bound = bound._replace(bound=theorem, operation="theorem", share=1.0) if theorem < bound.bound else bound
        largest.append((bound, max(norm for _, norm in of_radius)))
    return largest


def state_of(network: Network, x_BND: Tensor) -> Tensor:
    """Input of the read-out, from the embedded tokens."""
    return network.finish(through_sublayers(network.sublayers, x_BND))


def through_sublayers(sublayers: Iterable[AnySublayer], x_BND: Tensor) -> Tensor:
    """The tokens after these sub-layers."""
    return functools.reduce(lambda x_BND, sublayer: sublayer(x_BND), sublayers, x_BND)


def check_covered(network: Network, num_tokens: int) -> None:
    """Raise ConfigError for a part that has no such bound, and for too long or too wide a sequence."""
    for sublayer in network.sublayers:
        if isinstance(sublayer, MlpSublayer):
            covered = type(sublayer.part) is MLP and sublayer.part.activation_name in ("relu", *EXTREMA_OF_SLOPE)
            part = f"{type(sublayer.part).__name__} with {sublayer.part.activation_name}"
        else:
            covered = is_layer(sublayer.part)
            part = f"attention {sublayer.part.score_name} with its mixes and temperature"
        if not covered or sublayer.streams is not None:
            part = "several streams" if covered else part
            raise ConfigError(
                f"analysis.lipschitz.radii: layer {sublayer.layer} has {part}, which has no bound on a ball around "
                "data; covered are attention dot and l2, MLPs with relu or gelu, and one stream; use null"
            )
    if num_tokens * network.width > MOST_NUMBERS or memory(network, num_tokens) > MOST_MEMORY:
        raise ConfigError(
            f"analysis.lipschitz.radii: {num_tokens} tokens of width {network.width} would take about "
            f"{memory(network, num_tokens) / 2**30:.1f} GiB; allowed are {MOST_MEMORY // 2**30} GiB, and at most "
            f"{MOST_NUMBERS // network.width} tokens of this width; measure shorter sequences"
        )


def memory(network: Network, num_tokens: int) -> int:
    """Estimate of the memory that the derivatives by all sources take (bytes)."""
    state = num_tokens * network.width
    sources, most = state * (1 + (network.last_norm is not None)), state
    for sublayer in network.sublayers:
        sources += state * ((sublayer.norm is not None) + (sublayer.branch_norm is not None))
        if isinstance(sublayer, MlpSublayer):
            rows = num_tokens * len(sublayer.part.up.weight)
            sources += rows
        else:
            rows = sublayer.part.heads * num_tokens**2
            sources += 2 * rows + num_tokens * sublayer.part.heads * (sublayer.part.value_width + sublayer.part.is_l2)
        most = max(most, rows)
    return COPIES * 8 * most * sources


def _grid(radii: Sequence[float]) -> list[float]:
    """The radii and, up to the largest, all of a fixed grid from a tenth of the smallest on; increasing."""
    first, last = (math.floor(RADII_PER_DECADE * math.log10(radius)) for radius in (min(radii) / 10, max(radii)))
    grid = {10 ** (number / RADII_PER_DECADE) for number in range(first, last + 1)}
    return sorted({radius for radius in grid if radius < max(radii)} | set(radii))


def _of_blocks(ratios: Tensor, whole: Reach, blocks: Reach) -> Tensor:
    """Bound on ||diag(ratios) G||_2, one ratio a block: by the largest ratio, or block by block."""
    return torch.minimum(ratios.max() * whole.slope, (ratios * blocks.slope).norm())


def _weights(sizes: Tensor) -> Tensor:
    """Weights in proportion to sizes; no weight far below the largest, and all 1 if the sizes are 0."""
    largest = sizes.max()
    return sizes.clamp(min=LEAST_WEIGHT * largest.item()) if largest > 0 else torch.ones_like(sizes)

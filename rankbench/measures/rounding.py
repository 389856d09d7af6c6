"""The error that rounding leaves in the states of a forward pass, by Monte Carlo arithmetic (Parker 1997).

A residual means nothing if it is smaller than the rounding error of its tokens. The size of that error depends on all
operations before: on sums that cancel, norms that amplify an error, layers that carry it on. The network is therefore
run again, a few times, with random rounding: the result z of each floating-point operation becomes

    z + eps u s,    u uniform in [-1, 1], independent for every number,

where eps is that of z's dtype and s the size of the terms that the operation adds up:

    |C| + |A| |B|   for products of matrices C + A B, whose terms are rounded even if they cancel
    |x|             for gelu(x) = x (1 + erf(x / sqrt 2)) / 2, where 1 + erf cancels
    |z|             for everything else. Operations that are not elementwise (sums, means, softmax, LayerNorm) also see
                    their inputs with a relative error of eps u, because they add up several numbers.

Results that involve no rounding (copies, views, lookups, maxima, ReLU, whole parts, and tensors of nothing but whole
numbers, as counts of tokens are) stay as they are. A perturbed pass ends in states X + D, where D is a random error
like that of X itself, carried through the layers. With the residual res(X) = X - 1 x^T the floor of a state is

    floor = max(MARGIN max over passes of ||res(D)||_{1,inf},  eps ||X||_{1,inf},  smallest normal number),

where the second term is the error of storing X, and the third that of underflow. MARGIN is measured in
tests/measures/test_rounding.py, against residuals computed in more digits. A residual k times its floor has a
relative error of about 1/k.

If X was computed in a coarser dtype (bfloat16, TF32) and then converted, its error is larger than this floor.

Shapes: B sequence, N query token, M key token, D width, H head.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from rankbench.measures.attention_matrices import Rows, per_queries, shares
from rankbench.measures.norms import composite_norm, frobenius_norm, own_rounding, residual_matrix, without_absent
from rankbench.measures.states import value_per_length
from rankbench.measures.token_views import View, counted_first
from rankbench.model.network import AnyStep, AttentionStep, Network, run

NUMBERS = 256  # errors that the passes draw together for a state or a P: enough for a stable norm
MOST_PASSES = 8
FLOOR_SEQUENCES = 16  # on which floors of sums are measured: random rounding takes several times as long as a plain sum
MARGIN = 4.0
ALL = View()
POOL = 1 << 16
LARGE = 1 << 22  # numbers: noise for more of them is drawn a part at a time, because the pool is four times as large

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.addmv, aten.addbmm}
COPIES = {aten.clone, aten.copy, aten._unsafe_view, aten.cat, aten.stack, aten.embedding, aten.index, aten.gather}
COPIES |= {aten.index_select, aten.constant_pad_nd, aten.where, aten.masked_fill, aten.repeat, aten.new_ones}
COPIES |= {aten.ones_like, aten.full_like, aten.new_full, aten.sort, aten.triu, aten.tril, aten.flip, aten.roll}
COPIES |= {aten.fill, aten.index_fill, aten.masked_select, aten.take}
CHOICES = {aten.amax, aten.amin, aten.max, aten.min, aten.maximum, aten.minimum, aten.clamp, aten.clamp_min}
CHOICES |= {aten.relu, aten.abs, aten.neg, aten.sign, aten.sgn, aten.argmax, aten.argmin, aten.topk}
CHOICES |= {aten.searchsorted, aten.bucketize, aten.clamp_max, aten.hardtanh}
# an error of one rounding in a whole number would change its whole part by 1
WHOLE_PARTS = {aten.floor, aten.ceil, aten.round, aten.trunc, aten.floor_divide, aten.remainder, aten.fmod}
WITHOUT_ROUNDING = COPIES | CHOICES | WHOLE_PARTS


class RandomRounding(TorchDispatchMode):
    """Context in which every floating-point operation rounds at random, as the module's docstring describes.

    Noise is drawn once, and each operation reads a piece of it from a random position: new noise for each would take
    longer than the operations themselves.
    """

    supports_higher_order_operators = True  # torch's name for those whose arguments are functions, as of flex_attention

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator  # on the CPU
        self.pools: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # added in half the time of a Python number
        self.begin = torch.empty((), dtype=torch.int64)  # of the piece of a pool that is read

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and what torch would wrap around each operation imports the compiler

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(operation, HigherOrderOperator):
            return self._round_(operation(*self._rounded(args), **kwargs))
        packet = operation.overloadpacket
        family = packet
        if operation.namespace == "aten":  # of x.relu_() as of x.relu()
            family = getattr(aten, packet.__name__.removesuffix("_"), packet)
        if "out" in kwargs:  # the same operation without `out`, whose result is then stored there
            with self:
                result = packet(*args, **{name: value for name, value in kwargs.items() if name != "out"})
            return kwargs["out"].copy_(result)
        if operation.is_view or family in WITHOUT_ROUNDING or kwargs.get("rounding_mode") is not None:
            return operation(*args, **kwargs)
        inputs = [x for x in args if _is_float(x) or (isinstance(x, (list, tuple)) and any(map(_is_float, x)))]
        if not inputs:
            return operation(*args, **kwargs)
        if family is aten._to_copy:
            result = operation(*args, **kwargs)
            is_coarser = _is_float(result) and torch.finfo(result.dtype).eps > torch.finfo(args[0].dtype).eps
            return self._round_(result) if is_coarser else result
        if family in PRODUCTS:  # sizes of the terms, before the result takes the place of one
            size = family(*map(_size, args), **{name: abs(factor) for name, factor in kwargs.items()})
            result = operation(*args, **kwargs)
            return result if _is_whole(size) else self._add_noise_(result, size)
        if family is aten.gelu:
            return self._add_noise_(operation(*args, **kwargs), inputs[0])
        if torch.Tag.pointwise not in operation.tags:
            kept = 1 if operation._schema.is_mutable else 0  # the operation must change its argument itself, not a copy
            args = (*args[:kept], *self._rounded(args[kept:]))
        return self._round_(operation(*args, **kwargs))

    def _rounded(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._rounded, x))
        if not _is_float(x) or _is_whole(x):
            return x
        if x.numel() > LARGE:
            return self._round_(x.clone())
        return x * (self._noise(x) + self.ones[x.dtype, x.device])

    def _round_(self, x: Any) -> Any:
        """The same in place, for results that nothing else holds: memory of this size is slow to get."""
        for whole in x if isinstance(x, (list, tuple)) else [x]:
            if _is_float(whole) and not _is_whole(whole):
                for part in _parts(whole):
                    part.mul_(self._noise(part) + self.ones[part.dtype, part.device])
        return x

    def _add_noise_(self, x: Tensor, size: Tensor) -> Tensor:
        """x + eps u size, in place."""
        for part, size_of_part in zip(_parts(x), _parts(size), strict=True):
            part.addcmul_(size_of_part, self._noise(part))
        return x

    def _noise(self, x: Tensor) -> Tensor:
        """eps u for every entry of x."""
        pool = self.pools.get((x.dtype, x.device))
        if pool is None or pool.numel() < 2 * x.numel():
            pool = torch.empty(max(POOL, 4 * x.numel()), dtype=x.dtype)
            pool.uniform_(-1, 1, generator=self.generator).mul_(torch.finfo(x.dtype).eps)
            pool = self.pools[x.dtype, x.device] = pool.to(x.device)
            self.ones[x.dtype, x.device] = pool.new_ones(())
        begin = int(self.begin.random_(pool.numel() - x.numel() + 1, generator=self.generator).item())
        if x.is_contiguous():  # the same as below in one call
            return pool.as_strided(x.shape, x.stride(), begin)
        return pool[begin : begin + x.numel()].view(x.shape)


def _parts(x: Tensor) -> Sequence[Tensor]:
    """x in parts of about LARGE numbers, along its first axis of more than one."""
    if x.numel() <= LARGE:
        return (x,)
    x = x.squeeze()
    return x.split(max(1, LARGE * len(x) // x.numel()))


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided


def _is_whole(x: Tensor) -> bool:
    """Whether all numbers are whole. The first one nearly always tells, without a look at the others."""
    if x.is_meta:
        return False
    first = x[(0,) * x.dim()] if x.numel() else x
    return bool((first == first.round()).all()) and bool((x == x.round()).all())


def _size(x: Any) -> Any:
    return x.abs() if _is_float(x) else x


class Floors(NamedTuple):
    """Floors of a sub-layer's input, output and P (shares of P, if these differ), in the units of the residual."""

    input_B: Tensor
    output_B: Tensor
    weights_BH: Tensor | None


@torch.no_grad()
def run_with_floors(
    network: Network, inputs: Tensor, generator: torch.Generator, view: View = ALL
) -> Iterator[tuple[AnyStep, Floors]]:
    """Every sub-layer's step with its floors. The plain and the perturbed passes run side by side, so that only one
    sub-layer of them is in memory. generator: on the CPU. view: the tokens over which floors of states are taken."""
    passes = num_passes(network.num_tokens(inputs), network.width)
    lengths_B, counted_BN = network.lengths(inputs), network.counted(inputs, view.without)
    perturbed_steps = run(network, side_by_side(inputs, passes))
    rounding, input_B = RandomRounding(generator), None

    def floor(x: Tensor, perturbed_x: Tensor) -> Tensor:
        perturbed = perturbed_x.split(len(x))
        if x.dim() == 4:
            return floor_of_weights(x, perturbed, lengths_B, counted_BN)
        seen, kept_B = view.of(x, counted_BN)
        return floor_of(seen(x), map(seen, perturbed), kept_B)

    for step in run(network, inputs):
        with rounding:
            perturbed = next(perturbed_steps)
        if input_B is None:
            input_B = floor(step.input_BND, perturbed.input_BND)
        output_B = floor(step.output_BND, perturbed.output_BND)
        weights_BH = None
        if isinstance(step, AttentionStep) and isinstance(perturbed, AttentionStep):
            seen = (lambda p: p) if step.sublayer.part.weighting.stochastic else shares
            weights_BH = floor(seen(step.weights_BHNM), seen(perturbed.weights_BHNM))
        yield step, Floors(input_B, output_B, weights_BH)
        input_B = output_B


def side_by_side(inputs: Tensor, copies: int) -> Tensor:
    """This many copies of the sequences, one after the other along the first axis."""
    return inputs.repeat(copies, *[1] * (inputs.dim() - 1))


def num_passes(num_tokens: int, width: int) -> int:
    """Number of perturbed passes that draws enough errors for a state of this size."""
    return max(1, min(MOST_PASSES, NUMBERS // (num_tokens * min(num_tokens, width))))


def floor_of(x_BND: Tensor, perturbed: Iterable[Tensor], lengths_B: Tensor | None) -> Tensor:
    """Floor of the residual of a state, (B,), from its value in each perturbed pass."""
    return _residual_floor(x_BND, perturbed, partial(value_per_length, lengths_B=lengths_B))


def floor_of_weights(
    p_BHNM: Tensor, perturbed: Iterable[Tensor], lengths_B: Tensor | None, counted_BN: Tensor | None
) -> Tensor:
    """Floor of the residual of P, (B, H), from its value in each perturbed pass."""
    return _residual_floor(p_BHNM, perturbed, partial(of_queries, lengths_B=lengths_B, counted_BN=counted_BN))


def _residual_floor(x: Tensor, perturbed: Iterable[Tensor], by_sequence: Callable) -> Tensor:
    """by_sequence(measure, x): the measure of each sequence's own part of a batch."""
    residual = partial(by_sequence, lambda part: composite_norm(residual_matrix(part)))
    return _largest(x, perturbed, residual, by_sequence(own_rounding, x))


def _largest(
    x: Tensor, perturbed: Iterable[Tensor], size: Callable[[Tensor], Tensor], own: Tensor | None = None
) -> Tensor:
    """The largest size of the error in a perturbed pass, times MARGIN, and at least the rounding of x itself. own: that
    rounding; None: eps times the size of x."""
    dtype = torch.finfo(x.dtype)
    largest = (dtype.eps * size(x) if own is None else own).clamp(min=dtype.tiny)
    for perturbed_x in perturbed:
        largest = torch.maximum(largest, MARGIN * size(perturbed_x - x))
    return largest


def floor_of_distances(
    p_BHNM: Tensor, perturbed: Iterable[Tensor], lengths_B: Tensor | None, counted_BN: Tensor | None
) -> Tensor:
    """Floor of P's distance to a fixed matrix, ||P - Q||_F / sqrt(N) with N the queries that count, (B, H): no such
    distance changes by more than P does."""
    size = partial(of_queries, lambda p: frobenius_norm(p) / p.shape[-2] ** 0.5)
    return _largest(p_BHNM, perturbed, partial(size, lengths_B=lengths_B, counted_BN=counted_BN))


def of_queries(
    measure: Callable[[Tensor], Tensor], p_BHNM: Tensor, lengths_B: Tensor | None, counted_BN: Tensor | None
) -> Tensor:
    """The measure of P, (B, H), over the rows of the queries that count. lengths_B, counted_BN: as in per_queries; of
    cross-attention, counted_BN alone."""
    num_queries, num_keys = p_BHNM.shape[-2:]

    def of(rows: Rows, length: int, queries: Rows) -> dict[str, Tensor]:
        keys = num_keys if lengths_B is None else length
        return {"": measure(p_BHNM[rows][..., :length, :keys][..., queries, :])}

    return per_queries(of, num_queries, lengths_B, counted_BN)[""]


@dataclass(frozen=True, eq=False)
class FloorsOfSums:
    """Floors of sums of paths, (G, B, N, D), from the same sums in each perturbed pass. counted_BN: the tokens that
    count; None: all."""

    sums_GBND: Tensor
    perturbed: Sequence[Tensor]
    counted_BN: Tensor | None

    @property
    def norm_GB(self) -> Tensor:
        """Floors of the Frobenius norms, (G, B)."""
        return torch.stack([_largest(sum_BND, others, self._norm) for sum_BND, others in self._each()])

    @property
    def residual_GB(self) -> Tensor:
        """Floors of the residuals, (G, B)."""
        seen, kept_B = counted_first(self.counted_BN)
        return torch.stack([floor_of(seen(sum_BND), map(seen, others), kept_B) for sum_BND, others in self._each()])

    def share_below(self) -> Tensor:
        """Share of sequences for which a sum, of the tokens that count, is no more than rounding; (G,)."""
        each = zip(self.sums_GBND, self.norm_GB, strict=True)
        return torch.stack([(self._norm(sum_BND) <= norm_B).double().mean() for sum_BND, norm_B in each])

    def _each(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """One sum at a time, because all of them can take the most memory of a command."""
        for group, sum_BND in enumerate(self.sums_GBND):
            yield sum_BND, [sums_GBND[group] for sums_GBND in self.perturbed]

    def _norm(self, sum_BND: Tensor) -> Tensor:
        return frobenius_norm(without_absent(sum_BND, self.counted_BN))


@torch.no_grad()
def floors_of_sums(
    sums_of: Callable[[int], Tensor], sums_GBND: Tensor, counted_BN: Tensor | None, generator: torch.Generator
) -> FloorsOfSums:
    """Floors of sums_GBND, which `sums_of(1)` returned, from what it returns with random rounding.

    sums_of(copies): the sums for this many copies of the sequences, one after the other. generator: on the CPU.
    """
    with RandomRounding(generator):
        perturbed_sums = sums_of(num_passes(*sums_GBND.shape[-2:]))
    return FloorsOfSums(sums_GBND, perturbed_sums.split(sums_GBND.shape[1], dim=1), counted_BN)


def states_with_floors(network: Network, inputs: Tensor, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """The embedding and the state after each layer, each with its floor; L + 1 in all."""
    by_layer: dict[int, tuple[Tensor, Tensor]] = {}
    for step, floors in run_with_floors(network, inputs, generator):
        by_layer.setdefault(step.sublayer.layer - 1, (step.input_BND, floors.input_B))
        by_layer[step.sublayer.layer] = step.output_BND, floors.output_B
    return list(by_layer.values())

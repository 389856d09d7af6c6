"""Rules of linear calls: moves, sums, pools, convolutions, and whatever else is linear in some of its arguments."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import tensors_in
from rankbench.tape.recording import Reads, Seen
from rankbench.tape.rules.registry import refuse_dropout, rule, unchanged
from rankbench.tape.steps import Sum, Through
from rankbench.tape.tags import Kind, Level, Origin, Tag, combined


@rule("contiguous", "clone", "detach", "data", "requires_grad_", "positive", "alias")
def _same(seen: Seen) -> Tag:
    return replace(seen.tag(seen.args[0]))


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def _dropout(seen: Seen) -> Tag:
    training = seen.get(2, "training", seen.kwargs.get("train", True))
    refuse_dropout(seen, seen.get(1, "p", 0.5) if training else 0.0)
    return _same(seen)


@rule("reshape", "view", "reshape_as", "view_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze")
def _reshape(seen: Seen) -> Tag | None:
    if any(isinstance(x, torch.dtype) for x in (*seen.args[1:], *seen.kwargs.values())):  # bits read as another type
        return None
    shape = seen.result.shape
    return _moved(seen, lambda x: x.reshape(shape))


@rule("expand", "expand_as", "broadcast_to")
def _expand(seen: Seen) -> Tag:
    shape = seen.result.shape
    return _moved(seen, lambda x: x.expand(shape))


@rule("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "adjoint")
@rule("getitem", "narrow", "select", "index_select", "gather", "take_along_dim", "diagonal", "roll", "flip")
@rule("repeat", "tile", "repeat_interleave")
def _move(seen: Seen) -> Tag:
    x, function = seen.args[0], seen.of_first
    chosen_by = [counted for index in seen.others if (counted := seen.tag(index).counted) is not None]
    if seen.tag(x).kind == Kind.ACTIVATION and any(tag.mixes and tag.form == "largest" for tag in chosen_by):
        raise ConfigError(
            f"{seen.call}: takes the tokens of the largest scores, which is attention with weights 1; "
            "write it as one_hot(...) times the values"
        )
    if seen.tag(x).kind == Kind.WEIGHT and any(map(seen.recorder.tokens.hold, tensors_in([seen.args[1:]]))):
        return seen.recorder.embedded(seen)  # rows of a table, as weight[tokens]
    tag = _moved(seen, function)
    if chosen_by and seen.recorder.takes(seen, x, function):
        tag.taken |= {seen.call}
    return tag


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "hsplit", "vsplit", "dsplit")
def _split(seen: Seen) -> list[Tag]:
    function = seen.of_first

    def part(index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: function(x)[index]

    return [_moved(seen, part(index), result) for index, result in enumerate(seen.result)]


def _moved(seen: Seen, function: Callable[[Tensor], Tensor], result: Tensor | None = None) -> Tag:
    """The tag of the result of a call that moves the numbers of its first argument."""
    tag = through(seen, [seen.args[0]], function, result=result, reads=seen.others)
    origin = seen.tag(seen.args[0]).origin
    tag.origin = None if origin is None else origin.moved(function)
    tag.logits = _alike(function, [seen.args[0]])(seen)
    return tag


def _alike(function: Callable, data: Sequence[Tensor]) -> Callable[[Seen], Tensor | None]:
    """The logits of what a function makes of weights that came from logits of their own shape: it moves both alike."""

    def logits(seen: Seen) -> Tensor | None:
        each = [seen.tag(x).logits for x in data]
        fits = all(x is not None and x.shape == y.shape for x, y in zip(each, data, strict=True))
        return function(*each) if fits else None

    return logits


@rule("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda")
def _cast(seen: Seen) -> Tag:
    if seen.result is seen.args[0]:
        return _same(seen)
    dtype, device = seen.result.dtype, seen.result.device
    return through(seen, [seen.args[0]], lambda x: x.to(device, dtype))


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
def _convolution(seen: Seen) -> Tag | None:
    if seen.tag(seen.get(1, "weight")).level == Level.SOFTMAX:
        return None
    tag = _jointly(seen, (0,), constant=seen.get(2, "bias") is not None)
    return None if tag is None else as_map(tag)


def as_map(tag: Tag) -> Tag:
    """The tag of the output of a map of weights: an activation, if it is not known by its value alone."""
    if tag.opaque is not None:
        return tag
    kind = Kind.ACTIVATION if tag.kind == Kind.CONSTANT else tag.kind
    return replace(tag, kind=kind, level=Level.LINEAR, unclear=None, scores=tag.scores if tag.mixes else None)


def _jointly(seen: Seen, positions: tuple[int, ...], constant: bool | None = None) -> Tag | None:
    """The tag of the result of a call that is jointly affine in the arguments, or lists, at these positions.

    constant: whether the rest of the call adds a constant; None: it does if one of them is a number or a constant
    tensor without axes.
    """
    if len(seen.args) <= max(positions):
        return None
    data = tensors_in([seen.args[position] for position in positions])
    tags = [seen.tag(x) for x in data]
    others = [x for x in tensors_in([seen.args, seen.kwargs]) if not any(x is y for y in data)]
    if any(seen.tag(x).has_paths for x in others):
        return None
    if any(tag.opaque is not None for tag in tags):
        tag = seen.value_only(tags, Level.LINEAR)
        if seen.name in ("cat", "stack"):
            joined = _with_holes(seen.args, data)
            tag.logits = _alike(lambda *values: seen.function(*_filled(joined, values), **seen.kwargs), data)(seen)
        return tag
    # constants enter slot 0; single numbers and empty tensors stay where they are
    parents = [x for x, tag in zip(data, tags, strict=True) if tag.node is not None or (x.ndim and x.numel())]
    if constant is None:
        numbers = [x for position in positions if isinstance(x := seen.args[position], (int, float)) and x != 0]
        constant = bool(numbers) or any(not x.ndim for x, tag in zip(data, tags, strict=True) if tag.node is None)
    function, kwargs, args = seen.function, seen.kwargs, _with_holes(seen.args, parents)

    def filled_in(*values: Tensor) -> Tensor:
        return function(*_filled(args, values), **kwargs)

    return through(seen, parents or data, filled_in, affine=constant, reads=others)


# one-line rules
POOLS = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
MOVES = ("pixel_shuffle", "pixel_unshuffle", "fold")
LINEAR_IN_FIRST = ("neg", "sum", "mean", "cumsum", "diff", "tril", "triu", *MOVES, *POOLS)
rule(*LINEAR_IN_FIRST, "interpolate")(partial(_jointly, positions=(0,), constant=False))
rule("cat", "stack", "hstack", "vstack")(partial(_jointly, positions=(0,)))
rule("copy")(partial(_jointly, positions=(0, 1)))
rule("masked_fill", "setitem", "index_put")(partial(_jointly, positions=(0, 2)))
rule("where")(partial(_jointly, positions=(1, 2)))
SCATTERS = ("index_add", "index_copy", "scatter", "scatter_add")
rule(*SCATTERS)(lambda seen: None if seen.kwargs else _jointly(seen, (0, 3)))
rule("pad")(lambda seen: _jointly(seen, (0,), constant=bool(seen.get(3, "value"))))
rule("batch_norm")(lambda seen: None if seen.get(5, "training", False) else _jointly(seen, (0,), constant=True))


@rule("zero", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
@rule("empty", "empty_like", "new_empty", "empty_strided")
def _constant(seen: Seen) -> Tag:
    """A tensor of one number; zeros where the numbers are whatever was in memory."""
    if "empty" in seen.name:
        seen.result.zero_()
    return Tag(Kind.CONSTANT)


@rule("unfold")
def _unfold(seen: Seen) -> Tag | None:
    is_of_images = seen.call.function.startswith("torch.nn.functional")
    return _jointly(seen, (0,), constant=False) if is_of_images else _move(seen)


@rule("embedding")
def _embedding(seen: Seen) -> Tag | None:
    index, weight = seen.get(0, "input"), seen.get(1, "weight")
    if seen.tag(weight).has_paths:
        return None
    if (of_states := seen.tag(index).counted) is not None:  # codes, as a quantiser's
        if seen.tag(weight).kind == Kind.ACTIVATION:
            seen.recorder.takes(seen, weight, lambda x: x[index])
        return seen.value_only([of_states])
    return seen.recorder.embedded(seen)


@rule("_grouped_mm")
def _grouped(seen: Seen) -> Tag | None:
    """A map of weights for each expert, applied to its own tokens."""
    if any(seen.tag(x).has_paths for x in seen.others):
        return None
    function = seen.of_first
    return as_map(through(seen, [seen.args[0]], lambda x: function(x.contiguous()), one_by_one=True))


def through(
    seen: Seen,
    data: list[Tensor],
    function: Callable,
    affine: bool = False,
    result: Tensor | None = None,
    reads: Reads = (),
    one_by_one: bool = False,
) -> Tag:
    """The tag of a function that is linear, or affine, in these tensors jointly. one_by_one: as in `Through`."""
    tags = [seen.tag(x) for x in data]
    if any(tag.opaque is not None for tag in tags):
        return seen.value_only(tags, Level.LINEAR)
    tag = combined([*tags, *(seen.tag(x) for x in reads)])
    if any(tag.node is not None for tag in tags):
        parents = tuple(tag.node or x for x, tag in zip(data, tags, strict=True))
        shape = (seen.result if result is None else result).shape
        tag.node = seen.node(parents, Through(function, affine, one_by_one), reads=reads, shape=shape)
    return tag


class _Hole(int):
    """A placeholder for an argument, by number."""


def _with_holes(args: tuple, data: Sequence[Tensor]) -> tuple:
    """Arguments without these tensors, so that keeping them does not keep the tensors alive."""
    number_of = {id(x): _Hole(number) for number, x in enumerate(data)}
    return tree_map_only(Tensor, lambda x: number_of.get(id(x), x), args)


def _filled(args: tuple, values: Sequence[Tensor]) -> tuple:
    return tree_map_only(_Hole, lambda hole: values[hole], args)


LARGEST = ("amax", "max", "logsumexp")  # calls whose result is taken off each row before an exponential


@rule("add", "sub", "rsub")
def _add(seen: Seen) -> Tag | None:
    terms, alpha = seen.args[:2], seen.kwargs.get("alpha", 1)
    factors = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[seen.name]
    tags = [seen.tag(x) for x in terms]
    unshifted, of = None, tags[1].maker
    if seen.name == "sub" and of is not None and of.function.rpartition(".")[2] in LARGEST:
        unshifted = terms[0] if tags[0].unshifted is None else tags[0].unshifted
    pairs = any(tag.pairs for tag in tags) or _is_outer(seen)
    if any(tag.opaque is not None for tag in tags):
        tag = replace(seen.value_only(tags, Level.LINEAR), unshifted=unshifted, pairs=pairs)
        is_log = unshifted is not None and of is not None and of.function.endswith("logsumexp")
        return replace(tag, form="log_softmax") if is_log else tag
    tag = replace(combined(tags), unshifted=unshifted, pairs=pairs)
    if any(tag.node is not None for tag in tags):
        constants = (x if isinstance(x, Tensor) else seen.result.new_tensor(x) for x in terms)
        parents = tuple(tag.node or x for tag, x in zip(tags, constants, strict=True))
        tag.node = seen.node(parents, Sum(seen.result.dtype, factors))
        tag.level = min(each.level for each in tags if each.has_paths)  # a state, to which gated numbers are added
    for base, x, other, factor in ((tags[0], terms[1], tags[1], factors[1]), (tags[1], terms[0], tags[0], factors[0])):
        if base.kind == Kind.ACTIVATION and other.kind == Kind.WEIGHT and isinstance(x, Tensor):
            tag.origin = _with_bias(base.origin, seen.result.shape, factor, x)
    return tag


def _is_outer(seen: Seen) -> bool:
    """Whether two activations each have an axis that the other lacks, as for the difference of every pair of tokens."""
    a, b = seen.args[:2]
    if not all(seen.tag(x).kind == Kind.ACTIVATION for x in (a, b)):
        return False
    sizes = list(zip(reversed(a.shape), reversed(b.shape), strict=False))
    return any(x > y for x, y in sizes) and any(x < y for x, y in sizes)


@rule("cdist")
def _distances(seen: Seen) -> Tag:
    tags = [seen.tag(x) for x in seen.args[:2]]
    return replace(seen.value_only(tags), pairs=all(tag.kind == Kind.ACTIVATION for tag in tags))


def _with_bias(origin: Origin | None, shape: torch.Size, factor: float, bias: Tensor) -> Origin:
    def constant() -> Tensor:
        return factor * bias + (0 if origin is None or origin.constant is None else origin.bias())

    return Origin(shape, unchanged, constant)

"""What the tape knows of each torch function: a rule by name, from a call that was seen to tags of its results.

A rule gives None where it does not cover what it was given; then only the value of the result is known.

Shapes: B batch, H head, N query token, M key token, D and F widths, K head width.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankbench.keys import ConfigError
from rankbench.model.tape.recording import AttentionCall, Kind, Level, Origin, Reads, Recorder, Seen, Tag, tensors_in
from rankbench.model.tape.replay import Affine, Gate, Mixed, Node, Normed, Scaled, Sum, Through

Rule = Callable[[Seen], Tag | Sequence[Tag] | None]
RULES: dict[str, Rule] = {}
Move, Lazy, Pair = Callable[[Tensor], Tensor], Callable[[], Tensor], tuple[Tensor, Tensor]
Layout = tuple[Move, Move, Move]

COVERED = (
    "attention (scaled_dot_product_attention, multi_head_attention_forward, softmax(...) times v by matmul, bmm or "
    "einsum), linear maps, convolutions, norms, elementwise activation functions, products of which one side is "
    "frozen, sums, and calls that move numbers"
)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of the torch functions with these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


# --- calls that are linear -------------------------------------------------------------------------------------------


@rule("contiguous", "clone", "detach", "data", "requires_grad_", "positive", "alias")
def _same(seen: Seen) -> Tag:
    tag = seen.tag(seen.args[0])
    return Tag(tag.kind, tag.level, tag.node, tag.opaque, tag.mixes, tag.origin, scores=tag.scores)


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def _dropout(seen: Seen) -> Tag:
    training = seen.get(2, "training", seen.kwargs.get("train", True))
    _refuse_dropout(seen, seen.get(1, "p", 0.5) if training else 0.0)
    return _same(seen)


def _refuse_dropout(seen: Seen, probability: float) -> None:
    if probability > 0:
        raise ConfigError(f"{seen.call}: dropout is on, and no two passes agree; call module.eval() first")


@rule("reshape", "view", "reshape_as", "view_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze")
def _reshape(seen: Seen) -> Tag | None:
    if any(isinstance(x, torch.dtype) for x in (*seen.args[1:], *seen.kwargs.values())):  # the bits as another type
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
    function, others, kwargs = seen.function, seen.args[1:], seen.kwargs
    return _moved(seen, lambda x: function(x, *others, **kwargs))


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "hsplit", "vsplit", "dsplit")
def _split(seen: Seen) -> list[Tag]:
    function, others, kwargs = seen.function, seen.args[1:], seen.kwargs

    def part(index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: function(x, *others, **kwargs)[index]

    return [_moved(seen, part(index), result) for index, result in enumerate(seen.result)]


def _moved(seen: Seen, function: Callable[[Tensor], Tensor], result: Tensor | None = None) -> Tag:
    """The tag behind a call that moves the numbers of its first argument."""
    indices = tensors_in([seen.args[1:], seen.kwargs])
    tag = _through(seen, [seen.args[0]], function, result=result, reads=indices)
    origin = seen.tag(seen.args[0]).origin
    tag.origin = None if origin is None else origin.moved(function)
    return tag


@rule("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda")
def _cast(seen: Seen) -> Tag:
    if seen.result is seen.args[0]:
        return _same(seen)
    dtype, device = seen.result.dtype, seen.result.device
    return _through(seen, [seen.args[0]], lambda x: x.to(device, dtype))


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
def _convolution(seen: Seen) -> Tag | None:
    tag = _jointly(seen, (0,), constant=seen.get(2, "bias") is not None)
    return tag if tag is None or tag.opaque is not None else _as_map(tag)


def _jointly(seen: Seen, positions: tuple[int, ...], constant: bool | None = None) -> Tag | None:
    """The tag behind a call that is affine in the arguments at these positions jointly, or in a list that stands there.

    constant: whether the rest of the call adds a constant; None: where a number or a constant tensor stands there.
    """
    if len(seen.args) <= max(positions):
        return None
    data = tensors_in([seen.args[position] for position in positions])
    tags = [seen.tag(x) for x in data]
    others = [x for x in tensors_in([seen.args, seen.kwargs]) if not any(x is y for y in data)]
    if any(seen.tag(x).has_paths for x in others):
        return None
    if any(tag.opaque is not None for tag in tags):
        return seen.value_only(tags, Level.LINEAR)
    # constants enter slot 0; single numbers, and what is empty, stay where they are
    parents = [x for x, tag in zip(data, tags, strict=True) if tag.node is not None or (x.ndim and x.numel())]
    if constant is None:
        numbers = [x for position in positions if isinstance(x := seen.args[position], (int, float)) and x != 0]
        constant = bool(numbers) or any(not x.ndim for x, tag in zip(data, tags, strict=True) if tag.node is None)
    function, kwargs, args = seen.function, seen.kwargs, _with_holes(seen.args, parents)

    def filled_in(*values: Tensor) -> Tensor:
        return function(*_filled(args, values), **kwargs)

    return _through(seen, parents or data, filled_in, affine=constant, reads=others)


# rules of one line
POOLS = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
LINEAR_IN_FIRST = ("neg", "sum", "mean", "cumsum", "diff", "tril", "triu", "pixel_shuffle", "pixel_unshuffle", *POOLS)
rule(*LINEAR_IN_FIRST, "interpolate")(partial(_jointly, positions=(0,), constant=False))
rule("cat", "stack", "hstack", "vstack")(partial(_jointly, positions=(0,)))
rule("copy")(partial(_jointly, positions=(0, 1)))
rule("masked_fill", "setitem")(partial(_jointly, positions=(0, 2)))
rule("where")(partial(_jointly, positions=(1, 2)))
SCATTERS = ("index_add", "index_copy", "scatter", "scatter_add")
rule(*SCATTERS)(lambda seen: None if seen.kwargs else _jointly(seen, (0, 3)))
rule("pad")(lambda seen: _jointly(seen, (0,), constant=bool(seen.get(3, "value"))))
rule("batch_norm")(lambda seen: None if seen.get(5, "training", False) else _jointly(seen, (0,), constant=True))
LIKE = ("zero", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")
rule(*LIKE)(lambda seen: Tag(Kind.CONSTANT))
rule("embedding")(lambda seen: None if seen.tag(seen.get(1, "weight")).has_paths else Tag(Kind.ACTIVATION))


def _through(
    seen: Seen,
    data: list[Tensor],
    function: Callable,
    affine: bool = False,
    result: Tensor | None = None,
    reads: Reads = (),
) -> Tag:
    """The tag of a function that is linear, or affine, in these tensors jointly."""
    tags = [seen.tag(x) for x in data]
    if any(tag.opaque is not None for tag in tags):
        return seen.value_only(tags, Level.LINEAR)
    tag = Recorder.combined([*tags, *(seen.tag(x) for x in reads)])
    if any(tag.node is not None for tag in tags):
        parents = tuple(tag.node or x for x, tag in zip(data, tags, strict=True))
        shape = (seen.result if result is None else result).shape
        tag.node = seen.node(parents, Through(function, affine), reads=reads, shape=shape)
    return tag


class _Hole(int):
    """The place of an argument, by number."""


def _with_holes(x: Any, data: list[Tensor]) -> Any:
    """Arguments without these tensors, so that keeping them does not keep the tensors alive."""
    for index, tensor in enumerate(data):
        if x is tensor:
            return _Hole(index)
    return type(x)(_with_holes(part, data) for part in x) if type(x) in (tuple, list) else x


def _filled(x: Any, values: Sequence[Tensor]) -> Any:
    if isinstance(x, _Hole):
        return values[x]
    return type(x)(_filled(part, values) for part in x) if type(x) in (tuple, list) else x


# --- sums ------------------------------------------------------------------------------------------------------------


@rule("add", "sub", "rsub")
def _add(seen: Seen) -> Tag | None:
    terms, alpha = seen.args[:2], seen.kwargs.get("alpha", 1)
    factors = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[seen.name]
    tags = [seen.tag(x) for x in terms]
    if any(tag.opaque is not None for tag in tags):
        return seen.value_only(tags, Level.LINEAR)
    tag = Recorder.combined(tags)
    if any(tag.node is not None for tag in tags):
        parents = tuple(seen.recorder.parent(x, seen.result) for x in terms)
        tag.node = seen.node(parents, Sum(seen.result.dtype, factors))
    for base, x, other, factor in ((tags[0], terms[1], tags[1], factors[1]), (tags[1], terms[0], tags[0], factors[0])):
        if base.kind == Kind.ACTIVATION and other.kind == Kind.WEIGHT and isinstance(x, Tensor):
            tag.origin = _with_bias(base.origin, seen.result.shape, factor, x)
    return tag


def _with_bias(origin: Origin | None, shape: torch.Size, factor: float, bias: Tensor) -> Origin:
    def constant() -> Tensor:
        return factor * bias + (0 if origin is None or origin.constant is None else origin.bias())

    return Origin(shape, _unchanged, constant)


def _unchanged(x: Tensor) -> Tensor:
    return x


# --- products --------------------------------------------------------------------------------------------------------


@rule("mul")
def _mul(seen: Seen) -> Tag | None:
    a, b = seen.args[:2]
    left, right = seen.tag(a), seen.tag(b)
    # the less linear side is frozen; of two alike, the left
    if left.has_paths and not (right.has_paths and left.level >= right.level):
        return _scaled(seen, a, b, "right factor")
    return _scaled(seen, b, a, "left factor")


@rule("div")
def _div(seen: Seen) -> Tag | None:
    if seen.kwargs.get("rounding_mode") is not None:
        return None
    return _scaled(seen, *seen.args[:2], "divisor")


def _scaled(seen: Seen, x: Any, factor: Any, side: str) -> Tag:
    """side: on which the factor stands, as the tape names what is frozen."""
    carried, other = seen.tag(x), seen.tag(factor)
    tag = Recorder.combined([carried, other])
    mixed = other.mixes and side != "divisor"  # P v, written as a product and a sum: which heads it has is not known
    if mixed or carried.opaque is not None or (carried.node is None and other.has_paths):
        return seen.value_only([carried, other], Level.GATED)
    if other.kind == carried.kind == Kind.ACTIVATION:
        tag.level = max(Level.GATED, min(carried.level, other.level))
    if carried.node is not None:
        made_by = "" if other.maker is None else f", of {other.maker}"
        frozen = f"{side}{made_by}" if other.kind == Kind.ACTIVATION else None
        tag.node = seen.node((carried.node,), Scaled(factor, divides=side == "divisor"), frozen, [factor])
    return tag


@rule("linear")
def _linear(seen: Seen) -> Tag | None:
    x, weight_FD, bias = seen.args[0], seen.get(1, "weight"), seen.get(2, "bias")
    if seen.tag(weight_FD).has_paths or seen.tag(bias).has_paths:
        return None
    return _affine(seen, x, weight_FD, bias)


def _affine(seen: Seen, x: Tensor, weight_FD: Tensor, bias: Tensor | None) -> Tag | None:
    """x W^T + b with constant W and b."""
    if weight_FD.ndim != 2:
        return None
    before, shape = seen.tag(x), seen.result.shape
    if before.opaque is not None:
        return seen.value_only([before], Level.LINEAR)
    affine = Affine(weight_FD, bias)
    tag = _as_map(Recorder.combined([before]))
    if before.node is not None:
        tag.node = seen.node((before.node,), affine, reads=[weight_FD, bias])
    tag.origin = Origin(shape, _unchanged, None if bias is None else lambda: bias, before.node, affine)
    return tag


def _as_map(tag: Tag) -> Tag:
    """The tag of what a map of weights makes: an activation."""
    return replace(tag, kind=Kind.ACTIVATION if tag.kind == Kind.CONSTANT else tag.kind, level=Level.LINEAR)


@rule("matmul", "rmatmul")
def _matmul(seen: Seen) -> Tag | None:
    a, b = seen.args[:2] if seen.name == "matmul" else reversed(seen.args[:2])
    if b.ndim == 2 and a.ndim > 1 and seen.tag(b).kind == Kind.WEIGHT and seen.tag(a).kind != Kind.WEIGHT:
        return _affine(seen, a, b.mT, None)
    if a.ndim == 1 or b.ndim == 1:
        return _product(seen, a, b, torch.matmul)
    return _product(seen, a, b, torch.matmul, ((_unchanged,) * 3, (attrgetter("mT"),) * 3), (a, b.mT))


@rule("addmm")
def _addmm(seen: Seen) -> Tag | None:
    c, a, b = seen.args[0], seen.get(1, "mat1"), seen.get(2, "mat2")
    if a is None or b is None or b.ndim != 2 or seen.tag(b).kind != Kind.WEIGHT or seen.tag(c).has_paths:
        return None
    alpha, beta = seen.kwargs.get("alpha", 1), seen.kwargs.get("beta", 1)
    return _affine(seen, a, b.mT if alpha == 1 else alpha * b.mT, c if beta == 1 else beta * c)


@rule("einsum")
def _einsum(seen: Seen) -> Tag | None:
    equation, *operands = seen.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return None
    if len(operands) == 1:
        return _through(seen, operands, lambda x: torch.einsum(equation, x))
    if len(operands) != 2:
        return None
    multiply, terms = partial(torch.einsum, equation), _letters(equation, operands[0].ndim, operands[1].ndim)
    if terms is None:
        return _product(seen, *operands, multiply)
    a, b, out = terms
    layouts = (_layout(a, b, out), _layout(b, a, out))
    scores = _queries_and_keys(a, b, out, *operands)
    return _product(seen, *operands, multiply, None if None in layouts else layouts, scores)


def _letters(equation: str, *ndims: int) -> tuple[str, str, str] | None:
    """The letters of both terms and of the result, "..." written out; None where a term repeats a letter."""
    equation = equation.replace(" ", "")
    given, arrow, out = equation.partition("->")
    terms = given.split(",")
    free = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation]
    if not arrow:
        letters = sorted(letter for letter in set(given) - {",", "."} if given.count(letter) == 1)
        out = ("..." if "..." in given else "") + "".join(letters)
    widths = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)]
    most = max([width for width, term in zip(widths, terms, strict=True) if "..." in term], default=0)
    terms = [term.replace("...", "".join(free[most - width : most])) for term, width in zip(terms, widths, strict=True)]
    terms.append(out.replace("...", "".join(free[:most])))
    return None if any(len(set(term)) < len(term) for term in terms) else tuple(terms)


def _layout(weights: str, values: str, out: str) -> Layout | None:
    """How to bring weights to (*batch, N, M) and values to (*batch, M, K), and (*batch, N, K) to the result."""
    batch = [x for x in weights if x in values and x in out]
    queries = [x for x in weights if x not in values and x in out]
    keys = [x for x in weights if x in values and x not in out]
    features = [x for x in values if x not in weights and x in out]
    if not len(queries) == len(keys) == len(features) == 1 or len(batch) + 2 != len(weights):
        return None
    if len(batch) + 2 != len(values) or len(batch) + 2 != len(out):
        return None
    return (
        _permuted(weights, [*batch, *queries, *keys]),
        _permuted(values, [*batch, *keys, *features]),
        _permuted([*batch, *queries, *features], out),
    )


def _permuted(given: Sequence[str], wanted: Sequence[str]) -> Callable[[Tensor], Tensor]:
    order = [given.index(letter) for letter in wanted]
    return lambda x: x.permute(order)


def _queries_and_keys(a: str, b: str, out: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    batch = [x for x in out if x in a and x in b]
    queries, keys = [x for x in out if x not in b], [x for x in out if x not in a]
    features = [x for x in a if x in b and x not in out]
    if not len(queries) == len(keys) == len(features) == 1 or len(a) != len(batch) + 2 or len(b) != len(batch) + 2:
        return None
    return _permuted(a, [*batch, *queries, *features])(q), _permuted(b, [*batch, *keys, *features])(k)


def _product(
    seen: Seen,
    a: Tensor,
    b: Tensor,
    multiply: Callable,
    layouts: Sequence[Layout] | None = None,
    scores: Pair | None = None,
) -> Tag | None:
    """A product of two tensors that sums over an axis: a linear map, attention, or scores.

    layouts: how to read it as P v with P on the left, and with P on the right. scores: its factors as queries and keys.
    """
    tags = [seen.tag(a), seen.tag(b)]
    if all(tag.kind == Kind.ACTIVATION for tag in tags):
        side = _weights_side(*tags)
        if layouts is None or side is None:
            tag = seen.value_only(tags, Level.PRODUCT)
            tag.opaque, tag.mixes, tag.scores = tag.opaque or seen.call, True, scores if seen.recorder.watch else None
            return tag
        (to_weights, *moves), logits = layouts[side], tags[side].logits
        p, v = (a, b) if side == 0 else (b, a)
        logits = None if logits is None or logits.shape != p.shape else partial(to_weights, logits)
        p = to_weights(p)
        return _attention(seen, lambda: p, v, *moves, tags[side].scores, logits, reads=[p])
    if tags[0].has_paths:
        tag = _through(seen, [a], lambda x: multiply(x, b), reads=[b])
    else:
        tag = _through(seen, [b], lambda x: multiply(a, x), reads=[a])
    return tag if tag.opaque is not None else _as_map(tag)


def _weights_side(left: Tag, right: Tag) -> int | None:
    """Which side of a product is attention weights: 0 the left, 1 the right; None where neither is.

    Scores that are used as they are must stand on the left, as in (q k^T) v: in q (k^T v) the product of keys and
    values would be taken for weights.
    """
    is_weights = [tag.mixes or tag.level == Level.SOFTMAX for tag in (left, right)]
    if is_weights[0] and (not is_weights[1] or left.level >= right.level):
        return 0
    return 1 if is_weights[1] and right.level > Level.PRODUCT else None


# --- functions of one activation -------------------------------------------------------------------------------------


@rule("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "hardswish", "erf")
@rule("hardtanh", "hardsigmoid", "tanh", "sigmoid", "softsign", "tanhshrink", "clamp", "clamp_min", "clamp_max", "abs")
@rule("pow", "square")
def _activation(seen: Seen) -> Tag | None:
    """act(z) = act(0) + gate z."""
    z, function, others, kwargs = seen.args[0], seen.function, seen.args[1:], seen.kwargs
    if not isinstance(z, Tensor) or tensors_in([others, kwargs]):
        return None
    exponent = seen.get(1, "exponent")
    if seen.name == "pow" and not (isinstance(exponent, (int, float)) and exponent in range(1, 10)):
        return None
    tag = seen.tag(z)
    if tag.opaque is not None:
        return seen.value_only([tag], Level.GATED)
    result_tag = Recorder.combined([tag])
    result_tag.level = max(Level.GATED, result_tag.level)
    if tag.node is not None:
        gate = Gate(lambda x: function(x, *others, **kwargs), z)
        at_zero = gate.function(z.new_zeros(()))
        constant, frozen = (None, "act(z)/z") if at_zero == 0 else (at_zero, "(act(z) - act(0))/z")
        result_tag.node = seen.node((tag.node,), Scaled(gate, constant), frozen, [z])
    return result_tag


@rule("glu")
def _glu(seen: Seen) -> Tag | None:
    """a * sigmoid(b) of the two halves, sigmoid(b) frozen."""
    x, axis = seen.args[0], seen.get(1, "dim", -1)
    tag = _through(seen, [x], lambda x: x.chunk(2, axis)[0])
    tag.level = max(Level.GATED, tag.level)
    if tag.node is not None:
        gate = x.chunk(2, axis)[1].sigmoid()
        tag.node = seen.node((tag.node,), Scaled(gate), "sigmoid of the second half")
    return tag


@rule("softmax", "softmax_of_rows")
def _softmax(seen: Seen) -> Tag:
    result_tag = seen.value_only([seen.tag(seen.args[0])], Level.SOFTMAX)
    result_tag.logits = seen.args[0] if seen.recorder.watch else None
    return result_tag


@rule("as_weights")
def _as_weights(seen: Seen) -> Tag:
    return seen.value_only([seen.tag(seen.args[0])], Level.SOFTMAX)


@rule("var_mean", "std_mean")
def _moments(seen: Seen) -> list[Tag] | None:
    axes, keepdim = seen.kwargs.get("dim", seen.args[1] if len(seen.args) > 1 else None), seen.kwargs.get("keepdim")
    if keepdim is None or isinstance(axes, bool):
        return None
    mean = _through(seen, [seen.args[0]], lambda x: x.mean(axes, keepdim), result=seen.result[1])
    return [seen.value_only([seen.tag(seen.args[0])]), mean]


# --- norms -----------------------------------------------------------------------------------------------------------


@rule("layer_norm", "native_layer_norm", "rms_norm")
def _norm(seen: Seen) -> Tag | list[Tag] | None:
    x, shape, weight = seen.args[0], seen.get(1, "normalized_shape"), seen.get(2, "weight")
    centred = seen.name != "rms_norm"
    shift, epsilon = (seen.get(3, "bias"), seen.get(4, "eps", 1e-5)) if centred else (None, seen.get(3, "eps"))
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    tag, result = seen.tag(x), seen.result if isinstance(seen.result, Tensor) else seen.result[0]
    if any(seen.tag(other).has_paths for other in (weight, shift)):
        return None
    result_tag = seen.value_only([tag], Level.LINEAR) if tag.opaque is not None else Recorder.combined([tag])
    if tag.node is not None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        axes = tuple(range(-len(shape), 0))
        if centred:
            _, _, scale = torch.native_layer_norm(x, shape, None, None, epsilon)
        else:
            scale = (x.square().mean(axes, keepdim=True) + epsilon).rsqrt()
        step = Normed(scale, axes, centred, weight, shift)
        reads = [weight, shift]
        result_tag.node = seen.node((tag.node,), step, "scale of the norm", reads, shape=result.shape)
    if isinstance(seen.result, Tensor):
        return result_tag
    return [result_tag, *(seen.value_only([tag]) for _ in seen.result[1:])]


@rule("normalize")
def _normalize(seen: Seen) -> Tag | None:
    p, axis, epsilon = seen.get(1, "p", 2.0), seen.get(2, "dim", 1), seen.get(3, "eps", 1e-12)
    x, tag = seen.args[0], seen.tag(seen.args[0])
    result_tag = seen.value_only([tag], Level.LINEAR) if tag.opaque is not None else Recorder.combined([tag])
    if tag.node is not None:
        length = x.norm(p, axis, keepdim=True).clamp_min(epsilon)
        result_tag.node = seen.node((tag.node,), Scaled(length, divides=True), "length of the vectors")
    return result_tag


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(
    seen: Seen,
    weights: Lazy,
    v: Tensor,
    to_values: Move,
    back: Move,
    scores: Pair | None,
    logits: Lazy | None,
    reads: Reads,
    grouped: bool = False,
) -> Tag:
    """The tag of P v. to_values brings v to (*batch, M, K); back brings (*batch, N, K) to the result."""
    tag, values = seen.tag(v), to_values(v)
    origin = None if tag.origin is None else tag.origin.moved(to_values)
    _show(seen, weights, lambda: values, lambda: scores or (None, None), logits)
    if tag.opaque is not None:
        return seen.value_only([tag], Level.LINEAR)
    parent = values if tag.node is None else _values(seen, tag.node, origin, to_values, values.shape)
    bias = origin.bias if origin is not None and origin.constant is not None else None
    node = seen.node((parent,), Mixed(weights, bias, grouped), "attention weights", reads)
    if back is not _unchanged:
        node = seen.node((node,), Through(back))
    seen.recorder.attention.append(node)
    return Tag(Kind.ACTIVATION, node=node)


def _show(seen: Seen, weights: Lazy, values: Lazy, scores: Callable[[], Pair], logits: Lazy | None) -> None:
    """Count an attention call, and give it to whoever watches."""
    recorder = seen.recorder
    recorder.num_attention += 1
    if recorder.watch is not None:
        tensors = (weights(), values(), *scores(), logits)
        recorder.watch(AttentionCall(recorder.num_attention, seen.call, *tensors, recorder.depth + 1))


def _values(seen: Seen, v: Node, origin: Origin | None, to_values: Callable, shape: torch.Size) -> Node:
    """The node of the values; where they are some columns of a linear map, of those columns alone.

    So a replay does not compute the queries and keys that the same map made.
    """
    if origin is None or origin.read is None:
        return v if to_values is _unchanged else seen.node((v,), Through(to_values), shape=shape)
    affine = origin.affine
    width = len(affine.weight_FD)
    # follow the number of each column to the values
    numbers = torch.arange(width, device=affine.weight_FD.device).expand(origin.shape)
    smallest, largest = (x.item() for x in origin.chain(numbers).aminmax())
    columns = None if (smallest, largest + 1) == (0, width) else slice(smallest, largest + 1)
    part = Affine(affine.weight_FD, affine.bias, columns)
    node = seen.node((origin.read,), part, reads=[affine.weight_FD, affine.bias], shape=origin.shape)
    return seen.node((node,), Through(origin.chain), shape=shape)


def logits_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """scale q k^T + mask, (*batch, N, M). Groups of query heads may share keys."""
    if k.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = (q * scale) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def weights_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k^T + mask), (*batch, N, M); rows that see no key are 0. Groups of query heads may share keys."""
    scores = logits_of(q, k, mask, scale)
    return scores.softmax(-1).masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0)


@rule("scaled_dot_product_attention")
def _fused(seen: Seen) -> Tag | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, mask, dropout, causal, scale, grouped = (seen.get(i, name) for i, name in enumerate(names))
    _refuse_dropout(seen, dropout or 0.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    grouped = bool(grouped) and v.shape[-3] != q.shape[-3]
    reads = [q, k, mask]
    weights, logits = (partial(function, q, k, mask, scale) for function in (weights_of, logits_of))
    return _attention(seen, weights, v, _unchanged, _unchanged, (q, k), logits, reads, grouped)


@rule("multi_head_attention_forward")
def _multi_head(seen: Seen) -> list[Tag] | None:
    """torch.nn.MultiheadAttention: (N, B, D) in and out."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*seen.args, **seen.kwargs)
    given.apply_defaults()
    at = given.arguments
    _refuse_dropout(seen, at["dropout_p"] if at["training"] else 0.0)
    refused = ("bias_k", "bias_v", "static_k", "static_v")
    if any(at[name] is not None for name in refused) or at["add_zero_attn"]:
        return None
    query, key, value = at["query"], at["key"], at["value"]
    if query.ndim == 2:
        query, key, value = (x[:, None] for x in (query, key, value))
    heads, width = at["num_heads"], query.shape[-1]
    separate = [at[f"{name}_proj_weight"] for name in "qkv"]
    maps = separate if at["use_separate_proj_weight"] else at["in_proj_weight"].chunk(3)
    biases = [None] * 3 if at["in_proj_bias"] is None else at["in_proj_bias"].chunk(3)

    def by_head(x_NBD: Tensor) -> Tensor:  # (B, H, N, K)
        return x_NBD.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    def back(x_BHNK: Tensor) -> Tensor:
        return x_BHNK.permute(2, 0, 1, 3).flatten(-2)

    mask = _additive_mask(at["attn_mask"], at["key_padding_mask"], heads, query)

    def queries_and_keys() -> tuple[Tensor, Tensor]:
        return tuple(by_head(F.linear(x, w, b)) for x, w, b in zip((query, key), maps, biases, strict=False))

    def of_scores(function: Callable) -> Tensor:
        q_BHNK, k_BHMK = queries_and_keys()
        return function(q_BHNK, k_BHMK, mask, q_BHNK.shape[-1] ** -0.5)

    weights, logits = partial(of_scores, weights_of), partial(of_scores, logits_of)
    tag, shape_NBD = seen.tag(at["value"]), torch.Size((*value.shape[:-1], width))
    _show(seen, weights, lambda: by_head(F.linear(value, maps[2], biases[2])), queries_and_keys, logits)
    average = seen.value_only([seen.tag(at["query"])], Level.SOFTMAX)
    if tag.opaque is not None:
        return [seen.value_only([tag], Level.LINEAR), average]
    unbatched = at["query"].ndim == 2
    bias = None if biases[2] is None else lambda: by_head(biases[2].expand(shape_NBD))
    steps = [
        *([Through(lambda x: x[:, None])] if unbatched and tag.node is not None else []),
        *(Affine(maps[2], biases[2]), Through(by_head), Mixed(weights, bias), Through(back)),
        Affine(at["out_proj_weight"], at["out_proj_bias"]),
        *([Through(lambda x: x[:, 0])] if unbatched else []),
    ]
    node = tag.node or value
    for step in steps:
        frozen, reads = ("attention weights", [query, key, mask]) if isinstance(step, Mixed) else (None, ())
        node = seen.node((node,), step, frozen, reads, shape=seen.result[0].shape)
    seen.recorder.attention.append(node)
    return [Tag(Kind.ACTIVATION, node=node), average]


def _additive_mask(mask: Tensor | None, padding: Tensor | None, heads: int, query: Tensor) -> Tensor | None:
    """What multi_head_attention_forward adds to the scores, (B or 1, H or 1, N or 1, M): True in its masks hides."""
    parts = []
    if mask is not None:
        parts.append(mask.unflatten(0, (-1, heads)) if mask.ndim == 3 else mask[None, None])
    if padding is not None:
        parts.append((padding if padding.ndim == 2 else padding[None])[:, None, None])
    zero = query.new_zeros(())
    added = [torch.where(part, -math.inf, zero) if part.dtype == torch.bool else part for part in parts]
    return sum(added) if added else None

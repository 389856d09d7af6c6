"""Rules of functions of one activation, and of norms."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankbench.tape.calls import ACTIVATIONS
from rankbench.tape.recording import Seen
from rankbench.tape.rules.linear import through
from rankbench.tape.rules.registry import rule
from rankbench.tape.steps import Gate, Normed, Scaled
from rankbench.tape.tags import Kind, Level, Tag, combined


@rule(*ACTIVATIONS.split())
def _activation(seen: Seen) -> Tag | None:
    """act(z) = act(0) + gate z."""
    exponent = seen.get(1, "exponent")
    if seen.name == "pow" and not (isinstance(exponent, (int, float)) and exponent in range(1, 10)):
        return None
    tag = _gated(seen, seen.args[0], seen.of_first, seen.others)
    if tag is not None and tag.opaque is None and _only_limits(seen):
        tag.level = seen.tag(seen.args[0]).level
    return tag


LIMITS = {  # where each function has its limits, and their defaults
    "clamp": ((1, "min", None), (2, "max", None)),
    "clamp_min": ((1, "min", None), (2, "max", None)),
    "clamp_max": ((2, "min", None), (1, "max", None)),
    "hardtanh": ((1, "min_val", -1.0), (2, "max_val", 1.0)),
}


def _only_limits(seen: Seen) -> bool:
    """Whether a function leaves all numbers around 0 as they are: a limit of a state, and no activation function."""
    if seen.name not in LIMITS:
        return False
    low, high = (seen.get(*place) for place in LIMITS[seen.name])
    if any(isinstance(limit, Tensor) for limit in (low, high)):
        return False
    return (low is None or low < 0) and (high is None or high > 0)


def _gated(seen: Seen, z: Any, function: Callable[[Tensor], Tensor], others: Sequence[Tensor]) -> Tag | None:
    """The tag of act(z), an elementwise function that others, which have no paths, take part in."""
    if not isinstance(z, Tensor) or any(seen.tag(x).has_paths for x in others):
        return None
    tag = seen.tag(z)
    if tag.opaque is not None:
        return replace(seen.value_only([tag], Level.GATED), form=seen.name)
    result_tag = combined([tag, *map(seen.tag, others)])
    result_tag.level = max(Level.GATED, result_tag.level)
    if tag.node is not None:
        gate = Gate(function, z, is_same=not others)
        at_zero = function(torch.zeros_like(z) if others else z.new_zeros(()))
        constant, frozen = (at_zero, "(act(z) - act(0))/z") if at_zero.any() else (None, "act(z)/z")
        result_tag.node = seen.node((tag.node,), Scaled(gate, constant), frozen, [z, *others])
    return result_tag


@rule("maximum", "minimum", "fmax", "fmin", "max", "min")
def _extreme(seen: Seen) -> Tag | None:
    """The larger or smaller of two: of two states, each number is that of one of them."""
    a, b = seen.args[0], seen.get(1, "other")
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None  # along an axis
    if seen.tag(a).has_paths and seen.tag(b).has_paths:
        with seen.recorder:
            return replace(seen.tag(torch.where(a >= b if "max" in seen.name else a <= b, a, b)))
    z, other = (b, a) if seen.tag(b).has_paths else (a, b)
    return _gated(seen, z, lambda x: seen.function(x, other), [other])


@rule("glu")
def _glu(seen: Seen) -> Tag | None:
    """a * sigmoid(b) of the two halves, sigmoid(b) frozen."""
    x, axis = seen.args[0], seen.get(1, "dim", -1)
    tag = through(seen, [x], lambda x: x.chunk(2, axis)[0])
    tag.level = max(Level.SCALED, tag.level)
    if tag.node is not None:
        gate = x.chunk(2, axis)[1].sigmoid()
        tag.node = seen.node((tag.node,), Scaled(gate), "sigmoid of the second half")
    return tag


@rule("softmax", "softmax_of_rows")
def _softmax(seen: Seen) -> Tag:
    tag = seen.value_only([seen.tag(seen.args[0])], Level.SOFTMAX)
    tag = tag if tag.scores is None else replace(tag, mixes=True, unclear=None)
    return replace(tag, form="softmax", logits=_logits(seen))


def _logits(seen: Seen) -> Tensor | None:
    """The argument of a softmax or exponential, before its largest was taken off."""
    if seen.recorder.keeps_tape:
        return None
    unshifted = seen.tag(seen.args[0]).unshifted
    return seen.args[0] if unshifted is None else unshifted


@rule("log_softmax")
def _log_softmax(seen: Seen) -> Tag:
    return replace(seen.value_only([seen.tag(seen.args[0])]), form="log_softmax", unshifted=seen.args[0])


@rule("exp")
def _exp(seen: Seen) -> Tag:
    if seen.tag(seen.args[0]).form == "log_softmax":
        return _softmax(seen)
    tag = seen.value_only([seen.tag(seen.args[0])])
    return replace(tag, form="exp", logits=_logits(seen)) if tag.kind == Kind.ACTIVATION else tag


@rule("as_weights")
def _as_weights(seen: Seen) -> Tag:
    return replace(seen.value_only([seen.tag(seen.args[0])], Level.SOFTMAX), form="weights")


@rule("var_mean", "std_mean")
def _moments(seen: Seen) -> list[Tag] | None:
    axes, keepdim = seen.get(1, "dim"), seen.kwargs.get("keepdim")
    if keepdim is None or isinstance(axes, bool):
        return None
    mean = through(seen, [seen.args[0]], lambda x: x.mean(axes, keepdim), result=seen.result[1])
    return [seen.value_only([seen.tag(seen.args[0])]), mean]


# --- norms ------------------------------------------------------------------------------------------------------------


@rule("layer_norm", "native_layer_norm", "rms_norm")
def _norm(seen: Seen) -> Tag | list[Tag] | None:
    x, shape, weight = seen.args[0], seen.get(1, "normalized_shape"), seen.get(2, "weight")
    centred = seen.name != "rms_norm"
    shift, epsilon = (seen.get(3, "bias"), seen.get(4, "eps", 1e-5)) if centred else (None, seen.get(3, "eps"))
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    tag, result = seen.tag(x), seen.result if isinstance(seen.result, Tensor) else seen.result[0]
    if any(seen.tag(other).has_paths for other in (weight, shift)):
        return None
    result_tag = seen.value_only([tag], Level.LINEAR) if tag.opaque is not None else combined([tag])
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
    result_tag = seen.value_only([tag], Level.LINEAR) if tag.opaque is not None else combined([tag])
    if tag.node is not None:
        length = x.norm(p, axis, keepdim=True).clamp_min(epsilon)
        result_tag.node = seen.node((tag.node,), Scaled(length, divides=True), "length of the vectors")
    return result_tag

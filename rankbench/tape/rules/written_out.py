"""Rules of calls that are several others, recorded as these."""

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from rankbench.tape.recording import Seen
from rankbench.tape.rules.registry import rule
from rankbench.tape.tags import Tag

WRITTEN_OUT: dict[str, Callable[..., Tensor]] = {
    "lerp": lambda start, end, weight: start + weight * (end - start),
    "addcmul": lambda x, tensor1, tensor2, value=1: x + value * (tensor1 * tensor2),
    "addcdiv": lambda x, tensor1, tensor2, value=1: x + value * (tensor1 / tensor2),
    "group_norm": lambda x, num_groups, weight=None, bias=None, eps=1e-5: _in_groups(x, num_groups, weight, bias, eps),
    "instance_norm": lambda *args, **kwargs: _of_instances(*args, **kwargs),
    "gru_cell": lambda *args: _gated(*args),
    "softmin": lambda x, dim=None, dtype=None, **_: (-x).softmax(dim, dtype=dtype),
}


def _in_groups(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's group norm of (B, D, ...), as a layer norm of each group."""
    each = x.reshape(x.shape[0], groups, -1)
    y = F.layer_norm(each, each.shape[-1:], eps=eps).reshape(x.shape)
    of_channels = (-1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.view(of_channels)
    return y if bias is None else y + bias.view(of_channels)


def _of_instances(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch's instance norm of (B, D, ...)."""
    if use_input_stats:
        return _in_groups(x, x.shape[1], weight, bias, eps)
    return F.batch_norm(x, running_mean, running_var, weight, bias, eps=eps)


def _gated(
    x: Tensor, state: Tensor, weight: Tensor, of_state: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> Tensor:
    """torch's GRU cell, as gates of residual branches use it (Parisotto et al. 2020)."""
    reset, update, new = F.linear(x, weight, bias).chunk(3, -1)
    reset_by, update_by, new_by = F.linear(state, of_state, other).chunk(3, -1)
    update, new = (update + update_by).sigmoid(), (new + (reset + reset_by).sigmoid() * new_by).tanh()
    return new + update * (state - new)


@rule(*WRITTEN_OUT)
def _written_out(seen: Seen) -> Tag:
    """A call that is several others, recorded as these."""
    with seen.recorder:
        return replace(seen.tag(WRITTEN_OUT[seen.name](*seen.args, **seen.kwargs)))

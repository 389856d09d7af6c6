"""The last states of a recorded pass: what its output is read out of."""

from torch import Tensor

from rankbench.tape.replay import Node
from rankbench.tape.steps import Affine, Gate, Mixed, Normed, Scaled, Through

CASTS = ("to", "type", "float", "double", "contiguous", "clone")


def read_out_of(target: Node | Tensor) -> Node | None:
    """What the last map of weights reads; None if anything but casts, factors and biases lies behind it."""
    while isinstance(target, Node):
        parents = [x for x in target.parents if isinstance(x, Node) or x.shape == target.shape]  # no bias
        is_moved = isinstance(target.step, Through) and target.call.function.rpartition(".")[2] not in CASTS
        if len(parents) != 1 or is_moved or isinstance(target.step, (Mixed, Normed)):
            return None
        (before,) = parents
        if not isinstance(before, Node):
            return None
        if isinstance(target.step, Affine):
            return before if _is_state(before) else None
        target = before
    return None


def _is_state(node: Node) -> bool:
    """Whether a node is a state, and not the inside of attention or of an MLP, whose last map is no read-out."""
    while isinstance(node.step, Through) and len(node.parents) == 1 and isinstance(parent := node.parents[0], Node):
        node = parent
    is_gated = isinstance(node.step, Scaled) and isinstance(node.step.factor, Gate)
    return not (is_gated or isinstance(node.step, Mixed))

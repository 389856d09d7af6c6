"""Laws of newer theory by name. Each is a file: its closed form, and a simulation or a network of ours beside it."""

from rankbench.measures.laws import (
    cesaro,
    depth_curse,
    entropy_bound,
    long_context,
    metastable,
    norm_placement,
    residual_scale,
    spectral_gap,
)
from rankbench.measures.laws.law import CLAIMED, CONTROL, Law

__all__ = ["CLAIMED", "CONTROL", "LAWS", "Law"]

LAWS: dict[str, Law] = {
    "residual_scale": residual_scale.LAW,
    "cesaro": cesaro.LAW,
    "depth_curse": depth_curse.LAW,
    "long_context": long_context.LAW,
    "entropy_bound": entropy_bound.LAW,
    "spectral_gap": spectral_gap.LAW,
    "metastable": metastable.LAW,
    "norm_placement": norm_placement.LAW,
    "first_speed": norm_placement.FIRST_SPEED,
}

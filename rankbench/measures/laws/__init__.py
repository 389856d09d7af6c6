"""Laws of newer theory by name. Each file has a closed form, and a simulation or network to compare it with."""

from importlib import import_module

from rankbench.measures.laws.cesaro import POSITION_BIAS
from rankbench.measures.laws.law import CLAIMED, CONTROL, Law
from rankbench.measures.laws.long_context import GRADIENT
from rankbench.measures.laws.metastable import PLATEAU
from rankbench.measures.laws.norm_placement import FIRST_SPEED, MEETING

__all__ = ["CLAIMED", "CONTROL", "LAWS", "Law"]

NAMES = (
    *("residual_scale", "cesaro", "depth_curse", "long_context"),
    *("entropy_bound", "spectral_gap", "metastable", "norm_placement"),
    *("signal_propagation", "antipodal", "layernorm_rank", "power_iteration", "score_biases"),
)
LAWS: dict[str, Law] = {name: import_module(f"{__name__}.{name}").LAW for name in NAMES}
LAWS |= {"first_speed": FIRST_SPEED, "plateau": PLATEAU, "position_bias": POSITION_BIAS, "meeting": MEETING}
LAWS |= {"long_context_gradient": GRADIENT}

"""Claims of Zhou et al. 2024: the first layer's values in later layers keep tokens apart and shorten the paths."""

from rankbench.judging.path_lengths import shorter_along
from rankbench.judging.residual_left import left_along, left_at

PAPERS = {"Zhou et al. 2024": "Value residual learning"}
ZHOU = "Zhou et al. 2024, Value residual learning"

CLAIMS = {
    "knob_value_residual": left_along(
        key="model.value_residual",
        side=+1,
        statement="The more of the first layer's values in later layers, the more is left",
        source=ZHOU,
        table="residual",
    ),
    "knob_value_residual_enough": left_at(
        key="model.value_residual",
        end=-1,
        statement="With enough of the first layer's values in later layers",
        source=ZHOU,
        table="residual",
    ),
    "paths_value_residual": shorter_along(
        key="model.value_residual",
        statement="The more of the first layer's values in later layers, the shorter are the paths",
        source=ZHOU,
    ),
}

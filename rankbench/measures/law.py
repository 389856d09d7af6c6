"""A law: a closed form, and measurements of a simulation or a network to compare it with.

Shapes: N token, D width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from rankbench.config.keys import ConfigError, check_known
from rankbench.config.plugins import Registry

CLAIMED, CONTROL = "claimed", "control"
SIZES = ("tokens", "layers", "width", "samples")  # options of analysis=laws

# (parameter, x, value) of a closed form; (setup, parameter, x, value) of a measurement
Predicted = Iterator[tuple[str, float, float]]
Measured = Iterator[tuple[str, str, float, float]]


@dataclass(frozen=True)
class Law:
    """A published law, with the set-up that it is about (claimed) and one in which it must fail (control).

    sizes: its sizes and their usual values. predicted(**sizes): its closed form. simulated(generator, **sizes) and
    network(generator, **sizes): measurements of one seed at the same parameters and x, in both set-ups; None if there
    is none. x_label and value_label name the axes; log_x and log_value make them logarithmic.
    """

    sizes: dict[str, int]
    predicted: Callable[..., Predicted]
    x_label: str
    value_label: str
    simulated: Callable[..., Measured] | None = None
    network: Callable[..., Measured] | None = None
    log_x: bool = False
    log_value: bool = False

    def __post_init__(self) -> None:
        check_known("sizes", self.sizes, SIZES)
        if self.simulated is self.network is None:
            raise ConfigError("simulated and network are both None; give one of them, to compare the closed form with")


LAWS = Registry("LAWS", Law)  # by name; papers and plug-ins fill it


def mean_cosine(x_ND: Tensor) -> float:
    """Mean cosine of two different tokens."""
    sum_D, tokens = (x_ND / x_ND.norm(dim=1, keepdim=True)).sum(0), len(x_ND)
    return ((sum_D.square().sum() - tokens) / (tokens * (tokens - 1))).item()

"""A network with parts taken out, its weights as they are: what several analyses measure beside the network itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rankbench.config import ConfigError, unknown

# What is taken out of the network with its weights as they are. A removed MLP takes its norm and skip along; removed
# skips are all of them, the MLP's too; norms stay, except in the network that the theorems are about.
VARIANTS: dict[str, dict[str, bool]] = {
    "full": {},
    "no_mlp": {"mlp": True},
    "no_skip": {"skip": True},
    "attention_only": {"skip": True, "mlp": True},
    "attention_only_no_norm": {"skip": True, "mlp": True, "norm": True},
}


@dataclass(frozen=True)
class VariantOptions:
    """variants: which of those that the analysis allows; sequences: how many of the test set."""

    variants: list[str]
    sequences: int

    analysis: ClassVar[str]  # its name
    allowed: ClassVar[Iterable[str]] = VARIANTS

    def __post_init__(self) -> None:
        if not self.variants:
            raise ConfigError(f"analysis.{self.analysis}.variants=[]: name at least one of {', '.join(self.allowed)}")
        for variant in self.variants:
            if variant not in self.allowed:
                raise ConfigError(unknown(f"analysis.{self.analysis}.variants", variant, self.allowed))
        if self.sequences < 1:
            raise ConfigError(f"analysis.{self.analysis}.sequences={self.sequences}: at least one is needed")

"""Variants of a network, with parts taken out and the weights unchanged, that several analyses measure."""

from dataclasses import dataclass

from rankbench.config.keys import key

# The parts that are taken out. Without an MLP its norm and skip are gone, too. Skips are removed together, the MLPs'
# included. Norms stay, except in the network that the theorems are about.
VARIANTS: dict[str, dict[str, bool]] = {
    "full": {},
    "no_mlp": {"mlp": True},
    "no_skip": {"skip": True},
    "attention_only": {"skip": True, "mlp": True},
    "attention_only_no_norm": {"skip": True, "mlp": True, "norm": True},
}


@dataclass(frozen=True)
class VariantOptions:
    """Which variants of a network are measured, and on how many sequences."""

    variants: list[str] = key("Networks to measure: the model with parts left out.", choices=VARIANTS, nonempty=True)
    sequences: int = key("Number of test sequences. Dong et al. took 32.", at_least=1)

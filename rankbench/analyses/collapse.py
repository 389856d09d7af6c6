"""The residual by layer, below the rounding of the tokens (Dong et al. 2021, Theorem 2.3; rankbench.collapse).

Shapes: B batch.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Plan, Subject
from rankbench.analyses.variants import VARIANTS, VariantOptions
from rankbench.collapse import State, check, log_lemma_constant, log_residual, propagate, tokens
from rankbench.config import ConfigError
from rankbench.metrics import composite_norm, noise_floor, per_length, residual
from rankbench.model.trace import Trace
from rankbench.model.transformer import Transformer
from rankbench.plots.collapse import draw_collapse
from rankbench.tables import thinned

log = logging.getLogger(__name__)

LN10 = math.log(10)
# How far above its floor a measured residual must be to be compared with the propagated one, and how close they then
# are: a residual of 1e6 floors is known to about 1e-6 of itself, with a margin of 100 for what layers add.
ABOVE_FLOOR, AGREEMENT = 1e6, 1e-4


@dataclass(frozen=True)
class Options(VariantOptions):
    """As analyses.variants says."""

    analysis: ClassVar[str] = "collapse"


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: weights (trained | initialised), variant, layer (0: the embedding); of the state that leaves the layer.

    Means over those sequences whose tokens are not all exactly equal (num_sequences of them), in float64, of log10 of
    composite norms; _sd is the sample standard deviation over sequences.

    log10_residual, log10_relative_residual: of ||R|| and ||R|| / ||X||, propagated in residual coordinates.
    log10_measured: of ||R|| in a plain forward pass; empty where it is below noise_floor (units of X) in any sequence.
    disagreement: the largest |log10| ratio of the two over sequences that measure more than 1e6 noise floors.
    growth_exponent: log_relative_residual over that of the layer before: 3 where the residual is cubed, 1 where it
    stays; of means over sequences, empty where the layer before has no relative residual below 1.
    log10_contraction, log10_bound: of Lemma A.2's bound on ||R|| over the ||R|| that entered the layer, and of Theorem
    2.3's on ||R||, with each layer's own constant, from the first layer on that the lemma says is a contraction in all
    sequences. Unmasked attention alone.
    """
    inputs, rows, refused = subject.test.inputs[: options.sequences], [], {}
    if inputs.is_floating_point():
        inputs = inputs.double()
    for weights, model in subject.models.items():
        for variant in options.variants:
            network = model.without(**VARIANTS[variant]).double()
            try:
                check(network.cfg)
            except ConfigError as error:
                refused[variant] = error
                continue
            for row in _rows(network, inputs):
                rows.append({"weights": weights, "variant": variant, **row})
    if not rows:
        raise next(iter(refused.values()))
    for variant, error in refused.items():
        log.warning("%s is left out: %s", variant, error)
    found = pd.DataFrame(rows)
    worst = found.disagreement.max()
    log.info("%s seed %d: propagated and measured log10 residuals differ by %.1e", subject.run, subject.seed, worst)
    if worst > AGREEMENT:
        log.warning("that is more than rounding explains (%.0e)", AGREEMENT)
    return found


def _rows(network: Transformer, inputs: Tensor) -> Iterator[dict]:
    states, measured = propagate(network, inputs), _measured(network, inputs)
    logs_B = [log_residual(state) / LN10 for state in states]
    bounds = _bounds(network, logs_B)
    before = float("nan")
    for layer, (state, log_B, (residual_B, floor_B)) in enumerate(zip(states, logs_B, measured, strict=True)):
        differ_B = log_B > -math.inf
        log_measured_B = residual_B.log10()
        # equal tokens may well measure rounding, and are no disagreement
        clear_B = differ_B & (residual_B > ABOVE_FLOOR * floor_B)
        relative = _moments("log10_relative_residual", (log_B - _log_size(state, network.present(inputs)))[differ_B])
        now = relative["log10_relative_residual"]
        yield {
            "layer": layer,
            **_moments("log10_residual", log_B[differ_B]),
            **relative,
            "log10_measured": log_measured_B.mean().item() if (residual_B > floor_B).all() else float("nan"),
            "noise_floor": floor_B.mean().item(),
            "disagreement": (log_measured_B - log_B)[clear_B].abs().max().item() if clear_B.any() else float("nan"),
            "growth_exponent": now / before if before < 0 else float("nan"),
            **bounds[layer],
            "num_sequences": int(differ_B.sum()),
        }
        before = now


def _moments(name: str, values: Tensor) -> dict[str, float]:
    mean = values.mean().item() if len(values) else -math.inf
    return {name: mean, f"{name}_sd": values.std().item() if len(values) > 1 else float("nan")}


def _log_size(state: State, present_BN: Tensor | None) -> Tensor:
    x_BND = tokens(state)
    return composite_norm(x_BND if present_BN is None else torch.where(present_BN[..., None], x_BND, 0)).log10()


@torch.no_grad()
def _measured(network: Transformer, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """||R|| and its noise floor after each layer of a plain forward pass, (B,) each."""
    trace = Trace("embedding", "output")
    network(inputs, trace=trace)
    last = "mlp" if network.cfg.mlp else "attention"
    names = ["embedding", *(f"layers.{layer}.{last}.output" for layer in range(network.cfg.layers))]
    lengths_B = network.lengths(inputs)
    found = [
        _with_floor(trace[name]) if lengths_B is None else per_length(_with_floor, trace[name], lengths_B)
        for name in names
    ]
    return [(metrics["residual"], metrics["noise_floor"]) for metrics in found]


def _with_floor(x_BND: Tensor) -> dict[str, Tensor]:
    return {"residual": residual(x_BND), "noise_floor": noise_floor(x_BND)}


def _bounds(network: Transformer, logs_B: list[Tensor]) -> list[dict[str, float]]:
    """log10_contraction and log10_bound of each layer from 0 on, as in `table`."""
    cfg, nowhere = network.cfg, {"log10_contraction": float("nan"), "log10_bound": float("nan")}
    if cfg.skip or cfg.mlp or cfg.norm != "none" or cfg.mask != "none":
        return [nowhere] * len(logs_B)
    differ_B = logs_B[0] > -math.inf
    found, bound_B = [nowhere], None
    for block, log_B in zip(network.blocks, logs_B, strict=False):  # what enters each layer
        constant = log_lemma_constant(block) / LN10
        contraction_B = (constant + 2 * log_B)[differ_B]
        if bound_B is None and (contraction_B < 0).all():
            bound_B = log_B[differ_B]
        if bound_B is not None:
            bound_B = constant + 3 * bound_B
        bound = float("nan") if bound_B is None else bound_B.mean().item()
        found.append({"log10_contraction": contraction_B.mean().item(), "log10_bound": bound})
    return found


def digest(table: pd.DataFrame) -> str:
    """log10 residual by layer and the last layer's growth exponent, mean over seeds, for a terminal."""
    axes = ["weights", "variant"]
    mean = table.pivot_table("log10_residual", axes, "layer", "mean", sort=False)
    last = table[table.layer == table.layer.max()].groupby(axes, sort=False).growth_exponent.mean()
    shown = thinned(mean).map("{:.4g}".format).assign(exponent=last.map("{:.3f}".format))
    return (
        f"log10 residual by layer, last growth exponent (3: cubed, 1: constant); mean of {table.seed.nunique()} seeds"
        f"\n{shown.to_string()}\nlargest disagreement with a plain forward pass: {table.disagreement.max():.1e}"
    )


def check_plan(plan: Plan, options: Options) -> None:
    """ConfigError where no rule follows any of the variants."""
    refused = []
    for variant in options.variants:
        try:
            check(plan.model.without(**VARIANTS[variant]).cfg)
        except ConfigError as error:
            refused.append(error)
    if len(refused) == len(options.variants):
        raise refused[0]


ANALYSIS = Analysis(Options, table, draw_collapse, digest, check=check_plan)

"""The residual by layer, followed far below the tokens' rounding errors (Dong et al. 2021, Theorem 2.3;
rankbench.measures.residual_coordinates).

Shapes: B batch.
"""

import logging
import math
from collections.abc import Iterator

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.columns import OF_CLASSIFIER, SPECIAL_TOKENS, SPREAD, VARIANT, WEIGHTS
from rankbench.analyses.residual import whole_accuracy
from rankbench.analyses.variants import VARIANTS
from rankbench.analyses.variants import VariantOptions as Options
from rankbench.config.keys import ConfigError
from rankbench.measures import residual_coordinates as coordinates
from rankbench.measures import residual_propagation as propagation
from rankbench.measures.dong_theory import LN10
from rankbench.measures.norms import composite_norm, residual_matrix
from rankbench.measures.rounding import states_with_floors
from rankbench.measures.states import value_per_length
from rankbench.measures.token_views import counted_first
from rankbench.model.network import Network, without
from rankbench.plots.collapse import draw_collapse
from rankbench.runs.tables import mean_of_seeds, thinned
from rankbench.seeds import generator_for

log = logging.getLogger(__name__)

# How far above its floor a measured residual must be to be compared with the propagated one, and how close they then
# are: a residual of 1e4 floors is known to 1e-4 of itself, which is 4e-5 of its log10.
ABOVE_FLOOR, AGREEMENT = 1e4, 1e-4
LOG10_TENTH = -1.0
NEGLIGIBLE_MEAN = 1e-9  # where log10_relative_residual is above its negative, tokens are residual alone


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each layer. Numbers are log10 of composite norms, in float64, as means over the sequences whose tokens
    are not all exactly equal.

    R is propagated in residual coordinates. A token mean that is no larger than its rounding error
    (rankbench.measures.residual_propagation.mean_errors) counts as zero, so that ||X|| = ||R||. Bounds are for unmasked
    attention alone and over all tokens, special ones too; without any there is no column.
    """
    inputs, rows = subject.inputs_in_float64(options.sequences), []
    for weights, model in subject.networks_in_float64():
        networks, refused = _followed(model, options.variants)
        for variant, network in networks.items():
            for row in _rows(network, inputs, generator_for(subject.seed, "rounding")):
                rows.append({"weights": weights, "variant": variant, **row})
    for variant, error in refused.items():
        log.warning("%s is left out: %s", variant, error)
    whole = pd.DataFrame(rows)
    worst = whole.disagreement.max()
    log.info("%s seed %d: propagated and measured log10 residuals differ by %.1e", subject.run, subject.seed, worst)
    if worst > AGREEMENT:
        log.warning("that is more than rounding explains (%.0e)", AGREEMENT)
    whole = whole.drop(columns="log10_bound") if whole.log10_bound.isna().all() else whole
    return whole.assign(**whole_accuracy(subject), **subject.what_counts)


def _followed(model: Network, variants: list[str]) -> tuple[dict[str, Network], dict[str, ConfigError]]:
    """The variants that residual propagation can follow, and why the others are refused; ConfigError if all are."""
    networks, refused = {variant: without(model, **VARIANTS[variant]) for variant in variants}, {}
    for variant, network in networks.items():
        try:
            propagation.check(network)
        except ConfigError as error:
            refused[variant] = error
    if len(refused) == len(networks):
        raise next(iter(refused.values()))
    return {variant: network for variant, network in networks.items() if variant not in refused}, refused


def _rows(network: Network, inputs: Tensor, generator: torch.Generator) -> Iterator[dict]:
    states, measured = propagation.propagate(network, inputs), _measured(network, inputs, generator)
    errors, counted_BN = propagation.mean_errors(network, inputs, states, generator), network.counted(inputs)
    logs_B = [coordinates.log_residual(state, counted_BN) / LN10 for state in states]
    bounds = _bounds(network, [coordinates.log_residual(state) / LN10 for state in states])
    before, first_B = float("nan"), None
    for layer, (state, log_B, error_B) in enumerate(zip(states, logs_B, errors, strict=True)):
        residual_B, floor_B = measured[layer]
        differ_B = log_B > -math.inf
        log_measured_B = residual_B.log10()
        # A residual that is measured for equal tokens is rounding, not a disagreement.
        clear_B = differ_B & (residual_B > ABOVE_FLOOR * floor_B)
        below_B = (residual_B <= floor_B)[differ_B]
        is_zero_B = state.mean.log_B <= error_B
        relative_B = log_B - coordinates.log_size(state, counted_BN, is_zero_B) / LN10
        relative = _moments("log10_relative_residual", relative_B[differ_B])
        now = relative["log10_relative_residual"]
        first_B = relative_B if first_B is None else first_B
        left_B = (relative_B - first_B)[first_B > -math.inf]
        yield {
            "layer": layer,
            **_moments("log10_residual", log_B[differ_B]),
            **relative,
            "mean_below_rounding": is_zero_B[differ_B].double().mean().item(),
            "log10_measured": float("nan") if below_B.any() else log_measured_B[differ_B].mean().item(),
            "noise_floor": floor_B[differ_B].mean().item(),
            "below_floor": below_B.double().mean().item(),
            "disagreement": (log_measured_B - log_B)[clear_B].abs().max().item() if clear_B.any() else float("nan"),
            "growth_exponent": now / before if before < -NEGLIGIBLE_MEAN else float("nan"),
            "share_collapsed": (left_B < LOG10_TENTH).double().mean().item(),
            "log10_bound": bounds[layer],
            "num_sequences": int(differ_B.sum()),
        }
        before = now


def _moments(name: str, values: Tensor) -> dict[str, float]:
    mean = values.mean().item() if len(values) else -math.inf
    return {name: mean, f"{name}_sd": values.std().item() if len(values) > 1 else float("nan")}


@torch.no_grad()
def _measured(network: Network, inputs: Tensor, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """||R|| and its noise floor after each layer of a plain forward pass, (B,) each; nan where the pass overflows."""
    seen, kept_B = counted_first(network.counted(inputs))

    def residual_B(x_BND: Tensor) -> Tensor:
        norm_B = composite_norm(residual_matrix(x_BND))
        return torch.where(norm_B.isfinite(), norm_B, torch.nan)

    states = states_with_floors(network, inputs, generator)
    return [(value_per_length(residual_B, seen(x_BND), kept_B), floor_B) for x_BND, floor_B in states]


def _bounds(network: Network, logs_B: list[Tensor]) -> list[float]:
    """log10_bound of each layer from 0 on, as in `table`."""
    masked = any(attention.mask != "none" for attention in network.attentions)
    if network.has_skips or network.has_mlps or network.has_norms or masked:
        return [float("nan")] * len(logs_B)
    differ_B = logs_B[0] > -math.inf
    bounds, bound_B = [float("nan")], None
    for (sublayer, *_), log_B in zip(network.layers, logs_B, strict=False):  # log_B: of the state that enters it
        constant = propagation.log_lemma_constant(sublayer) / LN10
        if bound_B is None and ((constant + 2 * log_B)[differ_B] < 0).all():
            bound_B = log_B[differ_B]
        if bound_B is not None:
            bound_B = constant + 3 * bound_B
        bounds.append(float("nan") if bound_B is None else bound_B.mean().item())
    return bounds


def digest(table: pd.DataFrame) -> str:
    """log10 residual by layer and the last layer's growth exponent, mean over seeds, for a terminal."""
    axes = ["weights", "variant"]
    mean = table.pivot_table("log10_residual", axes, "layer", "mean", sort=False)
    last = table[table.layer == table.layer.max()].groupby(axes, sort=False).growth_exponent.mean()
    by_layer = thinned(mean).map("{:.4g}".format).assign(exponent=last.map("{:.3f}".format))
    return (
        f"log10 residual by layer, last growth exponent (3: cubed, 1: constant); {mean_of_seeds(table.seed.nunique())}"
        f"\n{by_layer.to_string()}\nlargest disagreement with a plain forward pass: {table.disagreement.max():.1e}"
    )


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError if residual propagation can follow none of the variants."""
    _followed(subject.network, options.variants)


COLUMNS = {
    **WEIGHTS,
    **VARIANT,
    "layer": "0: the embedding; else the state that leaves the layer.",
    "log10_residual": "log10 of ||R||.",
    "log10_relative_residual": "log10 of ||R|| / ||X||.",
    **SPREAD,
    "mean_below_rounding": "Share of sequences whose token mean counts as zero.",
    "log10_measured": "log10 of ||R|| in a plain forward pass; empty where any sequence is below its rounding error.",
    "noise_floor": "Rounding error of ||R|| in that pass (units of X; rankbench.measures.rounding), mean.",
    "below_floor": "Share of sequences whose measured ||R|| is no larger than noise_floor.",
    "disagreement": "Largest |log10| of propagated over measured ||R||, over sequences above 1e4 rounding errors.",
    "growth_exponent": "log10_relative_residual over that of the layer before: 3 where the residual is cubed, 1 where "
    "it stays the same; empty where the relative residual before is not below 1.",
    "share_collapsed": "Share of sequences of which less than a tenth of the embedding's relative residual is left.",
    "log10_bound": "log10 of Theorem 2.3's bound on ||R||, with each layer's own constant, from the first layer on "
    "that contracts in all sequences according to the lemma.",
    "num_sequences": "Number of sequences whose tokens are not all equal.",
    **OF_CLASSIFIER,
    **SPECIAL_TOKENS,
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_collapse,
    digest,
    COLUMNS,
    ("log10_relative_residual",),
    needs={"sublayers"},
    check=check,
    lines="variant",
)

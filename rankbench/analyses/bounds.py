"""Upper bounds on the residual, compared with the residual itself (Dong et al. 2021, Theorems 2.2 and 2.3, Corollaries
3.1 and 3.2).

Every number here is float64, whatever the network's precision. Formulas and their gaps: rankbench.measures.dong_theory.

Shapes: B batch, N token, D width, H head, K head width, F hidden width of the MLP, L layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.columns import SPECIAL_TOKENS, VARIANT, WEIGHTS
from rankbench.analyses.variants import VARIANTS as EVERYWHERE
from rankbench.analyses.variants import VariantOptions
from rankbench.config.keys import ConfigError, key
from rankbench.measures import dong_theory
from rankbench.measures.norms import composite_norm, inf_norm, one_norm, residual_from_median, residual_matrix
from rankbench.measures.residual_coordinates import ResidualState
from rankbench.measures.residual_propagation import check, propagate
from rankbench.measures.rounding import states_with_floors
from rankbench.measures.states import per_length
from rankbench.measures.token_views import counted_first
from rankbench.model.mlp import MLP
from rankbench.model.network import AnyStep, AttentionStep, MlpStep, Network, check_one_stream, run, without
from rankbench.plots.bounds import draw_bounds
from rankbench.runs.tables import mean_of_seeds, thinned
from rankbench.seeds import generator_for

# The bounds are for networks without norms, so each variant of the analysis `residual` also exists without norms.
VARIANTS = EVERYWHERE | {
    "no_norm": {"norm": True},
    "no_mlp_no_norm": {"mlp": True, "norm": True},
    "no_skip_no_norm": {"skip": True, "norm": True},
}
CLEAR = 10  # times the noise floor: such a residual is known to a tenth of itself, 0.04 decades


@dataclass(frozen=True)
class Options(VariantOptions):
    """Which variants of a network are measured, on how many sequences. Some have no norms."""

    variants: list[str] = key("Networks to measure: the model with parts left out.", choices=VARIANTS, nonempty=True)


class LayerConstants(NamedTuple):
    """log10 of one layer's constants in the bounds; one for each sequence where they depend on the scales of norms.

    beta: the largest over heads. coefficient: the factor of the cubed residual. skip: the skip's scale, not as log10.
    lam: lambda, in the (1,inf) sense, of everything after the attention's sum; lam_inf: its inf-norm half, without
    norms. scores_H = ||W_QK,h||_max and values_H = ||W_h||_inf.
    """

    beta: float
    coefficient_B: np.ndarray
    skip: float
    lam_B: np.ndarray
    lam_inf: float
    scores_H: np.ndarray
    values_H: np.ndarray

    def bound(self, residual_B: np.ndarray) -> np.ndarray:
        """Lemmas A.1 and A.2: the bound on the residual after the layer, from one on that before it; as log10."""
        return dong_theory.layer_bound(residual_B, self.coefficient_B, self.skip, self.lam_B)


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each bound and layer; layer 0 is the embedding, where bound = measured.

    The paper's bounds cover no masks, no norms, and skips or MLPs but not both. With norms, recursion and layer treat
    these as sec. 3.3 does, as a right multiplication, here by the sequence's largest scale; but a norm scales each
    token separately. Sequences of equal tokens are left out everywhere. Special tokens that do not count enter no
    measured number; the bounds, which are for all tokens, start from the residual of all. The bound of one layer starts
    from the residual measured before it, or from the floor if that is larger.
    """
    inputs, rows = subject.inputs_in_float64(options.sequences), []
    for weights, exact in subject.networks_in_float64():
        for variant in options.variants:
            network = without(exact, **VARIANTS[variant])
            generator = generator_for(subject.seed, "rounding")
            rows += [{"weights": weights, "variant": variant, **row} for row in _rows(network, inputs, generator)]
    whole = pd.DataFrame(rows)
    whole = whole if whole.noise_floor.notna().any() else whole.drop(columns="noise_floor")
    return whole.assign(**subject.what_counts)


def _rows(network: Network, inputs: Tensor, generator: torch.Generator) -> Iterator[dict]:
    present_BN = network.present(inputs)
    steps_of_layers = groupby(run(network, inputs), key=lambda step: step.sublayer.layer)
    of_all, measured, followed = _residuals(network, inputs, generator)
    layers = [_constants(list(steps), present_BN) for _, steps in steps_of_layers]
    residuals, diameters = ([state[size] for state in of_all] for size in ("residual", "diameter"))
    for bound, source, covered, values_L in _bounds(network, layers, residuals, diameters):
        for number, (values_B, state) in enumerate(zip(values_L, measured, strict=True)):
            measured_B = state["diameter" if bound == "diameter" else "residual"]
            least_B = measured_B if bound == "diameter" else state["least"]
            below_B = state["below_floor"]
            row = {"bound": bound, "layer": number, "source": source, "covered": covered, "followed": followed}
            row |= {"log10_bound": _mean(values_B), "log10_measured": np.nan if below_B.any() else _mean(measured_B)}
            row |= _compared(*(x_B[state["clear"]] for x_B in (values_B, measured_B, least_B)))
            row |= {"noise_floor": state["noise_floor"].mean(), "below_floor": below_B.mean(), "contractive": np.nan}
            row |= {"log10_beta": np.nan, "log10_lambda": np.nan}
            if number:
                layer = layers[number - 1]
                before_B = residuals[number - 1]
                falls_B = layer.bound(before_B) < before_B
                row |= {"contractive": _mean(falls_B[before_B > -np.inf])}
                row |= {"log10_beta": layer.beta, "log10_lambda": layer.lam_B.mean()}
            yield row


def _mean(values_B: np.ndarray) -> float:
    """Mean over the sequences whose tokens differ; nan if there are none."""
    finite_B = values_B[values_B > -np.inf]
    return finite_B.mean() if len(finite_B) else np.nan


def _compared(bound_B: np.ndarray, measured_B: np.ndarray, least_B: np.ndarray) -> dict[str, float]:
    """How the bound compares with sequences that are clear of the noise floor."""
    if not len(bound_B):
        return {"compared": 0} | dict.fromkeys(("slack", "slack_min", "holds", "refuted"), np.nan)
    slack_B, sure_B = bound_B - measured_B, bound_B - least_B
    # Tolerance of the log10. Where measured and bound are equal, they agree to more digits than this.
    rounding_B = 1e-9 * np.maximum(1, np.abs(bound_B))
    shares = {"holds": (slack_B >= -rounding_B).mean(), "refuted": (sure_B < -rounding_B).mean()}
    return {"compared": len(bound_B), "slack": slack_B.mean(), "slack_min": slack_B.min()} | shares


def _bounds(
    network: Network, layers: list[LayerConstants], residuals: list[np.ndarray], diameters: list[np.ndarray]
) -> Iterator[tuple[str, str, bool, list[np.ndarray]]]:
    """(bound, source, covered, values by layer) of every bound on this network."""
    skips, mlps, norms = network.has_skips, network.has_mlps, network.has_norms
    first_attention = network.attentions[0]
    masked = first_attention.mask != "none"
    plain = not norms and not masked
    heads, width = first_attention.heads, first_attention.head_width
    beta, lam = max(layer.beta for layer in layers), max(layer.lam_B[0] for layer in layers)
    depths = range(network.num_layers + 1)
    first = residuals[0]
    if plain and not skips and mlps:
        closed = [dong_theory.thm_2_3(beta + lam, heads, width, depth, first) for depth in depths]
        yield "theorem", "Corollary 3.2", True, closed
    elif plain and not skips:
        closed = [dong_theory.thm_2_3(beta, heads, width, depth, first) for depth in depths]
        yield "theorem", "Theorem 2.2" if heads == 1 else "Theorem 2.3", True, closed
    elif plain and not mlps and network.sublayers[0].skip == 1:
        closed = [dong_theory.cor_3_1(beta, heads, width, depth, first) for depth in depths]
        yield "theorem", "Corollary 3.1", True, closed
    source = "lemmas of app. A" if not norms else "norms as right multiplications, sec. 3.3"
    covered = plain and not (skips and mlps)
    yield "recursion", source, covered, [*accumulate(layers, lambda before, layer: layer.bound(before), initial=first)]
    single = [layer.bound(before) for layer, before in zip(layers, residuals, strict=False)]
    yield "layer", source, covered, [first, *single]
    if not norms:
        proved = [diameters[0]]
        for layer in layers:
            constants = (layer.scores_H, layer.values_H, width, layer.skip, layer.lam_inf, masked)
            proved.append(dong_theory.diameter_layer(proved[-1], *constants))
        yield "diameter", "rankbench, proved", True, proved


def _constants(steps: list[AnyStep], present_BN: Tensor | None) -> LayerConstants:
    """The constants of a layer, from the steps of its sub-layers.

    The temperature counts as a part of W_QK, the branch's factor as a part of W_h and of the MLP.
    """
    mlps = [step for step in steps if isinstance(step, MlpStep)]
    ((first, attention),) = ((step.sublayer, step.sublayer.part) for step in steps if isinstance(step, AttentionStep))
    maps = attention.maps_as_applied()
    scores_HDD = maps.w_q_HDK @ maps.w_k_HDK.mT / attention.temperature
    values_HDD = abs(first.branch) * (maps.w_v_HDK @ maps.w_o_HKD)
    beta = _log10((one_norm(scores_HDD) * composite_norm(values_HDD)).max())
    gain_2B = _norm_gains(steps[0], present_BN)
    before_2B = first.before(torch.ones_like(gain_2B), partial(torch.mul, gain_2B))
    # lambda in the 1-norm and in the inf-norm; lambda itself is their geometric mean
    lam_2B = first.after(torch.ones_like(gain_2B), partial(torch.mul, gain_2B))
    lam_inf = torch.ones((), dtype=torch.float64)
    for step in mlps:
        sublayer, stretch_2 = step.sublayer, mlp_stretch(step.sublayer.part)
        lam_inf = abs(sublayer.skip) + abs(sublayer.branch) * stretch_2[1]
        lam_2B = sublayer.apply(
            lam_2B,
            part=partial(torch.mul, stretch_2[:, None]),
            norm=partial(torch.mul, _norm_gains(step, present_BN)),
            add=lambda a, x, b, y: abs(a) * x + abs(b) * y,
        )
    coefficient = dong_theory.attention_coefficient(beta, attention.heads, attention.head_width)
    return LayerConstants(
        beta=float(beta),
        coefficient_B=coefficient + 3 * _log10(before_2B.prod(0).sqrt()),
        skip=first.skip,
        lam_B=_log10(lam_2B.prod(0).sqrt()),
        lam_inf=float(_log10(lam_inf)),
        scores_H=_log10(scores_HDD.abs().amax((-2, -1))),
        values_H=_log10(inf_norm(values_HDD)),
    )


def mlp_stretch(mlp: MLP) -> Tensor:
    """By how much an MLP can stretch the 1-norm and the inf-norm of Y - 1 y^T; shape (2,), upper bounds.

    Entry by entry |f(Y) - f(1 y^T)| <= |Y - 1 y^T| M with M = Lip |W_up| |W_down|, because f works token by token and
    its activation stretches no difference by more than Lip. Both norms grow with the entries' absolute values, so
    ||f(Y) - f(1 y^T)||_p <= ||M||_p ||Y - 1 y^T||_p for p = 1, inf: what the proof of Cor. 3.2 uses, with
    lambda_{1,inf} = sqrt(||M||_1 ||M||_inf). The least such constants are NP-hard to find (sec. 3.2).
    """
    slope = dong_theory.ACTIVATION_LIPSCHITZ[mlp.activation_name]
    m_DD = slope * mlp.up.weight.T.abs() @ mlp.down.weight.T.abs()
    return torch.stack([one_norm(m_DD), inf_norm(m_DD)])


def _norm_gains(step: AnyStep, present_BN: Tensor | None) -> Tensor:
    """||C||_1 s and ||C||_inf s of a sub-layer's norm, (2, B); 1 where it has none.

    C is the norm's linear map without its scale, s the sequence's largest scale.
    """
    norm, scale_BN1 = step.sublayer.norm, step.scale_BN1
    if norm is None or scale_BN1 is None:
        return step.input_BND.new_ones(2, len(step.input_BND))
    scale_BN = scale_BN1[..., 0] if present_BN is None else scale_BN1[..., 0].masked_fill(~present_BN, 0)
    c_DD = norm.linear(torch.eye(norm.width).to(scale_BN1), torch.ones_like(scale_BN1[0, :1]))
    return torch.stack([one_norm(c_DD), inf_norm(c_DD)])[:, None] * scale_BN.amax(1)


def _residuals(
    network: Network, inputs: Tensor, generator: torch.Generator
) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]], bool]:
    """Sizes of each state, over all tokens and over those that count; and whether they were followed."""
    try:
        check(network)
    except ConfigError:
        floored = states_with_floors(network, inputs, generator)
        measures: list[Callable] = [partial(_measured, *state) for state in floored]
    else:
        floored, measures = [], [partial(_followed, state) for state in propagate(network, inputs)]
    views = counted_first(network.present(inputs)), counted_first(network.counted(inputs))
    of_all, of_counted = ([measure(*view) for measure in measures] for view in views)
    return of_all, of_counted, not floored


def _sizes(x_BND: Tensor) -> dict[str, Tensor]:
    """The residual, a lower bound of it for any x, and the diameter."""
    diameter_B = torch.cdist(x_BND, x_BND, p=1).amax((1, 2))
    # The median is the best x for the 1-norm. In the inf-norm no x leaves less than half the diameter.
    least_B = one_norm(residual_from_median(x_BND)).sqrt() * (diameter_B / 2).sqrt()
    return {"residual": composite_norm(residual_matrix(x_BND)), "least": least_B, "diameter": diameter_B}


def _followed(state: ResidualState, seen: Callable[[Tensor], Tensor], kept_B: Tensor | None) -> dict[str, np.ndarray]:
    """log10 of the sizes, -inf for equal tokens. Rounding hides nothing: all others are clear, noise_floor is nan."""
    log10_scale_B = (state.rows.log_B / dong_theory.LN10).cpu().numpy()
    sizes = per_length(_sizes, seen(state.rows.matrix_BND), kept_B)
    differ_B = log10_scale_B > -np.inf
    logs = {name: np.where(differ_B, _log10(size_B) + log10_scale_B, -np.inf) for name, size_B in sizes.items()}
    floors = {"below_floor": np.zeros_like(differ_B), "noise_floor": np.full(len(differ_B), np.nan)}
    return logs | {"clear": differ_B} | floors


def _measured(
    x_BND: Tensor, floor_B: Tensor, seen: Callable[[Tensor], Tensor], kept_B: Tensor | None
) -> dict[str, np.ndarray]:
    """log10 of the sizes, raised to the noise floor where they are below it. clear, below_floor: whether the residual
    is well above the floor, or no larger than it; noise_floor: the floor in units of X."""
    sizes = per_length(_sizes, seen(x_BND), kept_B)
    marks = {"clear": sizes["residual"] > CLEAR * floor_B, "below_floor": sizes["residual"] <= floor_B}
    logs = {name: _log10(size_B.maximum(floor_B)) for name, size_B in sizes.items()}
    return logs | {name: mark_B.cpu().numpy() for name, mark_B in (marks | {"noise_floor": floor_B}).items()}


def _log10(value: Tensor) -> np.ndarray:
    """log10, with 0 taken as the smallest normal float64."""
    return value.clamp(min=torch.finfo(torch.float64).tiny).log10().cpu().numpy()


def digest(table: pd.DataFrame) -> str:
    """Bounds and the measured residual by layer, mean over seeds, and whether the bounds hold, for a terminal."""
    axes = ["weights", "variant", "bound"]
    last = table[table.layer == table.layer.max()]
    measured = table[table.bound == "layer"].assign(bound="measured", log10_bound=lambda rows: rows.log10_measured)
    mean = pd.concat([measured, table]).pivot_table("log10_bound", axes, "layer", "mean", sort=False)
    by_layer = thinned(mean.sort_index(level=axes[:2], sort_remaining=False)).map("{:.4g}".format)
    of_layers = table[table.layer > 0].groupby(axes, sort=False)
    worst = of_layers[["slack_min", "holds"]].min().round(3)
    worst["layers"] = table[(table.layer > 0) & (table.compared > 0)].groupby(axes, sort=False).layer.nunique()
    worst["of"] = of_layers.layer.nunique()
    return (
        f"log10 of bounds and residual by layer ({mean_of_seeds(last.seed.nunique())})\n{by_layer.to_string()}\n"
        "smallest slack in decades, and share of sequences where the bound holds (worst layer), over how many layers "
        f"of the network\n{worst.to_string()}"
    )


def check_network(subject: Subject, _: Options) -> None:
    """Raise ConfigError for an attention, a norm or streams that the bounds do not cover."""
    network = subject.network
    check_one_stream(network, "bounds")
    if any(sublayer.branch_norm is not None for sublayer in network.sublayers):
        raise ConfigError(
            f"analysis=bounds: no bound here covers norms after the branches, as in {network.name}; "
            "use model.norm=pre, post or none"
        )
    if any(attention.score_name != "dot" or attention.mixes for attention in network.attentions):
        scores = network.attentions[0].score_name
        has = "mixes the softmax with other weights" if scores == "dot" else f"has {scores} scores"
        raise ConfigError(
            f"analysis=bounds: needs the softmax of dot products alone; {network.name} {has}; for a network of ours "
            "use model.attention=dot, mix_attention=1, mix_identity=0, mix_uniform=0, exclusive=false and, with more "
            "than one copy of the heads, head_reduction=sum"
        )


COLUMNS = {
    **WEIGHTS,
    **VARIANT,
    "bound": "theorem: the closed form with the network's largest beta and lambda, where the paper has one; "
    "recursion: Lemmas A.1 and A.2 layer by layer, with each layer's own constants; layer: the same for one layer, "
    "from the residual at its input; diameter: rankbench's own (dong_theory.diameter_layer), proved for all networks "
    "without norms.",
    "layer": "0: the embedding; else the state that leaves the layer.",
    "source": "Where the bound is from.",
    "covered": "Whether the source covers this network.",
    "followed": "Whether the network is measured in residual coordinates, in which rounding hides nothing, or in a "
    "plain forward pass.",
    "log10_bound": "log10 of the bound, mean over sequences.",
    "log10_measured": "log10 of ||X - 1 x^T||_{1,inf}, x the token mean (of the diameter: max_ij ||x_i - x_j||_1), "
    "mean over sequences; empty where rounding explains the residual of any sequence.",
    "compared": "Number of sequences ten times above their rounding error; the next four are over these.",
    "slack": "log10 of bound over measured (decades), mean.",
    "slack_min": "The smallest of them.",
    "holds": "Share with measured <= bound.",
    "refuted": "Share whose residual is above the bound for every x (the paper takes the best x).",
    "noise_floor": "Rounding error of the residual (units of X; rankbench.measures.rounding), mean; empty for a "
    "network that is followed, no column if all are.",
    "below_floor": "Share of sequences whose residual rounding explains.",
    "contractive": "Share of sequences for which this layer's bound is below the measured residual from which it "
    "starts.",
    "log10_beta": "log10 of this layer's beta.",
    "log10_lambda": "log10 of this layer's lambda, which covers everything after the attention (MLP, its skip, norms).",
    **SPECIAL_TOKENS,
}
ANALYSIS = Analysis(
    Options, table, draw_bounds, digest, COLUMNS, ("slack",), {"sublayers"}, check_network, most_panels=6
)

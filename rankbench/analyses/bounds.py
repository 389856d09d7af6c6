"""Upper bounds on the residual beside the residual (Dong et al. 2021, Theorems 2.2 and 2.3, Corollaries 3.1 and 3.2).

Every number here is float64, whatever the network's precision. Formulas and their gaps: rankbench.theory.

Shapes: B batch, N token, D width, H head, K head width, F hidden width of the MLP, L layer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench import theory
from rankbench.analyses.analysis import Analysis, Plan, Subject
from rankbench.analyses.variants import VARIANTS as EVERYWHERE
from rankbench.analyses.variants import VariantOptions
from rankbench.config import ConfigError
from rankbench.metrics import composite_norm, inf_norm, noise_floor, one_norm, per_length, residual_matrix
from rankbench.model.trace import Trace
from rankbench.model.transformer import MLP, Block, Norm, Transformer
from rankbench.plots.bounds import draw_bounds
from rankbench.tables import thinned

# The bounds are of networks without norms, so each of the analysis residual's variants is there without them too.
VARIANTS = EVERYWHERE | {
    "no_norm": {"norm": True},
    "no_mlp_no_norm": {"mlp": True, "norm": True},
    "no_skip_no_norm": {"skip": True, "norm": True},
}
CLEAR = 100  # times the noise floor: what is this far above rounding can say whether a bound holds


@dataclass(frozen=True)
class Options(VariantOptions):
    """With the variants that have no norms, too."""

    analysis: ClassVar[str] = "bounds"
    allowed: ClassVar[Iterable[str]] = VARIANTS


class Layer(NamedTuple):
    """What the bounds need to know of one layer, log10; a number for each sequence where norms have their say.

    beta is the layer's largest over heads, coefficient that of the cubed residual; lam: lambda of all that follows the
    attention's sum, in the (1,inf) sense, lam_inf its inf-norm half without norms. scores_H = ||W_QK,h||_max and
    values_H = ||W_h||_inf.
    """

    beta: float
    coefficient_B: np.ndarray
    skip: float
    lam_B: np.ndarray
    lam_inf: float
    scores_H: np.ndarray
    values_H: np.ndarray


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: weights (trained | initialised), variant, bound, layer; layer 0 is the embedding, where bound = measured.

    bound: theorem, the closed form with the largest beta and lambda of the network, where the paper has one for it;
    recursion, Lemmas A.1 and A.2 layer by layer with each layer's own; layer, the same for one layer, from the
    residual measured at its input; diameter, rankbench's own (theory.diameter_layer), proved for all networks without
    norms. source: where the bound is from; covered: whether that speaks of this network. The paper's bounds know no
    masks, no norms, and skips or MLPs but not both. With norms, recursion and layer take these as sec. 3.3 does, as a
    right multiplication, here by the sequence's largest scale; but a norm scales every token on its own.

    log10_measured: ||X - 1 x^T||_{1,inf}, x the token mean (diameter: max_ij ||x_i - x_j||_1), mean over sequences, a
    sequence below the noise floor counting as at the floor; log10_bound likewise. below_floor: share of sequences whose
    residual rounding explains. Of those a hundred times above the floor: slack, bound - measured in decades, mean and
    smallest; holds, the share with measured <= bound; refuted, the share whose residual is above the bound for whatever
    x (the paper's is the best one).
    contractive: share of sequences whose bound behind this layer is below the measured residual that it starts from.
    log10_beta, log10_lambda: this layer's; lambda of all that stands behind the attention (MLP, its skip, norms).
    """
    inputs = subject.test.inputs[: options.sequences]
    rows = []
    for weights, model in subject.models.items():
        for variant in options.variants:
            network = model.without(**VARIANTS[variant]).double()
            inputs = inputs.double() if inputs.is_floating_point() else inputs
            rows += [{"weights": weights, "variant": variant, **row} for row in _rows(network, inputs)]
    return pd.DataFrame(rows)


def _rows(model: Transformer, inputs: Tensor) -> Iterator[dict]:
    cfg = model.cfg
    _check_attention(model)
    trace = Trace("embedding", ".output", "norm_scale")
    model(inputs, trace=trace)
    states = [trace["embedding"]]
    states += [trace[f"layers.{i}.{'mlp' if cfg.mlp else 'attention'}.output"] for i in range(cfg.layers)]
    lengths_B = model.lengths(inputs)
    measured = [_measured(x_BND, lengths_B) for x_BND in states]
    lipschitz, present_BN = theory.ACTIVATION_LIPSCHITZ[cfg.activation], model.present(inputs)
    layers = [_layer(block, f"layers.{i}", trace, present_BN, lipschitz) for i, block in enumerate(model.blocks)]
    residuals = [one["residual"] for one in measured]
    for bound, source, covered, values_L in _bounds(model, layers, residuals, [one["diameter"] for one in measured]):
        for number, (values_B, found) in enumerate(zip(values_L, measured, strict=True)):
            seen_B = found["diameter" if bound == "diameter" else "residual"]
            least_B = seen_B if bound == "diameter" else found["least"]
            row = {"bound": bound, "layer": number, "source": source, "covered": covered}
            row |= {"log10_bound": values_B.mean(), "log10_measured": seen_B.mean()}
            row |= _compared(values_B, seen_B, least_B, found["clear"])
            row |= {"below_floor": found["below_floor"].mean(), "contractive": np.nan}
            row |= {"log10_beta": np.nan, "log10_lambda": np.nan}
            if number:
                layer = layers[number - 1]
                falls_B = theory.is_contractive(residuals[number - 1], layer.coefficient_B, layer.skip, layer.lam_B)
                row |= {"contractive": falls_B.mean(), "log10_beta": layer.beta, "log10_lambda": layer.lam_B.mean()}
            yield row


def _compared(bound_B: np.ndarray, seen_B: np.ndarray, least_B: np.ndarray, clear_B: np.ndarray) -> dict[str, float]:
    if not clear_B.any():
        return dict.fromkeys(("slack", "slack_min", "holds", "refuted"), np.nan)
    slack_B, sure_B = (bound_B - seen_B)[clear_B], (bound_B - least_B)[clear_B]
    rounding = 1e-9  # in log10: measured and bound agree to more digits than that where they are equal
    shares = {"holds": (slack_B >= -rounding).mean(), "refuted": (sure_B < -rounding).mean()}
    return {"slack": slack_B.mean(), "slack_min": slack_B.min()} | shares


def _bounds(
    model: Transformer, layers: list[Layer], residuals: list[np.ndarray], diameters: list[np.ndarray]
) -> Iterator[tuple[str, str, bool, list[np.ndarray]]]:
    """(bound, source, covered, values by layer) of every bound that there is for this network."""
    cfg = model.cfg
    plain = cfg.norm == "none" and cfg.mask == "none"
    heads, width = cfg.heads, model.blocks[0].attention.head_width
    beta, lam = max(one.beta for one in layers), max(one.lam_B[0] for one in layers)
    depths = range(cfg.layers + 1)
    first = residuals[0]
    if plain and not cfg.skip and cfg.mlp:
        closed = [theory.cor_3_2(beta, lam, heads, width, depth, first) for depth in depths]
        yield "theorem", "Corollary 3.2", True, closed
    elif plain and not cfg.skip:
        closed = [theory.thm_2_3(beta, heads, width, depth, first) for depth in depths]
        yield "theorem", "Theorem 2.2" if heads == 1 else "Theorem 2.3", True, closed
    elif plain and not cfg.mlp and cfg.skip_scale == 1:
        yield "theorem", "Corollary 3.1", True, [theory.cor_3_1(beta, heads, width, depth, first) for depth in depths]
    source = "lemmas of app. A" if cfg.norm == "none" else "norms as right multiplications, sec. 3.3"
    covered = plain and not (cfg.skip and cfg.mlp)
    recursion, single = [first], [first]
    for layer, before in zip(layers, residuals, strict=False):
        constants = (layer.coefficient_B, layer.skip, layer.lam_B)
        recursion.append(theory.layer_bound(recursion[-1], *constants))
        single.append(theory.layer_bound(before, *constants))
    yield "recursion", source, covered, recursion
    yield "layer", source, covered, single
    if cfg.norm == "none":
        proved, masked = [diameters[0]], cfg.mask != "none"
        for one in layers:
            values = (one.scores_H, one.values_H, width, one.skip, one.lam_inf, masked)
            proved.append(theory.diameter_layer(proved[-1], *values))
        yield "diameter", "rankbench, proved", True, proved


def _layer(block: Block, name: str, trace: Trace, present_BN: Tensor | None, lipschitz: float) -> Layer:
    """temperature and branch_scale count as parts of W_QK and of W_h and the MLP."""
    attention, branch = block.attention, abs(block.branch_scale)
    w = attention.head_weights()
    scores_HDD = w.w_q_HDK @ w.w_k_HDK.mT / attention.temperature
    values_HDD = branch * (w.w_v_HDK @ w.w_o_HKD)
    beta = _log10((one_norm(scores_HDD) * composite_norm(values_HDD)).max())
    read_2B, behind_2B = _norm_gains(block, block.attention_norm, f"{name}.attention", trace, present_BN)
    # lambda in the 1-norm and in the inf-norm, whose geometric mean it is
    lam_2B = behind_2B
    lam_inf = torch.ones((), dtype=torch.float64)
    if block.mlp is not None:
        stretch_2 = branch * mlp_stretch(block.mlp, lipschitz)
        lam_inf = abs(block.mlp_skip) + stretch_2[1]
        into_2B, after_2B = _norm_gains(block, block.mlp_norm, f"{name}.mlp", trace, present_BN)
        lam_2B = lam_2B * (abs(block.mlp_skip) + stretch_2[:, None] * into_2B) * after_2B
    coefficient = theory.attention_coefficient(beta, attention.heads, attention.head_width)
    return Layer(
        beta=float(beta),
        coefficient_B=coefficient + 3 * _log10(read_2B.prod(0).sqrt()),
        skip=block.attention_skip,
        lam_B=_log10(lam_2B.prod(0).sqrt()),
        lam_inf=float(_log10(lam_inf)),
        scores_H=_log10(scores_HDD.abs().amax((-2, -1))),
        values_H=_log10(inf_norm(values_HDD)),
    )


def mlp_stretch(mlp: MLP, lipschitz: float) -> Tensor:
    """By how much an MLP with this largest slope of its activation can stretch the 1-norm and the inf-norm of
    Y - 1 y^T; shape (2,), upper bounds.

    Entry by entry |f(Y) - f(1 y^T)| <= |Y - 1 y^T| M with M = Lip |W_up| |W_down|, because f works token by token and
    its activation stretches no difference by more than Lip. Both norms grow with the entries' absolute values, so
    ||f(Y) - f(1 y^T)||_p <= ||M||_p ||Y - 1 y^T||_p for p = 1, inf: what the proof of Cor. 3.2 uses, with
    lambda_{1,inf} = sqrt(||M||_1 ||M||_inf). The least such constants are NP-hard to find (sec. 3.2).
    """
    m_DD = lipschitz * mlp.up.weight.T.abs() @ mlp.down.weight.T.abs()
    return torch.stack([one_norm(m_DD), inf_norm(m_DD)])


def _norm_gains(
    block: Block, norm: Norm | None, name: str, trace: Trace, present_BN: Tensor | None
) -> tuple[Tensor, Tensor]:
    """||C||_1 s and ||C||_inf s of the norm before the sub-layer, and of the norm behind it; each (2, B), 1 for none.

    C the norm's linear map without its scale, s the sequence's largest scale.
    """
    scale_BN1 = trace.get(f"{name}.norm_scale")
    num_sequences = len(trace["embedding"])
    one_2B = trace["embedding"].new_ones(2, num_sequences)
    if norm is None:
        return one_2B, one_2B
    scale_BN = scale_BN1[..., 0] if present_BN is None else scale_BN1[..., 0].masked_fill(~present_BN, 0)
    c_DD = norm.linear(torch.eye(norm.width).to(scale_BN1), torch.ones_like(scale_BN1[0, :1]))
    gain_2B = torch.stack([one_norm(c_DD), inf_norm(c_DD)])[:, None] * scale_BN.amax(1)
    return (gain_2B, one_2B) if block.place == "pre" else (one_2B, gain_2B)


def _measured(x_BND: Tensor, lengths_B: Tensor | None) -> dict[str, np.ndarray]:
    """log10 of the residual, of what it is at least for any x, and of the diameter, none below the noise floor; where
    the residual is clear of that floor, and where it is below."""

    def measure(x_BND: Tensor) -> dict[str, Tensor]:
        residual_B, floor_B = composite_norm(residual_matrix(x_BND)), noise_floor(x_BND)
        diameter_B = torch.cdist(x_BND, x_BND, p=1).amax((1, 2))
        # the median is the best x for the 1-norm; of the inf-norm no x leaves less than half the diameter
        least_B = one_norm(residual_matrix(x_BND, "l1")).sqrt() * (diameter_B / 2).sqrt()
        values = {"residual": residual_B.maximum(floor_B), "least": least_B.maximum(floor_B)}
        values["diameter"] = diameter_B.maximum(torch.finfo(x_BND.dtype).eps * inf_norm(x_BND))
        return values | {"clear": residual_B > CLEAR * floor_B, "below_floor": residual_B <= floor_B}

    found = measure(x_BND) if lengths_B is None else per_length(measure, x_BND, lengths_B)
    return {name: value.cpu().numpy() if value.dtype == torch.bool else _log10(value) for name, value in found.items()}


def _log10(value: Tensor) -> np.ndarray:
    """Zero counts as the smallest float64."""
    return value.clamp(min=torch.finfo(torch.float64).tiny).log10().cpu().numpy()


def digest(table: pd.DataFrame) -> str:
    """Bounds beside the measured residual by layer, mean over seeds, and whether they hold, for a terminal."""
    axes = ["weights", "variant", "bound"]
    last = table[table.layer == table.layer.max()]
    seen = table[table.bound == "layer"].assign(bound="measured", log10_bound=lambda rows: rows.log10_measured)
    mean = pd.concat([seen, table]).pivot_table("log10_bound", axes, "layer", "mean", sort=False)
    shown = thinned(mean.sort_index(level=axes[:2], sort_remaining=False)).map("{:.4g}".format)
    worst = table[table.layer > 0].groupby(axes, sort=False)[["slack_min", "holds"]].min().round(3)
    return (
        f"log10 of bounds and residual by layer (mean of {last.seed.nunique()} seeds)\n{shown.to_string()}\n"
        f"smallest slack in decades, and share of sequences where the bound holds (worst layer)\n{worst.to_string()}"
    )


def check_plan(plan: Plan, _: Options) -> None:
    """ConfigError for an attention that the bounds are not about."""
    _check_attention(plan.model)


def _check_attention(model: Transformer) -> None:
    if model.cfg.attention != "dot" or any(block.attention.mixes for block in model.blocks):
        raise ConfigError(
            "analysis=bounds: needs the softmax of dot products alone; use model.attention=dot, mix_attention=1, "
            "mix_identity=0, mix_uniform=0 and, with more than one copy of the heads, head_reduction=sum"
        )


ANALYSIS = Analysis(Options, table, draw_bounds, digest, check=check_plan)

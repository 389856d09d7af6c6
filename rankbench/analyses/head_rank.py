"""The rank of attention heads, and the errors that they reach (Amsel, Yehudai and Bruna; Garg et al. 2022).

Shapes: B batch, N token, C output dimension, D width, H head, K head width.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.config.keys import ConfigError, key
from rankbench.measures import amsel_theory
from rankbench.measures.lipschitz_of_networks import head_maps, rounding_of_spectra, spectra
from rankbench.model.network import Network
from rankbench.model.transformer import Transformer
from rankbench.plots.head_rank import draw_head_rank
from rankbench.runs.tables import mean_of_seeds
from rankbench.tasks import Batch, Task
from rankbench.tasks.linear_regression import BASELINES, LinearRegression, examples_of
from rankbench.tasks.nearest_neighbor import NearestNeighbor
from rankbench.tasks.task import is_scored

AT_A_TIME = 500  # sequences in one forward pass
HARD = 1e-30  # temperature at which a softmax is a hardmax: float64 scores that differ at all differ by far more


@dataclass(frozen=True)
class Options:
    """How many heads, singular values and sequences are measured. Only a regression has errors."""

    heads: int | None = key("Number of heads of each layer whose matrices are measured. null: all.", at_least=0)
    spectrum: int = key("Number of singular values kept of each matrix.", at_least=1)
    sequences: int | None = key("Number of test sequences on which errors are measured. null: all.", at_least=1)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each error of a network or of a baseline, and for each matrix of each head.

    Networks and baselines have rows only if the task is a regression; otherwise evaluation, examples and error are
    empty.
    """
    task, model = subject.task, subject.network
    is_regression = subject.test.targets.is_floating_point()
    test = subject.test[: options.sequences]
    rows = []
    for weights, given in subject.networks.items():
        for evaluation, network in (("soft", given), ("hard", hard(given))) if is_regression else ():
            outputs = torch.cat([network(chunk) for chunk in test.inputs.split(AT_A_TIME)])
            axes = {"of": "network", "weights": weights, "evaluation": evaluation}
            rows += [axes | row for row in errors(task, outputs, test)]
        rows += [{"of": "head", "weights": weights, **row} for row in _heads(given, options)]
    for name, outputs in baselines(task, subject.train[:10_000], test) if is_regression else ():
        axes = {"of": "baseline", "weights": "none", "evaluation": name}
        rows += [axes | row for row in errors(task, outputs, test)]
    if not is_regression:
        rows = [row | {"evaluation": None, "examples": float("nan"), "error": float("nan")} for row in rows]
    heads, rank, width = model.num_heads, model.attentions[0].head_width, model.width
    common = {"layers": model.num_layers, "heads": heads, "rank": rank, "width": width, "copies": heads * rank / width}
    common["angle_limit"] = amsel_theory.angle_limit(width, min(rank, width))
    if isinstance(task, NearestNeighbor) and bounded(model, task):
        for form in amsel_theory.FORMS:
            common[f"bound_{form}"] = amsel_theory.lower_bound(task.dimension, rank, heads, form)
    return pd.DataFrame(rows).assign(**common)


@torch.no_grad()
def hard(model: Transformer) -> Transformer:
    """Copy of the network in which every softmax is a hardmax: a head copies the value of the largest score."""
    hardened = copy.deepcopy(model)
    for attention in hardened.attentions:
        attention.temperature = HARD
    return hardened


def errors(task: Task, outputs_BNC: Tensor, batch: Batch) -> Iterator[dict]:
    """Mean error over the scored tokens; for regression in context, for each number of examples before them."""
    scale = getattr(task, "error_scale", 1.0)
    error_BN = scale * (outputs_BNC - batch.targets).square().mean(-1)
    if isinstance(task, LinearRegression):
        for examples in range(task.points):
            yield {"examples": examples, "error": error_BN[:, 2 * examples].mean().item()}
    else:
        points = task.points if isinstance(task, NearestNeighbor) else error_BN.shape[1]
        yield {"examples": points, "error": error_BN[is_scored(batch.targets)].mean().item()}


def baselines(task: Task, train: Batch, test: Batch) -> Iterator[tuple[str, Tensor]]:
    """Outputs of simple predictors on the test sequences, by name, (B, N, C).

    For the nearest neighbour `linear` is the best linear predictor that is equivariant under permutations and rotations
    of the points: a x_i + b (sum of the others), by least squares on the training set. No quadratic predictor is
    better, because the answer is odd in the points. `linear attention` is cubic and adds c sum_j (x_i.x_j) x_j.
    """
    yield "zero", torch.zeros_like(test.targets)
    if isinstance(task, LinearRegression):
        x_BED, y_BE = examples_of(test)
        for name, predict in BASELINES.items():
            outputs_BN1 = torch.zeros_like(test.targets)
            outputs_BN1[:, 0::2, 0] = predict(x_BED, y_BE)
            yield name, outputs_BN1
    if isinstance(task, NearestNeighbor):
        for name, number in (("linear", 2), ("linear attention", 3)):
            features = [_features(batch)[..., :number] for batch in (train, test)]
            scored = is_scored(train.targets)
            rows, wanted = features[0][scored].flatten(0, 1), train.targets[scored].flatten()
            # on the CPU, because the driver for CUDA assumes full rank
            weights = torch.linalg.lstsq(rows.cpu(), wanted[:, None].cpu()).solution[:, 0]
            yield name, features[1] @ weights.to(rows.device)


def _features(batch: Batch) -> Tensor:
    """x_i, the sum of the others, and sum_j (x_i.x_j) x_j over the others; (B, N, C, 3)."""
    x_BNC = batch.inputs
    others_BNC = x_BNC.sum(1, keepdim=True) - x_BNC
    products_BNN = x_BNC @ x_BNC.mT
    cubic_BNC = products_BNN @ x_BNC - products_BNN.diagonal(dim1=1, dim2=2)[..., None] * x_BNC
    return torch.stack([x_BNC, others_BNC, cubic_BNC], dim=-1)


def bounded(model: Transformer, task: NearestNeighbor) -> bool:
    """Whether the lower bounds apply to the network: a single layer of heads without any other part, in which a query
    sees two orthonormal points but not itself."""
    cfg = model.cfg
    return (
        (task.queries, task.points, cfg.layers, cfg.mask) == ("separate", 2, 1, "others")
        and (cfg.skip, cfg.mlp, cfg.norm, cfg.read_in, cfg.read_out) == (False, False, "none", "identity", "identity")
        and (cfg.attention, cfg.positions, cfg.embedding_norm) == ("dot", "none", False)
    )


def _heads(network: Network, options: Options) -> Iterator[dict]:
    for layer, attention in enumerate(network.attentions, 1):
        for matrix, maps in head_maps(attention).items():
            sides = [side_HDK[: options.heads].detach() for side_HDK in maps]
            measured = (*spectra(*sides), rounding_of_spectra(*sides))
            for head, (sigma_S, angle, floor) in enumerate(zip(*measured, strict=True), 1):
                axes = {"layer": layer, "head": head, "matrix": matrix}
                norms = {"frobenius_norm": sigma_S.norm().item(), "spectral_norm": sigma_S[0].item()}
                rank = torch.special.entr(sigma_S / sigma_S.sum()).sum().exp().item()
                kept = {f"sigma_{number}": s for number, s in enumerate(sigma_S[: options.spectrum].tolist(), 1)}
                ranks = {"effective_rank": rank, "numerical_rank": int((sigma_S > floor).sum())}
                yield axes | norms | ranks | {"angle": angle.item()} | kept


def digest(table: pd.DataFrame) -> str:
    """Errors and angles, means over seeds, for a terminal."""
    networks = table[table.of != "head"]
    error = networks.groupby(["weights", "evaluation"], sort=False).error.mean()
    errors = f"error, {mean_of_seeds(table.seed.nunique())}\n{error.round(4).to_string()}\n" if len(error) else ""
    medians = ""
    if len(heads := table[table.of == "head"]):
        of_layers = heads.groupby(["weights", "layer", "matrix"], sort=False)
        measured = of_layers[["angle", "effective_rank", "frobenius_norm"]].median()
        medians = f"heads, medians\n{measured.round(2).to_string()}"
    bounds = [f"{name} {table[name].iloc[0]:.4f}" for name in table if name.startswith("bound_")]
    lines = [errors + medians, ", ".join(bounds)]
    return "\n".join(filter(None, lines))


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError if neither heads nor errors are measured."""
    if options.heads == 0 and subject.task.target_kind != "numbers":
        raise ConfigError(
            "analysis.head_rank.heads=0: leaves nothing to measure, because only a regression has errors; use 1 or more"
        )


COLUMNS = {
    "of": "network, baseline or head.",
    "weights": "trained or initialised; none for a baseline.",
    "evaluation": "Of a network: soft, as trained, or hard, every softmax a hardmax (equal scores are averaged); of a "
    "baseline: its name.",
    "examples": "Number of points, or of examples in the context.",
    "error": "Scaled as in the papers, so that predicting 0 has the error 1.",
    "layer": "Number of the layer.",
    "head": "Number of the head, from 1.",
    "matrix": "qk: W_QK, the bilinear form of the scores that enter the softmax, missing for rotary and relative "
    "scores; vo: W_VO (rankbench.measures.lipschitz_of_networks.head_maps).",
    "frobenius_norm": "Of the matrix.",
    "spectral_norm": "Of the matrix.",
    "effective_rank": "exp of the entropy of s / sum s, s its singular values.",
    "numerical_rank": "Number of singular values that are larger than rounding alone can make them "
    "(rankbench.measures.lipschitz_of_networks.rounding_of_spectra).",
    "angle": "Degrees to the identity: arccos(tr M / (||M||_F sqrt D)).",
    "sigma_<k>": "Singular value number k, the largest first.",
    "layers": "Number of layers. This and the next ones are the same in all rows.",
    "heads": "Number of heads of each layer.",
    "rank": "Head width.",
    "width": "Width of the network.",
    "copies": "heads * rank / width.",
    "angle_limit": "Largest angle of that rank (degrees).",
    "bound_sharp": "Lower bound on the error of heads of this rank and number, for value maps that are multiples of "
    "the identity, where it applies (rankbench.measures.amsel_theory).",
    "bound_slide": "The same bound as the authors' slides print it.",
    "bound_any": "The same bound for every value map.",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_head_rank,
    digest,
    COLUMNS,
    ("angle_limit",),
    needs={"sublayers"},
    check=check,
    drawn_apart=("layers", "heads", "copies", "examples"),
)

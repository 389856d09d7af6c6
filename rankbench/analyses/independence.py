"""Do paths work independently? The five measures of weak interdependence, and the interference of paths of a length.

1 orthogonality of outputs, 2 covariance over inputs, 3 additivity, 4 cross-gradients of the loss, 5 mutual information
(estimators in rankbench.measures.dependence). Frozen paths add up to the output whatever the network does (Theorem 2.1
of Dong et al. 2021), so only recomputed paths can fail the third. All paths are functions of the same input, without
noise: the mutual information of two injective ones is the entropy of the input. Small values therefore only describe
what an estimator of finite resolution can see.

Shapes: B batch, N token, D width, L layer, H head, K path length, U unit (a sum or a path), A head of the network.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.columns import WHOLE_ACCURACY
from rankbench.config.keys import ConfigError, key
from rankbench.measures import dependence, paths
from rankbench.measures.cross_gradients import cross_gradients, head_parameters
from rankbench.measures.dong_theory import num_paths
from rankbench.measures.frozen_network import sums_by_length
from rankbench.measures.interaction import (
    interaction,
    interactions_of_pairs,
    interference,
    share_below_floor,
    squares_by_signs,
    squares_of_paths,
)
from rankbench.measures.norms import cosine, without_absent
from rankbench.measures.recomputed_network import RecomputedNetwork, check_recomputed
from rankbench.model.transformer import Transformer
from rankbench.plots.independence import draw_independence
from rankbench.seeds import generator_for
from rankbench.tasks import Batch, Corpus, Finite

log = logging.getLogger(__name__)

FEWEST = 30  # sequences that an estimate over inputs needs


@dataclass(frozen=True)
class Options:
    """How dependence between paths is estimated."""

    schemes: list[str] = key("Which paths are measured.", choices=("frozen", "recomputed"), nonempty=True)
    sequences: int | None = key("Number of test sequences. null: all.", at_least=FEWEST)
    tokens: int = key("Number of tokens of a sequence at which dependence over inputs is measured.", at_least=1)
    paths_per_length: int = key("Number of sampled paths of each length, all pairs of which are measured.", at_least=1)
    components: int = key("Number of components of an output that estimates of information use.", at_least=1)
    neighbours: int = key("k of the KSG estimator.", at_least=1)
    probes: int = key("Number of random directions for each head, for cross-gradients.", at_least=2)
    hessian_sequences: int = key("Number of test sequences for cross-gradients.", at_least=1)
    max_paths: int = key("Up to this number of paths, all of them are run.", at_least=0)
    sign_draws: int = key("Number of random signs where not all paths are run.", at_least=2)

    def __post_init__(self) -> None:
        if max(2 * self.components, self.neighbours) >= FEWEST:
            raise ConfigError(
                f"analysis.independence.components={self.components}, neighbours={self.neighbours}: "
                f"twice the components, and the neighbours, must be below {FEWEST} observations"
            )


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each pair of units, each pair once; and one for the whole network.

    Numbers over inputs are means over tokens of the sequence. Units are sums of all paths of a length, single paths,
    and heads, which only networks of ours have.
    """
    test = subject.test[: options.sequences]
    _check_number(len(test.inputs))
    rows = []
    for scheme in options.schemes:
        for part in (_length_rows, _path_rows):
            rows += [{"scheme": scheme} | row for row in part(subject, test.inputs, scheme, options)]
    generator = generator_for(subject.seed, "cross_gradients")
    if subject.foreign is None:
        rounding = generator_for(subject.seed, "rounding")
        rows += _head_pairs(subject.network, test[: options.hessian_sequences], options.probes, generator, rounding)
    return pd.DataFrame(rows, columns=list(ROWS)).assign(whole_accuracy=subject.score(test).accuracy.item())


def _length_rows(subject: Subject, inputs: Tensor, scheme: str, options: Options) -> Iterator[dict]:
    """Rows of the whole network and of pairs of sums by length; none if that takes too many recomputed paths."""
    model, lengths = subject.network, subject.network.path_lengths
    layers, heads, skip = model.path_choices
    present_BN = model.counted(inputs)
    counts = [num_paths(layers, heads, length, skip) for length in lengths]
    few = sum(counts) <= options.max_paths
    groups = [paths.all_paths(layers, heads, length, skip) for length in lengths] if few else []
    if scheme == "recomputed" and not few:
        log.info(f"not all {Decimal(sum(counts)):.3g} recomputed paths are run: analysis.independence.max_paths")
        return

    def sums_and_sides(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias_BND: Tensor | float
        if scheme == "frozen":
            all_KBND, bias_BND, state_BND = sums_by_length(model, inputs)
            sums_KBND = all_KBND[lengths]
        else:
            sums_KBND, bias_BND = paths.sums_of_groups(RecomputedNetwork(model, inputs), groups), 0.0
            state_BND = model.state(inputs)
        return sums_KBND, state_BND[None], (sums_KBND.sum(0) + bias_BND)[None]

    sums_KBND, joint_1BND, sum_1BND = sums_and_sides(inputs)
    mean = interaction(model, joint_1BND, sum_1BND, present_BN).mean().item()
    rounding = generator_for(subject.seed, "rounding")
    sides = (joint_1BND, sum_1BND, lambda inputs: sums_and_sides(inputs)[1:])
    (below,) = share_below_floor(model, inputs, *sides, rounding)
    yield {"of": "network", "interaction": mean, "interaction_below_floor": below}
    if few:
        terms_SK = squares_of_paths(model, scheme, inputs, groups)[None]
    else:
        signs = generator_for(subject.seed, "signs")
        terms_SK = squares_by_signs(model, inputs, options.sign_draws, signs)[:, lengths]
    squares_K = without_absent(sums_KBND, present_BN).flatten(1).double().square().sum(1)
    for (j, k), measured in _pairs(sums_KBND, present_BN, options, combinations_with_replacement):
        row = {"of": "lengths", "first": f"S{lengths[j]}", "second": f"S{lengths[k]}", **measured}
        row |= {"first_length": lengths[j], "second_length": lengths[k]}
        if j == k:
            share, error = interference(squares_K[k], terms_SK[:, k])
            row |= {"num_paths": counts[k], "interference": share, "interference_se": error}
        yield row


def _path_rows(subject: Subject, inputs: Tensor, scheme: str, options: Options) -> Iterator[dict]:
    """Pairs of sampled paths, the same ones for both schemes."""
    model, number = subject.network, options.paths_per_length
    layers, heads, skip = model.path_choices
    generator = generator_for(subject.seed, "independence")
    sampled = [
        paths.sample_paths(layers, heads, length, number, generator, replacement=False, skip=skip)
        for length in model.path_lengths
    ]
    paths_PL = np.concatenate(sampled)
    interactions: dict[tuple[int, int], dict[str, float]] = {}
    if scheme == "recomputed":
        rounding = generator_for(subject.seed, "rounding")
        interactions = interactions_of_pairs(model, inputs, paths_PL, options.max_paths, rounding)
    outputs_PBND = paths.sums_of_groups(paths.paths_as(scheme, model, inputs), list(paths_PL[:, None]))
    for (j, k), measured in _pairs(outputs_PBND, model.counted(inputs), options, combinations):
        row = {"of": "paths", **measured, **interactions.get((j, k), {})}
        for side, path_L in (("first", paths_PL[j]), ("second", paths_PL[k])):
            row |= {side: "-".join(map(str, path_L)), f"{side}_length": int((path_L > 0).sum())}
        yield row


class OutputForms(NamedTuple):
    """One unit's outputs at one token, in the forms that the estimators read."""

    values: np.ndarray
    components: np.ndarray
    linear: np.ndarray
    gaussian: np.ndarray


def _pairs(
    units_UBND: Tensor, present_BN: Tensor | None, options: Options, pairs: Callable
) -> Iterator[tuple[tuple[int, int], dict[str, float]]]:
    """Each pair of units with its measures."""
    chosen = list(pairs(range(len(units_UBND)), 2))
    masked_UBX = without_absent(units_UBND, present_BN).flatten(2)
    cosines = {(j, k): cosine(masked_UBX[j], masked_UBX[k]).mean().item() for j, k in chosen}
    measures_of_pair: dict[tuple[int, int], list[dict[str, float]]] = {pair: [] for pair in chosen}
    num_tokens = units_UBND.shape[2]
    for token in np.unique(np.linspace(0, num_tokens - 1, min(options.tokens, num_tokens)).round().astype(int)):
        has_token_B = slice(None) if present_BN is None else present_BN[:, token]
        observed_UND = units_UBND[:, has_token_B, token].cpu().numpy()
        if observed_UND.shape[1] >= FEWEST:
            seen = [_seen(x_ND, options.components) for x_ND in observed_UND]
            for j, k in chosen:
                measures_of_pair[j, k].append(_dependence(seen[j], seen[k], options.neighbours, itself=j == k))
    for pair in chosen:
        means = pd.DataFrame(measures_of_pair[pair], columns=list(DEPENDENCE)).mean()
        yield pair, {"cosine": cosines[pair], **means.to_dict()}


def _seen(x_ND: np.ndarray, components: int) -> OutputForms:
    scores_NR, wide_ND = dependence.whitened(x_ND, components), x_ND.astype(np.float64)
    near_one_ND = dependence.near_one(wide_ND)
    return OutputForms(wide_ND, scores_NR, dependence.linear_gram(near_one_ND), dependence.gaussian_gram(near_one_ND))


def _dependence(x: OutputForms, y: OutputForms, neighbours: int, itself: bool) -> dict[str, float]:
    if min(x.components.shape[1], y.components.shape[1]) == 0:
        return {}  # one of them does not vary by more than rounding
    measured = {
        "covariance": dependence.covariance(x.values, y.values),
        "correlation": dependence.correlation(x.values, y.values),
        "hsic": dependence.unbiased_hsic(x.gaussian, y.gaussian),
        "alignment_linear": dependence.alignment(x.linear, y.linear),
        "alignment_gaussian": dependence.alignment(x.gaussian, y.gaussian),
    }
    if itself:  # a continuous variable has infinite information on itself
        return measured
    return measured | {
        "information_gaussian": dependence.gaussian_information(x.components, y.components),
        "information_ksg": dependence.ksg_information(x.components, y.components, neighbours),
    }


def _head_pairs(model: Transformer, batch: Batch, probes: int, *generators: torch.Generator) -> Iterator[dict]:
    norm_AA, error_AA, floor_AA = cross_gradients(model, batch, probes, *generators)
    is_rounding_AA = norm_AA <= floor_AA
    names = [f"L{layer + 1}H{head + 1}" for layer in range(model.num_layers) for head in range(model.num_heads)]
    for a, b in combinations_with_replacement(range(len(names)), 2):
        size, error = norm_AA[a, b].item(), error_AA[a, b].item()
        own = (norm_AA[a, a] * norm_AA[b, b]).sqrt().item()
        row = {"of": "heads", "first": names[a], "second": names[b], "cross_gradient": size, "cross_gradient_se": error}
        row["cross_gradient_below_floor"] = float(is_rounding_AA[a, b])
        undefined = own == 0 or is_rounding_AA[a, a] or is_rounding_AA[b, b]
        yield row | {"cross_gradient_relative": float("nan") if undefined else size / own}


def digest(table: pd.DataFrame) -> str:
    """Each measure's mean over pairs of different units, then over seeds, for a terminal."""
    apart = table[(table.of != "network") & (table["first"] != table["second"])]
    columns = ["cosine", "correlation", "alignment_linear", "information_ksg", "interaction", "cross_gradient_relative"]
    sizes = apart.assign(**apart[columns].abs()).groupby(["of", "scheme"], sort=False, dropna=False)[columns].mean()
    interference = table.dropna(subset="interference").pivot_table("interference", "scheme", "first_length", "mean")
    return (
        f"size of each measure, mean over pairs and {table.seed.nunique()} seeds\n{sizes.round(3).to_string()}\n"
        f"interference by path length (1: orthogonal)\n{interference.round(2).to_string()}"
    )


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError for too few sequences, for heads that share parameters, and for paths that there are not."""
    task = subject.task
    number = task.num_test if isinstance(task, Finite) else task.test_size
    if number is None and not isinstance(task, Corpus):
        number = task.train_size
    if number is not None:  # a text has an unknown number of sequences, and is not read here
        _check_number(number)
    if isinstance(subject.network, Transformer):
        head_parameters(subject.network)
    if "recomputed" in options.schemes:
        check_recomputed(subject.network, "independence")


def _check_number(number: int) -> None:
    if number < FEWEST:
        raise ConfigError(f"analysis=independence: needs at least {FEWEST} test sequences; this task has {number}")


DEPENDENCE = {
    "covariance": "Covariance of the outputs over inputs.",
    "correlation": "Correlation of the outputs over inputs.",
    "information_gaussian": "Mutual information over inputs (nats), as of Gaussian outputs.",
    "information_ksg": "Mutual information over inputs (nats), by the KSG estimator.",
    "hsic": "Hilbert-Schmidt independence criterion over inputs.",
    "alignment_linear": "Alignment of the kernels over inputs, of a linear kernel.",
    "alignment_gaussian": "The same of a Gaussian kernel.",
}
ROWS = {
    "of": "lengths: sums S_j and S_k; paths: single paths; heads; network: the whole network beside the sum of all "
    "paths.",
    "scheme": "frozen or recomputed; empty for heads.",
    "first": "One unit. Of a path its choices by layer, 0 the skip.",
    "second": "The other.",
    "first_length": "Path length of the first.",
    "second_length": "Path length of the second.",
    "cosine": "Cosine of the angle between the outputs, mean over sequences.",
    **DEPENDENCE,
    "interaction": "||n(f) - n(sum)|| / ||n(f)||, n the norm before the read-out. Of recomputed paths: f is the "
    "output of the network that has both paths' choices in each layer, sum the sum of all paths that combine these "
    "choices; of the network: f is all of it, sum that of all paths (frozen: and of the biases).",
    "interaction_below_floor": "Share of the first sequences (16 at most) whose interaction is no more than rounding "
    "(rankbench.measures.rounding).",
    "num_paths": "Number of paths of the length; on the diagonal, as the next two.",
    "interference": "||S_k||^2 / sum_p ||Y_p||^2. 1: orthogonal paths; num_paths: identical ones.",
    "interference_se": "Its standard error. 0: every path was run.",
    "cross_gradient": "Frobenius norm of the loss' second derivatives by the parameters of one head and of the other.",
    "cross_gradient_se": "Its standard error.",
    "cross_gradient_relative": "cross_gradient over the root of the product of the two heads' own; nan where one of "
    "these is rounding.",
    "cross_gradient_below_floor": "1 where cross_gradient is no more than rounding, else 0.",
}
COLUMNS = ROWS | WHOLE_ACCURACY
ANALYSIS = Analysis(
    Options,
    table,
    draw_independence,
    digest,
    COLUMNS,
    ("interference",),
    needs={"sublayers"},
    check=check,
    trained_alone=True,
    most_panels=6,
)

"""How few paths carry the prediction: accuracy by the number of frozen paths that are kept.

The parts that are kept are single paths or, in networks with too many, groups of paths; each path is in one group. All
parts and the bias term add up to the state that the network's own read-out reads. Parts are chosen on training
sequences and scored on the test set; for a checkpoint they are chosen on at most the first half of its texts, and
scored on the others.

Shapes: B batch, N token, D width, L layer, P path or group of paths, C class or output dimension, T scored token; X is
C where the read-out is linear, so that each part has logits of its own, else D.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from rankbench.analyses.analysis import Analysis, Subject, chunks
from rankbench.analyses.columns import SPECIAL_TOKENS, WHOLE_ACCURACY
from rankbench.config.keys import ConfigError, key
from rankbench.measures.dong_theory import num_paths
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_last_head
from rankbench.measures.norms import without_absent
from rankbench.measures.paths import NUMBERS_AT_A_TIME, all_paths, sums_of_groups
from rankbench.model.network import Network
from rankbench.model.transformer import FirstCoordinates
from rankbench.plots.pruning import draw_pruning, what_is_kept
from rankbench.progress import counted
from rankbench.runs.tables import mean_of_seeds, thinned
from rankbench.seeds import generator_for
from rankbench.tasks import Batch
from rankbench.tasks.task import Score, is_scored, majority_baselines, score


@dataclass(frozen=True)
class Options:
    """What is kept in which order, and where the prediction is scored."""

    parts: str = key(
        "What is kept: single paths, or all paths with one last head, or all of one length.",
        choices=("path", "last_head", "length"),
    )
    orders: list[str] = key("Orders in which paths are kept.", choices=("greedy", "norm", "random"), nonempty=True)
    mlp: str = key("MLPs of frozen paths: linear with frozen gates, or a constant.", choices=("gate", "source"))
    random_orders: int = key("Number of random orders.", at_least=1)
    selection_sequences: int = key(
        "Number of training sequences on which paths are chosen; of a checkpoint at most half of its texts.", at_least=1
    )
    sequences: int | None = key("Number of test sequences. null: all.", at_least=1)
    counts: int = key("Numbers of paths at which the prediction is scored, spaced evenly on a log axis.", at_least=1)
    max_paths: int = key(
        "Most parts of a network. The time of greedy selection grows with the square of their number.", at_least=1
    )


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each number of parts that are kept: the read-out of the bias term and the first `kept` parts of an
    order.

    A read-out that is not linear reads each sum as it is; nothing in it is frozen.
    """
    model = subject.network
    number = _check_number(model, options)
    lengths_P = _mean_lengths(model, options.parts)
    train, test = subject.train, subject.test[: options.sequences]
    if subject.foreign is not None:  # a checkpoint has no training sequences
        train, test = _halves(subject.test, options)
    chosen = train[: options.selection_sequences]
    orders = list(_orders(subject, chosen, number, options))
    counts = np.unique(np.r_[0, np.geomspace(1, number, options.counts).round().astype(int)])
    sums: list[list[Score]] = [[] for _ in orders]
    read = _reader(model)
    for batch, parts in _parts(model, test, options, "pruning: sequences"):
        for scores, (_, _, order_P) in zip(sums, orders, strict=True):
            scores.append(_scores(parts.sums_PBNX[order_P], parts.bias_BNX, batch.targets, counts, read))
    rows = []
    for scores, (order, repeat, order_P) in zip(sums, orders, strict=True):
        loss_M, right_M, tokens = (sum(parts) for parts in zip(*scores, strict=True))
        for kept, loss, right in zip(counts, loss_M / tokens, right_M / tokens, strict=True):
            row = {"order": order, "repeat": repeat, "kept": int(kept), "kept_share": kept / number}
            row |= {"accuracy": right.item(), "loss": loss.item()}
            rows.append(row | {"path_length": lengths_P[order_P[:kept]].mean() if kept else None})
    whole = subject.score(test)
    return pd.DataFrame(rows).assign(
        parts=options.parts,
        **subject.what_counts,
        whole_accuracy=whole.accuracy.item(),
        whole_loss=whole.mean_loss.item(),
        majority_accuracy=majority_baselines(train, test, subject.task.num_outputs)["majority"],
    )


def _halves(texts: Batch, options: Options) -> tuple[Batch, Batch]:
    """Texts on which parts are chosen, and those on which they are scored; ConfigError for nothing to score."""
    number = min(options.selection_sequences, len(texts.inputs) // 2)
    chosen, test = texts[:number], texts[number:][: options.sequences]
    if not all(is_scored(half.targets).any() for half in (chosen, test)):
        raise ConfigError(
            "analysis=pruning: needs predicted tokens in two texts, to choose paths and to score them; take a causal "
            "language model, masked=0.15 with a masked one, or more texts"
        )
    return chosen, test


def _check_number(model: Network, options: Options) -> int:
    """Number of parts of the network; ConfigError if more than analysis.pruning.max_paths."""
    layers, heads, skip = model.path_choices
    number = {
        "path": sum(num_paths(layers, heads, length, skip) for length in model.path_lengths),
        "last_head": 1 + layers * heads if skip else heads,
        "length": len(model.path_lengths),
    }[options.parts]
    if number > options.max_paths:
        parts, instead = "parts", ""
        if options.parts == "path":
            parts, instead = "paths", ", or keep groups of paths with analysis.pruning.parts=last_head or length"
        raise ConfigError(
            f"analysis.pruning.max_paths={options.max_paths}: the network has {Decimal(number):.3g} {parts}; "
            f"raise it, or take fewer layers or heads{instead}"
        )
    return number


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError for a network with too many paths, and for texts in which nothing is predicted."""
    _check_number(subject.network, options)
    if subject.foreign is not None:
        _halves(subject.test, options)


def _mean_lengths(model: Network, parts: str) -> np.ndarray:
    """Mean number of heads of the paths of each part, in the order of `_parts`."""
    layers, heads, skip = model.path_choices
    if parts == "path":
        return (_all_paths(model) > 0).sum(1)
    if parts == "length":
        return np.array(model.path_lengths)
    if not skip:
        return np.full(heads, layers)
    # before its last head a path takes each layer's skip or one of its heads
    before = np.arange(layers) * heads / (heads + 1)
    return np.r_[0, (1 + before).repeat(heads)]


def _all_paths(model: Network) -> np.ndarray:
    layers, heads, skip = model.path_choices
    return np.concatenate([all_paths(layers, heads, length, skip) for length in model.path_lengths])


def _orders(
    subject: Subject, chosen: Batch, number: int, options: Options
) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """Each order of the options with the number of its repeat, as indices of parts."""
    if {"greedy", "norm"} & set(options.orders):
        scored = []
        squares_P = torch.zeros((), device=subject.device)
        for batch, parts in _parts(subject.network, chosen, options, "pruning: sequences to choose on"):
            is_BN = is_scored(batch.targets)
            scored.append((parts.sums_PBNX[:, is_BN], parts.bias_BNX[is_BN], batch.targets[is_BN]))
            squares_P = squares_P + parts.squares_P
    for order in options.orders:
        if order == "greedy":
            sums, biases, targets = zip(*scored, strict=True)
            read = _reader(subject.network)
            yield order, None, greedy_order(torch.cat(sums, dim=1), torch.cat(biases), torch.cat(targets), read)
        elif order == "norm":
            yield order, None, squares_P.argsort(descending=True, stable=True).cpu().numpy()
        else:
            for repeat in range(options.random_orders):
                generator = generator_for(subject.seed, "pruning", repeat)
                yield order, repeat, torch.randperm(number, generator=generator).numpy()


class PathParts(NamedTuple):
    """The parts of some sequences and the bias term, all as logits or as states; ||Y_p||^2 of each part's states."""

    sums_PBNX: Tensor
    bias_BNX: Tensor
    squares_P: Tensor


def _parts(model: Network, batch: Batch, options: Options, what: str) -> Iterator[tuple[Batch, PathParts]]:
    """A few sequences at a time, with their parts. what: as in `chunks`."""
    paths_PL = _all_paths(model) if options.parts == "path" else None
    numbers = _check_number(model, options) * model.num_tokens(batch.inputs) * model.width
    at_a_time = max(1, NUMBERS_AT_A_TIME // numbers)
    for chunk in chunks(batch, at_a_time, what):
        network = FrozenNetwork(model, chunk.inputs, options.mlp)
        by_length_KBND, bias_BND, _ = network.by_length()
        if paths_PL is not None:
            sums_PBND = sums_of_groups(network, list(paths_PL[:, None]))
        elif options.parts == "length":
            sums_PBND = by_length_KBND[model.path_lengths]
        else:
            sums_PBND = sums_by_last_head(network)
            if not model.has_skips:  # every path has its last head in the last layer
                sums_PBND = sums_PBND[-model.num_heads :]
        squares_P = without_absent(sums_PBND, model.counted(chunk.inputs)).flatten(1).square().sum(1)
        if _has_logits(model):
            yield chunk, PathParts(sums_PBND @ model.read_out.weight.T, model.read_out(bias_BND), squares_P)
        else:
            yield chunk, PathParts(sums_PBND, bias_BND, squares_P)


def _has_logits(model: Network) -> bool:
    """Whether parts have logits of their own, and no more of them than there are numbers in a state."""
    read_out = model.read_out
    return isinstance(read_out, nn.Linear | FirstCoordinates) and len(read_out.weight) <= model.width


def _reader(model: Network) -> Callable[[Tensor], Tensor]:
    """The map from a sum of parts to the outputs."""
    return (lambda logits: logits) if _has_logits(model) else model.read_out


def greedy_order(sums_PBNX: Tensor, bias_BNX: Tensor, targets: Tensor, read: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Indices of all parts, (P,): each step adds the part that gives the smallest loss with those before it."""
    scored_BN = is_scored(targets)
    rest_PTX, sum_TX, targets_T = sums_PBNX[:, scored_BN], bias_BNX[scored_BN], targets[scored_BN]
    left = list(range(len(sums_PBNX)))
    at_a_time = max(1, NUMBERS_AT_A_TIME // read(sum_TX).numel())
    order = []
    for _ in counted(range(len(left)), len(left), "pruning: greedy steps"):
        losses_P = torch.cat(
            [_losses(read(sum_TX + parts_PTX), targets_T) for parts_PTX in rest_PTX[: len(left)].split(at_a_time)]
        )
        best = int(losses_P.argmin())
        sum_TX = sum_TX + rest_PTX[best]
        order.append(left[best])
        # the last part replaces the chosen one, so that the others need not be copied
        rest_PTX[best] = rest_PTX[len(left) - 1]
        left[best] = left[-1]
        left.pop()
    return np.array(order)


def _losses(outputs_PTC: Tensor, targets: Tensor) -> Tensor:
    """Loss of each of P outputs, (P,): cross-entropy for classes (targets_T), squared error for regression."""
    if targets.is_floating_point():
        return (outputs_PTC - targets).square().mean((1, 2))
    right_PT = outputs_PTC.gather(-1, targets.expand(outputs_PTC.shape[:2])[..., None])[..., 0]
    return (outputs_PTC.logsumexp(-1) - right_PT).mean(1)


def _scores(
    sums_PBNX: Tensor, bias_BNX: Tensor, targets: Tensor, counts: np.ndarray, read: Callable[[Tensor], Tensor]
) -> Score:
    """Scores of the bias term with the first `count` parts, for each of the M counts."""
    upto_PBNX = torch.cat([bias_BNX[None], sums_PBNX]).cumsum_(0)
    scores = [score(read(upto_PBNX[kept]), targets) for kept in counts]
    loss, right, tokens = zip(*scores, strict=True)
    return Score(torch.stack(loss), torch.stack(right), tokens[0])


def digest(table: pd.DataFrame) -> str:
    """Accuracy at some numbers of paths kept, mean over seeds and repeats, for a terminal."""
    mean = table.pivot_table("accuracy", "order", "kept", "mean", sort=False)
    accuracies = thinned(mean, 9)
    whole, majority = table.whole_accuracy.mean(), table.majority_accuracy.mean()
    return (
        f"accuracy by number of {what_is_kept(table)} kept ({mean_of_seeds(table.seed.nunique())})\n"
        f"{accuracies.round(3).to_string()}\n"
        f"whole network {whole:.3f}, commonest class {majority:.3f}"
    )


COLUMNS = {
    "order": "greedy: adds the part that gives the lowest loss on the selection sequences; norm: by the Frobenius "
    "norm of the parts' outputs there, largest first; random.",
    "repeat": "Number of the random order, from 0; empty for the others.",
    "kept": "Number of parts that are kept. 0: the bias term alone; the largest: the whole network.",
    "kept_share": "The same over the number of all parts.",
    "accuracy": "Share of tokens.",
    "loss": "Nats per token, or squared error.",
    "path_length": "Mean over the kept parts of the mean length of their paths; empty if none is kept.",
    "parts": "What the parts are. path: single paths; last_head: all paths with the same last head, and the path "
    "without heads; length: all paths of one length.",
    **SPECIAL_TOKENS,
    **WHOLE_ACCURACY,
    "whole_loss": "Loss of the whole network.",
    "majority_accuracy": "Accuracy of the commonest class.",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_pruning,
    digest,
    COLUMNS,
    ("kept_share",),
    needs={"sublayers"},
    check=check,
    trained_alone=True,
)

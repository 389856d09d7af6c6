"""How few paths carry the prediction: accuracy by the number of frozen paths that are kept.

The read-out is linear, so each path has its own logits. With those of the bias term they add up to the network's.
Paths are chosen on training sequences and scored on the test set.

Shapes: B batch, N token, D width, L layer, P path, C class or output dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Plan, Subject
from rankbench.keys import ConfigError, key
from rankbench.measures.paths import NUMBERS_AT_A_TIME, FrozenNetwork, all_paths, num_paths, sums_of_groups
from rankbench.model.transformer import Transformer
from rankbench.plots.pruning import draw_pruning
from rankbench.runs.tables import thinned
from rankbench.seeds import generator_for
from rankbench.tasks import Batch
from rankbench.tasks.task import Score, is_scored, majority_baselines, score


@dataclass(frozen=True)
class Options:
    """In which order paths are kept, and where the prediction is scored."""

    orders: list[str] = key("Orders in which paths are kept.", choices=("greedy", "norm", "random"), nonempty=True)
    mlp: str = key("MLPs of frozen paths: linear with frozen gates, or a constant.", choices=("gate", "source"))
    random_orders: int = key("Number of random orders.", at_least=1)
    selection_sequences: int = key("Number of training sequences on which paths are chosen.", at_least=1)
    sequences: int | None = key("Number of test sequences. null: all.", at_least=1)
    counts: int = key("Numbers of paths at which the prediction is scored, spaced evenly on a log axis.", at_least=1)
    max_paths: int = key("Most paths of a network. Greedy selection takes the square of their number.", at_least=1)


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: order (greedy | norm | random), repeat (of random only), kept: the read-out of the bias term and the first
    `kept` paths of the order. kept=0 is the bias term alone, the largest kept the whole network.

    greedy adds the path that gives the lowest loss on the selection sequences; norm takes paths by the Frobenius norm
    of their outputs there. Columns: kept_share (of all paths), accuracy (share of tokens), loss (per
    token), path_length (mean over the kept paths); then the numbers of the whole network and of the commonest class.
    """
    model = subject.model
    number = _check_number(model, options)
    layers, heads, skip = model.path_choices
    paths_PL = np.concatenate([all_paths(layers, heads, length, skip) for length in model.path_lengths])
    chosen, test = subject.train[: options.selection_sequences], subject.test[: options.sequences]
    orders = list(_orders(subject, chosen, paths_PL, options))
    counts = np.unique(np.r_[0, np.geomspace(1, number, options.counts).round().astype(int)])
    sums: list[list[Score]] = [[] for _ in orders]
    for batch, logits_PBNC, bias_BNC, _ in _logits(model, test, paths_PL, options.mlp):
        for scores, (_, _, order_P) in zip(sums, orders, strict=True):
            scores.append(_scores(logits_PBNC[order_P], bias_BNC, batch.targets, counts))
    used_P = (paths_PL > 0).sum(1)
    rows = []
    for scores, (order, repeat, order_P) in zip(sums, orders, strict=True):
        loss_M, right_M, tokens = (sum(parts) for parts in zip(*scores, strict=True))
        for kept, loss, right in zip(counts, loss_M / tokens, right_M / tokens, strict=True):
            row = {"order": order, "repeat": repeat, "kept": int(kept), "kept_share": kept / number}
            row |= {"accuracy": right.item(), "loss": loss.item()}
            rows.append(row | {"path_length": used_P[order_P[:kept]].mean() if kept else None})
    outputs = torch.cat([model(inputs) for inputs in test.inputs.split(1000)])
    whole = score(outputs, test.targets)
    return pd.DataFrame(rows).assign(
        whole_accuracy=whole.accuracy.item(),
        whole_loss=whole.mean_loss.item(),
        majority_accuracy=majority_baselines(subject.train, test, subject.task.num_outputs)["majority"],
    )


def _check_number(model: Transformer, options: Options) -> int:
    """Number of paths of the network; ConfigError if more than analysis.pruning.max_paths."""
    layers, heads, skip = model.path_choices
    number = sum(num_paths(layers, heads, length, skip) for length in model.path_lengths)
    if number > options.max_paths:
        raise ConfigError(
            f"analysis.pruning.max_paths={options.max_paths}: the network has {number:.3g} paths; "
            "raise it, or take fewer layers or heads"
        )
    return number


def check_plan(plan: Plan, options: Options) -> None:
    """Raise ConfigError for a network with too many paths."""
    _check_number(plan.model, options)


def _orders(
    subject: Subject, chosen: Batch, paths_PL: np.ndarray, options: Options
) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """Each order of the options with the number of its repeat, as indices of paths."""
    if {"greedy", "norm"} & set(options.orders):
        parts = list(_logits(subject.model, chosen, paths_PL, options.mlp))
        logits_PBNC = torch.cat([part[1] for part in parts], dim=1)
        bias_BNC = torch.cat([part[2] for part in parts])
        squares_P = sum(part[3] for part in parts)
    for order in options.orders:
        if order == "greedy":
            yield order, None, greedy_order(logits_PBNC, bias_BNC, chosen.targets)
        elif order == "norm":
            yield order, None, squares_P.argsort(descending=True, stable=True).cpu().numpy()
        else:
            for repeat in range(options.random_orders):
                generator = generator_for(subject.seed, "pruning", repeat)
                yield order, repeat, torch.randperm(len(paths_PL), generator=generator).numpy()


def _logits(
    model: Transformer, batch: Batch, paths_PL: np.ndarray, mlp: str
) -> Iterator[tuple[Batch, Tensor, Tensor, Tensor]]:
    """For a few sequences at a time: the sequences, the logits of each path and of the bias term, and ||Y_p||^2."""
    numbers = len(paths_PL) * batch.inputs.shape[1] * model.width
    at_a_time = max(1, NUMBERS_AT_A_TIME // numbers)
    for begin in range(0, len(batch.inputs), at_a_time):
        chunk = batch[begin : begin + at_a_time]
        network = FrozenNetwork(model, chunk.inputs, mlp)
        outputs_PBND = sums_of_groups(network, list(paths_PL[:, None]))
        present_BN = model.present(chunk.inputs)
        if present_BN is not None:
            outputs_PBND *= present_BN[..., None]
        logits_PBNC = outputs_PBND @ model.read_out.weight.T
        yield (
            chunk,
            logits_PBNC,
            model.read_out(network.sums_by_length().bias_BND),
            outputs_PBND.flatten(1).square().sum(1),
        )


def greedy_order(logits_PBNC: Tensor, bias_BNC: Tensor, targets: Tensor) -> np.ndarray:
    """Indices of all paths, (P,): each step adds the path that gives the smallest loss with those before it."""
    scored_BN = is_scored(targets)
    rest_PTC, sum_TC, targets_T = logits_PBNC[:, scored_BN], bias_BNC[scored_BN], targets[scored_BN]
    left = list(range(len(logits_PBNC)))
    at_a_time = max(1, NUMBERS_AT_A_TIME // sum_TC.numel())
    order = []
    while left:
        losses_P = torch.cat(
            [_losses(sum_TC + paths_PTC, targets_T) for paths_PTC in rest_PTC[: len(left)].split(at_a_time)]
        )
        best = int(losses_P.argmin())
        sum_TC = sum_TC + rest_PTC[best]
        order.append(left[best])
        # the last path replaces the chosen one, so that the others need not be copied
        rest_PTC[best] = rest_PTC[len(left) - 1]
        left[best] = left[-1]
        left.pop()
    return np.array(order)


def _losses(outputs_PTC: Tensor, targets: Tensor) -> Tensor:
    """Loss of each of P outputs, (P,): cross-entropy for classes (targets_T), squared error for regression."""
    if targets.is_floating_point():
        return (outputs_PTC - targets).square().mean((1, 2))
    right_PT = outputs_PTC.gather(-1, targets.expand(outputs_PTC.shape[:2])[..., None])[..., 0]
    return (outputs_PTC.logsumexp(-1) - right_PT).mean(1)


def _scores(logits_PBNC: Tensor, bias_BNC: Tensor, targets: Tensor, counts: np.ndarray) -> Score:
    """Scores of the bias term with the first `count` paths, for each of the M counts."""
    sums_PBNC = torch.cat([bias_BNC[None], logits_PBNC]).cumsum_(0)
    scores = [score(sums_PBNC[kept], targets) for kept in counts]
    loss, right, tokens = zip(*scores, strict=True)
    return Score(torch.stack(loss), torch.stack(right), tokens[0])


def digest(table: pd.DataFrame) -> str:
    """Accuracy at some numbers of paths kept, mean over seeds and repeats, for a terminal."""
    mean = table.pivot_table("accuracy", "order", "kept", "mean", sort=False)
    accuracies = thinned(mean, 9)
    whole, majority = table.whole_accuracy.mean(), table.majority_accuracy.mean()
    return (
        f"accuracy by number of paths kept (mean of {table.seed.nunique()} seeds)\n{accuracies.round(3).to_string()}\n"
        f"whole network {whole:.3f}, commonest class {majority:.3f}"
    )


ANALYSIS = Analysis(Options, table, draw_pruning, digest, ("kept_share",), check=check_plan)

"""The path-length spectrum of any network: how much of its output, and of its loss, comes from paths of each length.

All paths of a length are summed exactly, with attention weights, norm scales and gates frozen at the full forward pass
(Dong et al. 2021, Theorem 2.1; rankbench.model.tape). Embeddings and biases that pass no head are of length 0.

Shapes: B sequence, K path length, N token, C classes or output dimensions.
"""

import logging
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy
import torch
from torch import Tensor, nn

from rankbench.analyses.analysis import Analysis, Cost, ModuleSubject, Subject
from rankbench.analyses.cost import Operations
from rankbench.keys import key
from rankbench.measures.module_paths import (
    Heads,
    check_sums,
    heads_of,
    norms,
    of_counted,
    parts_with_floors,
    scores,
    sums_by_length,
)
from rankbench.measures.rounding import FLOOR_SEQUENCES
from rankbench.model.modules import Example
from rankbench.model.tape import Tape
from rankbench.plots.spectrum import draw_spectrum
from rankbench.progress import counted
from rankbench.seeds import generator_for

log = logging.getLogger(__name__)

RELATIVE = ("mass", "share", "error_upto")  # to the output
MEASURED = (*RELATIVE, "loss_upto", "accuracy_upto")
WHOLE = ("whole_loss", "whole_accuracy")
ROUNDING = 10  # an error within this many remainders of the exact sums is rounding


@dataclass(frozen=True)
class Options:
    """How many sequences are measured, and where the biases of values count."""

    value_biases: str = key(
        "Biases of values count with their head, at length 1, or as a source, at length 0.", choices=("head", "source")
    )
    sequences: int | None = key("Number of sequences. null: all.", at_least=1)
    resamples: int = key("Number of resamples of the bootstrap over sequences.", at_least=100)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """The table of `of_module`, for a network of ours: sums that miss its output are not refused. All of its calls are
    known to be followed, so such sums magnify rounding, and their remainder says so."""
    return _rows(subject.as_modules(), options, refuse=False).assign(**subject.what_counts)


def of_module(subject: ModuleSubject, options: Options) -> pd.DataFrame:
    """Rows: weights, path_length k. S_k sums all paths of k heads, X is the output (its logits, if it has any).

    Columns, each a mean over the sequences with <column>_low and <column>_high, a 95 % bootstrap interval over them
    (nan for one sequence): mass, ||S_k||_F / ||X||_F; share, <S_k, X> / ||X||_F^2, which sums to 1; error_upto,
    ||X - (S_0 + ... + S_k)||_F / ||X||_F; these three over the sequences whose X is not zero (num_undefined of
    num_sequences are left out); loss_upto (nats per scored token) and accuracy_upto of S_0 + ... + S_k, nan without
    targets.

    num_paths: choices of k heads, at most one of each depth. below_floor: the share of the first 16 sequences, fewer
    for large modules, whose S_k is no more than rounding (rankbench.measures.rounding). remainder: the largest
    ||X - sum_k S_k|| / ||X|| of a batch; error_below_floor: 1 where error_upto is at most ten remainders, as at the
    largest length, else 0. Then whole_loss and whole_accuracy of X. frozen: all parts that were held fixed; for a
    product of two activations, which factor, and the call that made it.
    """
    return _rows(subject, options, refuse=True).assign(**subject.what_counts)


@torch.no_grad()
def _rows(subject: ModuleSubject, options: Options, refuse: bool) -> pd.DataFrame:
    example, rows = subject.example[: options.sequences], []
    for weights, module in subject.modules.items():
        heads = heads_of(module, example)
        values, remainder, frozen = _values(module, example, heads, options.value_biases, refuse)
        below_K = _below_floor(module, example, heads, options.value_biases, subject.seed)
        defined_B = values["mass"][0].isfinite()
        log.info("%s, %s weights: path sums and output differ by %.1e (relative)", subject.name, weights, remainder)
        for length, count in enumerate(heads.num_paths):
            row = {"weights": weights, "path_length": length, "num_paths": float(count), "remainder": remainder}
            row |= {"below_floor": below_K[length], "frozen": "; ".join(frozen)}
            for name in MEASURED:
                among = defined_B if name in RELATIVE else ...
                row |= _interval(name, values[name][length][among], options.resamples)
            row["error_below_floor"] = float(row["error_upto"] <= ROUNDING * remainder)
            whole = {name: values[name].mean().item() for name in WHOLE}
            counts = {"num_sequences": example.num_sequences, "num_undefined": int((~defined_B).sum())}
            rows.append(row | whole | counts)
    return pd.DataFrame(rows, columns=COLUMNS)


def _values(
    module: nn.Module, example: Example, heads: Heads, value_biases: str, refuse: bool
) -> tuple[dict[str, Tensor], float, dict[str, None]]:
    """The numbers of each length and sequence, (K, B), those of the whole output, (B,), the largest remainder, and the
    kinds of frozen parts in their order."""
    parts: dict[str, list[Tensor]] = {name: [] for name in (*MEASURED, *WHOLE)}
    remainder, num_lengths, frozen = 0.0, len(heads.by_depth) + 1, {}
    chunks = sums_by_length(module, example, heads, value_biases, refuse)
    for chunk, sums in counted(
        chunks, example.num_sequences, "spectrum: sequences", lambda pair: pair[0].num_sequences
    ):
        read_K = sums.by_length_KBND
        read_K = torch.cat([read_K, read_K.new_zeros(num_lengths - len(read_K), *read_K.shape[1:])])
        S_K, X = of_counted(read_K, chunk), of_counted(sums.state_BND, chunk)
        size_B = norms(X, 0)
        parts["mass"].append(norms(S_K, 1) / size_B)
        directions = X / size_B.view(-1, *[1] * (X.dim() - 1))  # first, because the square of a size can overflow
        parts["share"].append((S_K * directions).flatten(2).sum(-1) / size_B)
        parts["error_upto"].append(norms(X - S_K.cumsum(0), 1) / size_B)
        remainder = max(remainder, sums.remainder)
        frozen |= dict.fromkeys(part.kind for part in sums.frozen)
        scored = torch.stack([_scored(x, chunk) for x in (*read_K.cumsum(0), sums.state_BND)], dim=1)
        for column, name, score_KB in zip(("loss_upto", "accuracy_upto"), WHOLE, scored, strict=True):
            parts[column].append(score_KB[:-1])
            parts[name].append(score_KB[-1])
    return {name: torch.cat(part, dim=-1).double().cpu() for name, part in parts.items()}, remainder, frozen


def _below_floor(module: nn.Module, example: Example, heads: Heads, value_biases: str, seed: int) -> list[float]:
    """Share of the first sequences for which the sum of each length is no more than rounding; all of them for a length
    that no path has."""

    def sums_of(tape: Tape) -> list[Tensor]:
        return [tape.sums(value_biases=value_biases, refuse=False).by_length_KBND]

    generator, num_lengths = generator_for(seed, "rounding"), len(heads.by_depth) + 1
    ((sums_KBNC, counted_BN, floors),) = parts_with_floors(module, example, heads, sums_of, generator)
    below_K = floors.share_below(sums_KBNC, counted_BN).tolist()
    return below_K + [1.0] * (num_lengths - len(below_K))


def _scored(outputs: Tensor, example: Example) -> Tensor:
    """Loss per scored token and accuracy of each sequence, (2, B); nan without targets."""
    if example.targets is None:
        return torch.full((2, example.num_sequences), float("nan"))
    each = scores(outputs, example)
    return torch.stack([torch.stack([sum_score.mean_loss, sum_score.accuracy]).double() for sum_score in each], dim=1)


def _interval(name: str, values_B: Tensor, resamples: int) -> dict[str, float]:
    """The mean over sequences with the ends of its bootstrap interval."""
    numbers = values_B.numpy()
    low = high = float("nan")
    if len(numbers) > 1 and np.isfinite(numbers).all():
        # the same resamples for every row, so that neighbouring rows differ only by what they measure
        how = {"n_resamples": resamples, "method": "percentile", "rng": np.random.default_rng(0)}
        low, high = map(float, scipy.stats.bootstrap((numbers,), np.mean, **how).confidence_interval)
    mean = float(numbers.mean()) if len(numbers) else float("nan")
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def cost(subject: Subject, options: Options) -> Cost:
    """The work on the sums by length of each network, and again with random rounding for the floors."""
    operations, num_sequences = Operations.of(subject), len(subject.test.inputs[: options.sequences])
    of_sequence = operations.sums_by_length + (operations.layers + 1) * operations.read_out
    number = num_sequences * len(subject.models)
    times = num_sequences + operations.rounded_passes * min(num_sequences, FLOOR_SEQUENCES)
    return Cost(len(subject.models) * times * of_sequence, f"{operations.layers + 1} path lengths x {number} sequences")


def digest(table: pd.DataFrame) -> str:
    """Mass, error and loss by length, mean over seeds, for a terminal."""
    mean = table.groupby(["weights", "path_length"], sort=False)[["num_paths", *MEASURED]].mean()
    printed = mean.dropna(axis=1, how="all").map("{:.3g}".format)
    return (
        f"sums of all paths by length (mean of {table.num_sequences.iloc[0]} sequences)\n{printed.to_string()}\n"
        f"largest remainder of the exact sums: {table.remainder.max():.1e}"
    )


COLUMNS = ["weights", "path_length", "num_paths"]
COLUMNS += [f"{name}{end}" for name in MEASURED for end in ("", "_low", "_high")]
COLUMNS += ["below_floor", "error_below_floor", "remainder", *WHOLE, "num_sequences", "num_undefined", "frozen"]
ANALYSIS = Analysis(
    Options,
    table,
    draw_spectrum,
    digest,
    ("error_upto",),
    lines="weights",
    most_panels=6,
    of_module=of_module,
    check_module=check_sums,
    any_network=True,
    cost=cost,
    cheaper=({"sequences": 16}, {"sequences": 4}),
)

"""What paths of each length can predict (Dong et al. 2021, sec. 4.3, Fig. 4; formulas in rankbench.measures.paths).

Shapes: B batch, N token, D width, C class, G group of paths.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject, chunks
from rankbench.analyses.columns import SPECIAL_TOKENS, WHOLE_ACCURACY
from rankbench.config.keys import ConfigError, key
from rankbench.measures.dong_theory import num_paths, path_length_distribution
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length
from rankbench.measures.module_paths import (
    check_sums,
    floors_of_parts,
    module_sums,
    paths_of,
    sequences_of,
    with_tokens,
)
from rankbench.measures.module_reading import ReadModule
from rankbench.measures.norms import composite_norm, frobenius_norm, residual_matrix, without_absent
from rankbench.measures.paths import all_paths, read_out, sample_paths, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork, check_recomputed
from rankbench.measures.rounding import FLOOR_SEQUENCES, FloorsOfSums, floors_of_sums, side_by_side
from rankbench.measures.states import value_per_length
from rankbench.measures.token_views import counted_first
from rankbench.model.transformer import Transformer
from rankbench.plots.paths import draw_paths, score_of
from rankbench.runs.tables import mean_of_seeds
from rankbench.seeds import generator_for
from rankbench.tape import Tape
from rankbench.tasks import Batch
from rankbench.tasks.task import Score, majority_baselines, repeated_token_ceiling, score

NUMBERS_AT_A_TIME = 1 << 25  # in the sums of all groups: 256 MiB of float64
# Largest remainder that rounding explains, with a margin of 10^4 on what a few hundred additions lose.
LARGEST_REMAINDER = {torch.float64: 1e-10, torch.float32: 1e-3}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """Which paths are summed, and how the sums are read out."""

    schemes: list[str] = key("Which paths are measured.", choices=("frozen", "recomputed"), nonempty=True)
    subset_sizes: list[int] = key("Numbers of sampled paths in a subset, as in the published protocol.", at_least=1)
    repeats: int = key("Number of subsets of each size.", at_least=1)
    replacement: bool = key("Whether a subset may hold a path twice. The authors' code: yes.")
    readout: str = key("Which sum is read out: normalised or raw.", choices=("normalised", "raw"))
    mlp: str = key("MLPs of frozen paths: linear with frozen gates, or a constant.", choices=("gate", "source"))
    recomputed_mlp: bool = key("Whether recomputed paths keep their MLPs. The authors' code: no.")
    sequences: int | None = key("Number of test sequences. null: all.", at_least=1)
    max_paths: int = key("Up to this number of recomputed paths, all of them are run.", at_least=1)


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each sum of paths that was read out: of all paths of a length, or of a random subset.

    Of modules alone: frozen sums of all paths, of the output (of the logits, if there are any); biases count as paths.
    """
    return _of_network(subject, options) if subject.networks else _of_modules(subject, options)


def _of_network(subject: Subject, options: Options) -> pd.DataFrame:
    test = subject.test[: options.sequences]
    rows = []
    for scheme in options.schemes:
        rows += _exact_rows(subject, test, scheme, options)
        rows += _sampled_rows(subject, test, scheme, options)
    whole = subject.score(test)
    majority = majority_baselines(subject.train, test, subject.task.num_outputs)
    return pd.DataFrame(rows).assign(
        readout=options.readout,
        **subject.what_counts,
        whole_accuracy=whole.accuracy.item(),
        whole_loss=whole.mean_loss.item(),
        majority_accuracy=majority["majority"],
        position_majority_accuracy=majority["position_majority"],
        **({"ceiling_accuracy": repeated_token_ceiling(test)} if _order_blind(subject.network) else {}),
    )


def _floors(
    subject: Subject, test: Batch, num_groups: int, sums_of: Callable[[Tensor], Tensor]
) -> list[dict[str, float]]:
    """The columns of rounding of each group of paths, whose sums (G, B, N, D) `sums_of` returns."""
    model = subject.network
    batch = test[: min(FLOOR_SEQUENCES, _at_a_time(test, model, num_groups))]
    sums_GBND, counted_BN = sums_of(batch.inputs), model.counted(batch.inputs)
    generator = generator_for(subject.seed, "rounding")
    floors = floors_of_sums(
        lambda copies: sums_of(side_by_side(batch.inputs, copies)), sums_GBND, counted_BN, generator
    )
    return _floor_columns(floors)


def _floor_columns(floors: FloorsOfSums) -> list[dict[str, float]]:
    sums_GBND, counted_BN, residual_GB = floors.sums_GBND, floors.counted_BN, floors.residual_GB
    seen, kept_B = counted_first(counted_BN)
    sizes = [value_per_length(composite_norm, seen(sum_BND), kept_B) for sum_BND in sums_GBND]
    relative_GB, size_GB = _relative_residuals(sums_GBND, counted_BN), torch.stack(sizes)
    columns = {
        "relative_noise_floor": torch.where(size_GB > 0, residual_GB / size_GB, torch.nan).nanmean(1),
        "below_floor": (~(relative_GB * size_GB > residual_GB)).double().mean(1),
        "sum_below_floor": floors.share_below(),
    }
    return pd.DataFrame({name: value_G.tolist() for name, value_G in columns.items()}).to_dict("records")


class ReadOuts(NamedTuple):
    """For each group's sum of paths, the score of its read-out over all sequences, and the Frobenius norm and relative
    residual in each sequence (nan for 0 / 0: a sum without signal, for example where all W_V = 0).
    """

    score_G3: Tensor
    norm_GB: Tensor
    residual_GB: Tensor

    @classmethod
    def of(
        cls, sums_GBND: Tensor, targets: Tensor | None, counted_BN: Tensor | None, read: Callable[[Tensor], Tensor]
    ) -> "ReadOuts":
        """The reading of one batch, of the tokens that count. read: the read-out. Without targets the score is nan."""
        score_G3 = torch.full((len(sums_GBND), 3), float("nan"), dtype=torch.float64)
        if targets is not None:
            scores = [score(read(sum_BND), targets) for sum_BND in sums_GBND]
            score_G3 = torch.stack([torch.stack([part.double() for part in parts]) for parts in scores])
        norm_GB = frobenius_norm(without_absent(sums_GBND, counted_BN))
        return cls(score_G3, norm_GB, _relative_residuals(sums_GBND, counted_BN))

    @classmethod
    def joined(cls, parts: list["ReadOuts"]) -> "ReadOuts":
        """The reading of several batches together."""
        scores, *rest = zip(*parts, strict=True)
        return cls(torch.stack(scores).sum(0), *(torch.cat(batches, dim=1) for batches in rest))

    def row(self, group: int) -> dict[str, float]:
        """Accuracy, loss and relative residual of one group's sum, and for how many sequences the last is undefined."""
        of_group = Score(*self.score_G3[group])
        return {
            "accuracy": of_group.accuracy.item(),
            "loss": of_group.mean_loss.item(),
            "relative_residual": self.residual_GB[group].nanmean().item(),
            "num_undefined": int(self.residual_GB[group].isnan().sum()),
        }


def _relative_residuals(sums_GBND: Tensor, counted_BN: Tensor | None) -> Tensor:
    """Relative residual of each sum and sequence, over the tokens that count, (G, B)."""

    def measure(x_BND: Tensor) -> Tensor:
        return composite_norm(residual_matrix(x_BND)) / composite_norm(x_BND)

    seen, kept_B = counted_first(counted_BN)
    return torch.stack([value_per_length(measure, seen(sum_BND), kept_B) for sum_BND in sums_GBND])


def _at_a_time(test: Batch, model: Transformer, num_groups: int) -> int:
    """Number of sequences over which memory can hold the sums of all groups."""
    return max(1, NUMBERS_AT_A_TIME // (num_groups * test.inputs.shape[1] * model.width))


def _exact_rows(subject: Subject, test: Batch, scheme: str, options: Options) -> list[dict]:
    model = subject.network
    layers, heads, skip = model.path_choices
    lengths = range(layers + 1)
    counts = [num_paths(layers, heads, length, skip) for length in lengths]
    if scheme == "recomputed" and sum(counts) > options.max_paths:
        number = Decimal(sum(counts))  # which may be larger than any float
        log.info(f"not all {number:.3g} recomputed paths are run: analysis.paths.max_paths={options.max_paths}")
        return []
    parts, biases, remainders, read = [], [], [], partial(read_out, model, readout=options.readout)
    groups = [all_paths(layers, heads, length, skip) for length in lengths] if scheme == "recomputed" else []

    def sums_of(inputs: Tensor) -> Tensor:
        if scheme == "frozen":
            return sums_by_length(model, inputs, options.mlp).by_length_KBND
        return sums_of_groups(RecomputedNetwork(model, inputs, options.recomputed_mlp), groups)

    at_a_time = _at_a_time(test, model, len(lengths))
    for batch in chunks(test, at_a_time, f"{scheme} paths, all: sequences"):
        if scheme == "frozen":
            sums = sums_by_length(model, batch.inputs, options.mlp)
            sums_KBND = sums.by_length_KBND
            biases.append(frobenius_norm(without_absent(sums.bias_BND, model.counted(batch.inputs))))
            remainders.append(sums.remainder())
        else:
            sums_KBND = sums_of(batch.inputs)
        parts.append(ReadOuts.of(sums_KBND, batch.targets, model.counted(batch.inputs), read))
    reading, remainder = ReadOuts.joined(parts), None
    if scheme == "frozen":
        remainder = torch.cat(remainders).max().item()
        log.info("%s seed %d: path sums and output differ by %.1e (relative)", subject.run, subject.seed, remainder)
        if not remainder <= (most := LARGEST_REMAINDER[model.read_out.weight.dtype]):  # nan, too, is not rounding
            log.warning("that is more than rounding explains (%.0e)", most)
    bias_B = torch.cat(biases) if biases else torch.zeros_like(reading.norm_GB[0])
    total_B = reading.norm_GB.sum(0) + bias_B
    rows, floors = [], _floors(subject, test, len(lengths), sums_of)
    for length in lengths:
        if counts[length]:
            share = path_length_distribution(layers, heads, skip).share[length]
            row = _row(scheme, "all", length, share) | reading.row(length) | floors[length]
            shares = {"norm_share": reading.norm_GB[length], "bias_norm_share": bias_B}
            row |= {name: (norm_B / total_B).nanmean().item() for name, norm_B in shares.items()}
            rows.append(row | {"num_paths": counts[length], "remainder": remainder})
    return rows


def _sampled_rows(subject: Subject, test: Batch, scheme: str, options: Options) -> list[dict]:
    model, (draws, groups) = subject.network, _sampled(subject, options)
    layers, heads, skip = model.path_choices
    if not draws:
        return []
    parts, read = [], partial(read_out, model, readout=options.readout)

    def sums_of(inputs: Tensor) -> Tensor:
        if scheme == "frozen":
            return sums_of_groups(FrozenNetwork(model, inputs, options.mlp), groups)
        return sums_of_groups(RecomputedNetwork(model, inputs, options.recomputed_mlp), groups)

    at_a_time = _at_a_time(test, model, len(groups))
    for batch in chunks(test, at_a_time, f"{scheme} paths, sampled: sequences"):
        parts.append(ReadOuts.of(sums_of(batch.inputs), batch.targets, model.counted(batch.inputs), read))
    reading = ReadOuts.joined(parts)
    rows, floors = [], _floors(subject, test, len(groups), sums_of)
    for group, ((length, size, repeat), paths) in enumerate(zip(draws, groups, strict=True)):
        share = path_length_distribution(layers, heads, skip).share[length]
        row = _row(scheme, "sampled", length, share) | reading.row(group) | floors[group]
        rows.append(row | {"subset_size": size, "repeat": repeat, "num_paths": len(paths)})
    return rows


def _sampled(subject: Subject, options: Options) -> tuple[list[tuple[int, int, int]], list[np.ndarray]]:
    """Path length, subset size and repeat of each subset of sampled paths; and its paths: the same for both schemes, so
    that these are compared on the same paths."""
    (layers, heads, skip), replacement = subject.network.path_choices, options.replacement
    draws = list(product(subject.network.path_lengths, options.subset_sizes, range(options.repeats)))
    groups = [
        sample_paths(layers, heads, length, size, generator_for(subject.seed, "paths", number), replacement, skip)
        for number, (length, size, _) in enumerate(draws)
    ]
    return draws, groups


def _row(scheme: str, selection: str, length: int, path_share: float) -> dict:
    axes = {"scheme": scheme, "selection": selection, "path_length": length}
    return dict.fromkeys(SUMS) | axes | {"path_share": path_share}


def _of_modules(subject: Subject, options: Options) -> pd.DataFrame:
    log.info("%s: sums of all frozen paths alone; single paths are taken from networks of ours", subject.run)
    rows = []
    for weights, read in subject.reads.items():
        example, parts, remainder = sequences_of(read, options.sequences), [], 0.0
        for chunk, sums in module_sums(read, example):
            sums_KBNC = with_tokens(torch.cat([sums.by_length_KBND, sums.state_BND[None]]))
            as_measured = partial(torch.Tensor.view_as, other=sums.state_BND)
            parts.append(ReadOuts.of(sums_KBNC, chunk.targets, read.counted(chunk), read=as_measured))
            remainder = max(remainder, sums.remainder)
        log.info("%s, %s weights: path sums and output differ by %.1e (relative)", subject.run, weights, remainder)
        reading, counts = ReadOuts.joined(parts), paths_of(read).by_length
        whole, total_B = Score(*reading.score_G3[-1]), reading.norm_GB[:-1].sum(0)
        generator = generator_for(subject.seed, "rounding")
        (floors,) = map(_floor_columns, floors_of_parts(read, example, partial(_by_length, read), generator))
        for length in range(len(reading.norm_GB) - 1):
            row = _row("frozen", "all", length, counts[length] / sum(counts)) | reading.row(length) | floors[length]
            row |= {"norm_share": (reading.norm_GB[length] / total_B).nanmean().item()}
            row |= {"num_paths": counts[length], "remainder": remainder}
            row |= {"whole_accuracy": whole.accuracy.item(), "whole_loss": whole.mean_loss.item()}
            rows.append(row | {"weights": weights, "readout": "raw"})
    nothing = {"majority_accuracy": float("nan"), "position_majority_accuracy": float("nan")}
    return pd.DataFrame(rows).astype({"subset_size": float}).assign(**nothing, **subject.what_counts)


def _by_length(read: ReadModule, tape: Tape) -> list[Tensor]:
    return [read.sums(tape, refuse=False).by_length_KBND]


def _order_blind(model: Transformer) -> bool:
    """Whether the network cannot tell equal tokens of a sequence apart."""
    is_ours = isinstance(model, Transformer) and model.input_kind == "tokens"
    return is_ours and model.cfg.positions == "none" and model.cfg.mask == "none"


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError for recomputed paths of a network without any, for modules whose sums miss their output, and if
    no path is left to measure."""
    if not subject.networks:
        check_sums(subject.reads)
    elif "recomputed" in options.schemes:
        check_recomputed(subject.network, "paths")
        layers, heads, skip = subject.network.path_choices
        number = sum(num_paths(layers, heads, length, skip) for length in subject.network.path_lengths)
        if number > options.max_paths and not options.subset_sizes and "frozen" not in options.schemes:
            raise ConfigError(
                f"analysis.paths.max_paths={options.max_paths}: leaves nothing to measure, because the network has "
                f"{Decimal(number):.3g} paths and subset_sizes=[] draws none; raise it, or draw some"
            )


def digest(table: pd.DataFrame) -> str:
    """Accuracy, loss of a regression or, without targets, size by path length; mean over seeds and repeats."""
    scored = score_of(table)
    named = table.assign(paths=["all" if pd.isna(size) else f"{size:.0f} sampled" for size in table.subset_size])
    mean = named.pivot_table(scored, ["scheme", "paths"], "path_length", "mean", sort=False)
    columns = [f"whole_{scored}", "majority_accuracy", "position_majority_accuracy"]
    whole, majority, position = table.reindex(columns=columns).mean().map("{:.3f}".format)
    classes = f", commonest class {majority}, commonest class of each position {position}"
    ceiling = table.get("ceiling_accuracy", pd.Series(dtype=float)).mean()
    at_most = "" if pd.isna(ceiling) else f"; repeated tokens allow at most {ceiling:.3f}"
    of_whole = f"whole network {whole}{classes if scored == 'accuracy' else ''}{at_most}\n"
    of_whole = "" if scored == "norm_share" else of_whole
    return (
        f"{scored.replace('_', ' ')} by path length ({mean_of_seeds(table.seed.nunique())})\n"
        f"{mean.round(3).to_string()}\n{of_whole}largest remainder of the exact sums: {table.remainder.max():.1e}"
    )


SUMS = {
    "scheme": "frozen (attention weights, norm scales and gates of the full forward pass) or recomputed.",
    "selection": "all: every path of the length; sampled: a random subset.",
    "path_length": "Number of heads that a path passes.",
    "subset_size": "Number of paths that were drawn; empty for all.",
    "repeat": "Number of the subset, from 0; empty for all.",
    "accuracy": "Share of tokens; nan without targets.",
    "loss": "Nats per token, or squared error; nan without targets.",
    "relative_residual": "Of the sum; mean over the sequences whose sum is not zero. 0 of one vector per sequence.",
    "norm_share": "Frobenius norm of the sum, as a share of the norms of all lengths and the bias added up. Empty for "
    "sampled paths.",
    "num_paths": "Number of paths in the sum.",
    "remainder": "Largest ||state - sum of all lengths - bias|| / ||state|| of a sequence; of frozen sums of all "
    "paths.",
    "path_share": "Share of all paths that have this length.",
    "bias_norm_share": "norm_share of the bias.",
    "num_undefined": "Number of sequences whose sum is zero.",
    "relative_noise_floor": "Rounding error of relative_residual over the first 16 sequences, fewer for large modules "
    "(rankbench.measures.rounding).",
    "below_floor": "Share of these sequences whose residual is no larger than its rounding error.",
    "sum_below_floor": "Share of these sequences whose whole sum is no more than rounding, so that its accuracy, loss "
    "and norm_share say nothing.",
}
COLUMNS = {
    **SUMS,
    "readout": "Whether the last norm is applied to the sum before the read-out: normalised or raw.",
    **SPECIAL_TOKENS,
    **WHOLE_ACCURACY,
    "whole_loss": "Loss of the whole network, on the same sequences.",
    "majority_accuracy": "Accuracy of the commonest class; nan for modules alone.",
    "position_majority_accuracy": "Accuracy of the commonest class of each position; nan for modules alone.",
    "ceiling_accuracy": "Best accuracy that repeated tokens allow. Of networks without positions and masks alone.",
    "weights": "Of modules alone: given, trained or initialised. Of others the trained network is measured, if any.",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_paths,
    digest,
    COLUMNS,
    ("scheme", "selection"),
    needs={"attention"},
    check=check,
    trained_alone=True,
)

"""What the heads of any network attend to, head by head: entropy, sinks, rank of P, the largest logit.

One attention call is in memory at a time (rankbench.tape.tap).

Shapes: B sequence, H head, N query token, M key token, K width of the values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject, each_sequence
from rankbench.analyses.columns import ATTENTION, ATTENTION_FLOORS, SPECIAL_TOKENS, SPREAD, WEIGHTS
from rankbench.config.keys import key
from rankbench.measures.attention_matrices import (
    ATTENTION_METRICS,
    SUM_ERROR,
    Rows,
    attention_metrics,
    beside_independent,
    gap_eigenvalue,
    is_chain,
    is_signed,
    mean_of_rows,
    per_queries,
    shares,
)
from rankbench.measures.by_layer import moments
from rankbench.measures.entropy_bound import of_heads
from rankbench.measures.module_reading import ReadModule
from rankbench.measures.norms import at_least_float32, composite_norm, cosine, residual_matrix
from rankbench.measures.rounding import (
    FLOOR_SEQUENCES,
    RandomRounding,
    floor_of_distances,
    floor_of_weights,
    num_passes,
    of_queries,
)
from rankbench.model.modules import Example
from rankbench.plots.attention import draw_attention
from rankbench.seeds import generator_for
from rankbench.tape import AttentionCall
from rankbench.tape.touch import HIDDEN

UNDERFLOW = 1e-4  # more than this is no 0 in any precision, unless a mask has taken it away
SEQUENCES_AT_A_TIME = 8
WEIGHTS_BYTES = 1 << 26  # bytes of attention weights in memory at the same time, in a pass for the floors
HEAD = ["weights", "layer", "head"]
ENTROPIES = ("entropy_nats", "least_entropy_nats", "score_norm_bound", "entropy_bound_nats")
DISTANCES = ("uniform", "identity")
BESIDE_LAW = ("singular_over_law", "shuffled_over_law", "eigenvalue_over_law")


@dataclass(frozen=True)
class Options:
    """How many sequences are measured."""

    sequences: int | None = key("Number of sequences. null: all.", at_least=1)


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each head. Metrics are means over the sequences for which they are defined.

    P is the matrix that multiplies the values; its rows are those of the queries that count, so that special tokens are
    only keys. Shares are P with rows divided by their sums; there are none if an entry is negative. The first metrics
    are those of the shares, as in `residual`; attention_gap_eigenvalue takes all queries, because it needs a square P.
    Calls that do not lead to the measured output have no rows; network.csv lists them. Metrics that no head has are
    left out.
    """
    rows = []
    for weights, read in subject.reads.items():
        example = read.example[: options.sequences]
        floors = _floors(read, example, generator_for(subject.seed, "rounding"))
        for row in rows_by_head(read, example):
            row |= floors[row["layer"], row["head"]]
            for name in DISTANCES:
                if (distance := f"distance_to_{name}") in row:
                    row[f"{name}_below_floor"] = float(row[distance] <= row["distance_noise_floor"])
            rows.append({"weights": weights, **row})
    whole = pd.DataFrame(rows).dropna(axis=1, how="all").assign(**subject.what_counts)
    bounded = pd.DataFrame(_entropies(subject, options), columns=[*HEAD, *ENTROPIES])
    if bounded.empty:
        return whole
    return whole.merge(bounded.groupby(HEAD).mean().reset_index(), on=HEAD, how="left", validate="one_to_one")


def _entropies(subject: Subject, options: Options) -> Iterator[dict[str, Any]]:
    """A row for each head and sequence, over all tokens of the sequence; none for modules alone."""
    for weights, network in subject.networks.items():
        inputs = subject.test.inputs[: options.sequences]
        for sequence in each_sequence(inputs, network.lengths(inputs)):
            for layer, values in of_heads(network, sequence):
                by_head = zip(*(values[name].tolist() for name in ENTROPIES), strict=True)
                for head, numbers in enumerate(by_head, 1):
                    axes = {"weights": weights, "layer": layer, "head": head}
                    yield axes | dict(zip(ENTROPIES, numbers, strict=True))


@torch.no_grad()
def rows_by_head(read: ReadModule, example: Example) -> Iterator[dict[str, Any]]:
    """A row for each head of a module: layer, head, submodule, kind and the moments of the metrics."""
    values: dict[tuple[int, int], list[dict[str, Tensor]]] = {}
    about: dict[tuple[int, int], dict[str, str]] = {}
    generator = generator_for(0, "shuffled rows")
    for chunk in example.split(SEQUENCES_AT_A_TIME):

        def watch(call: AttentionCall, chunk: Example = chunk) -> None:
            of, (depth, first) = read.reading.by_key[call.key], read.first[call.key]
            metrics = _of_call(call, read.tokens_of(call, chunk), of.is_self, generator)
            for number, of_head in enumerate(zip(*(value_RH.unbind(1) for value_RH in metrics.values()), strict=True)):
                named = dict(zip(metrics, of_head, strict=True))
                values.setdefault((depth, first + number), []).append(named)
                about[depth, first + number] = {"submodule": call.call.module, "kind": of.words}

        read.tap(chunk, watch)
    for (depth, head), parts in sorted(values.items()):
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        defined = {name: value_B for name, value_B in joined.items() if not value_B.isnan().all()}
        yield {"layer": depth, "head": head, **about[depth, head], **moments(defined)}


def _floors(read: ReadModule, example: Example, generator: torch.Generator) -> dict[tuple[int, int], dict[str, float]]:
    """Columns of the rounding error of each head's P, by the head's depth and its number there."""
    num_bytes = sum(call.weights.nbytes for call in _all_weights(read, example[:1]))
    first = example[: max(1, min(FLOOR_SEQUENCES, WEIGHTS_BYTES // num_bytes))]
    calls, rounding = _all_weights(read, first), RandomRounding(generator)
    with rounding:
        passes = num_passes(*calls[0].weights.shape[-2:])
        perturbed = [_all_weights(read, first) for _ in range(passes)]
    columns = {}
    for number, call in enumerate(calls):
        p_RHNM, others = call.weights, [of_pass[number].weights for of_pass in perturbed]
        counted_BN, lengths_B = read.tokens_of(call, first)
        if not read.reading.by_key[call.key].is_self:
            lengths_B = None  # absent keys have no weight
        of_distances_BH = floor_of_distances(p_RHNM, others, lengths_B, counted_BN)
        if not ((p_RHNM.sum(-1) - 1).abs() <= SUM_ERROR).all():
            p_RHNM, *others = map(shares, (p_RHNM, *others))
        floor_BH = floor_of_weights(p_RHNM, others, lengths_B, counted_BN)
        size_BH = of_queries(composite_norm, p_RHNM, lengths_B, counted_BN)
        residual_BH = of_queries(lambda p: composite_norm(residual_matrix(p)), p_RHNM, lengths_B, counted_BN)
        values = {
            "attention_relative_noise_floor": torch.where(size_BH > 0, floor_BH / size_BH, torch.nan),
            "attention_below_floor": (residual_BH <= floor_BH).double(),
            "distance_noise_floor": of_distances_BH,
        }
        depth, first_head = read.first[call.key]
        means = zip(*(value_BH.nanmean(0).tolist() for value_BH in values.values()), strict=True)
        for head, of_head in enumerate(means, first_head):
            columns[depth, head] = dict(zip(values, of_head, strict=True))
    return columns


def _all_weights(read: ReadModule, example: Example) -> list[AttentionCall]:
    """Each attention call in turn, with weights (R, H, N, M)."""
    calls: list[AttentionCall] = []

    def keep(call: AttentionCall) -> None:
        of_call = _in_float(call)
        calls.append(of_call._replace(values=of_call.weights, queries=None, keys=None, logits=None))  # no values stay

    read.tap(example, keep)
    return calls


def _in_float(call: AttentionCall) -> AttentionCall:
    """The call in float32 or float64, with one head of values for each head of weights."""
    weights_RHNM, values_RHMK = at_least_float32(call.weights), at_least_float32(call.values)
    num_heads = weights_RHNM.shape[1]
    if values_RHMK.shape[1] != num_heads:  # query heads may share values
        values_RHMK = values_RHMK.repeat_interleave(num_heads // values_RHMK.shape[1], 1)
    logits = None if (of_call := call.logits) is None else lambda: at_least_float32(of_call())
    return call._replace(weights=weights_RHNM, values=values_RHMK, logits=logits)


def _of_call(
    call: AttentionCall, tokens: tuple[Tensor | None, Tensor | None], is_self: bool, generator: torch.Generator
) -> dict[str, Tensor]:
    """Metrics of the heads of one call, (R, H). tokens: which queries count, number of present keys; None: all."""
    call, (counted_BN, lengths_B) = _in_float(call), tokens
    num_queries, num_keys = call.weights.shape[-2:]

    def of_rows(rows: Rows, length: int, queries: Rows) -> dict[str, Tensor]:
        last = length if is_self else num_queries
        weights, values = call.weights[rows][..., :last, :length], call.values[rows][..., :length, :]
        logits = None if (whole := call.logits) is None else lambda: whole()[rows][..., :last, :length]
        return _of_queries(call._replace(weights=weights, values=values, logits=logits), queries, is_self, generator)

    return per_queries(of_rows, num_keys, lengths_B, counted_BN, None if is_self else num_queries)


def _of_queries(call: AttentionCall, queries: Rows, is_self: bool, generator: torch.Generator) -> dict[str, Tensor]:
    """Metrics of these rows of P."""
    all_BHNM, v_BHMK = call.weights, call.values
    p_BHNM = all_BHNM[..., queries, :]
    logits_BHNM = None if call.logits is None else call.logits()[..., queries, :]
    visible_BHNM = _visible(p_BHNM, logits_BHNM)
    uniform_BHNM = visible_BHNM / visible_BHNM.sum(-1, keepdim=True, dtype=p_BHNM.dtype).clamp(min=1)
    metrics = _of_shares(p_BHNM, visible_BHNM, generator)
    sums_BHN = p_BHNM.sum(-1)
    metrics["row_sum"] = sums_BHN.mean(-1)
    num_queries = p_BHNM.shape[-2]
    if not is_self:  # the eigenvalues of P say nothing where its rows and columns are other tokens
        nothing_BH = torch.full_like(metrics["attention_entropy"], torch.nan)
        metrics |= dict.fromkeys(("attention_gap_eigenvalue", "eigenvalue_over_law"), nothing_BH)
    own_N = torch.arange(all_BHNM.shape[-2], device=p_BHNM.device)[queries] if is_self else None
    read = partial(mean_of_rows, p_BHNM=p_BHNM)
    for name, share_BH in _read_from(shares(p_BHNM), own_N, read).items():
        metrics[f"{name}_weight"] = share_BH.masked_fill(is_signed(p_BHNM), torch.nan)
    differs_BH = ((sums_BHN - 1).abs() > SUM_ERROR).any(-1)
    for name, mass_BH in _read_from(p_BHNM, own_N, lambda x: x.mean(-1)).items():
        metrics[f"{name}_mass"] = mass_BH.where(differs_BH, torch.nan)
    metrics["distance_to_uniform"] = (p_BHNM - uniform_BHNM).square().sum((-2, -1)).div(num_queries).sqrt()
    metrics["largest_logit"] = torch.full_like(metrics["row_sum"], float("nan"))
    if logits_BHNM is not None:
        metrics["largest_logit"] = logits_BHNM.abs().masked_fill(~visible_BHNM, 0).amax((-2, -1))
    if is_self:
        eye_NM = torch.eye(all_BHNM.shape[-1], dtype=p_BHNM.dtype, device=p_BHNM.device)[queries]
        metrics["distance_to_identity"] = (p_BHNM - eye_NM).square().sum((-2, -1)).div(num_queries).sqrt()
        metrics["value_cosine"] = cosine(p_BHNM @ v_BHMK, v_BHMK[..., queries, :]).mean(-1)
        if num_queries < all_BHNM.shape[-2]:
            metrics["attention_gap_eigenvalue"] = gap_eigenvalue(all_BHNM, stochastic=False)
    return metrics


def _visible(p_BHNM: Tensor, logits_BHNM: Tensor | None) -> Tensor:
    """Which keys each query sees, as P: those that a mask of the logits or of the weights leaves. Without logits a key
    is hidden if that query gives it no weight in any sequence and head."""
    if logits_BHNM is None:
        return (p_BHNM != 0).flatten(0, 1).any(0).expand(p_BHNM.shape)
    hidden_NM = ((p_BHNM == 0) & (logits_BHNM.softmax(-1) > UNDERFLOW)).flatten(0, 1).any(0)  # after the softmax
    return (p_BHNM != 0) | ((logits_BHNM > HIDDEN) & ~hidden_NM)


def _read_from(p_BHNM: Tensor, own_N: Tensor | None, mean: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """How much is read from the key that gets most, from the first, and from each query's own (own_N; None if there is
    none), (B, H). mean: over the queries, on the last axis."""
    of_key_BHM = mean(p_BHNM.mT)
    parts = {"sink": of_key_BHM.amax(-1), "first": of_key_BHM[..., 0]}
    if own_N is not None:
        parts["own"] = mean(p_BHNM.gather(-1, own_N.expand(p_BHNM.shape[:-1])[..., None])[..., 0])
    return parts


def _of_shares(p_BHNM: Tensor, visible_BHNM: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The metrics of the shares of P, those beside the law nan where the shares are not probabilities."""
    of_rows = attention_metrics(p_BHNM, visible_BHNM, stochastic=False)
    metrics = {name: of_rows[name] for name in ATTENTION_METRICS}
    is_covered_BH = is_chain(p_BHNM) & visible_BHNM.flatten(-2).all(-1)
    if min(p_BHNM.shape[-2:]) > 1 and is_covered_BH.any():
        beside = beside_independent(shares(p_BHNM), generator)
        return metrics | {name: value_BH.where(is_covered_BH, torch.nan) for name, value_BH in beside.items()}
    return metrics | dict.fromkeys(BESIDE_LAW, torch.full_like(p_BHNM[..., 0, 0], torch.nan))


def digest(table: pd.DataFrame) -> str:
    """A few metrics by layer, mean over heads and seeds, for a terminal."""
    columns = ["attention_entropy", "sink_weight", "attention_effective_rank", "largest_logit", "value_cosine"]
    mean = table.groupby(["weights", "layer"], sort=False)[[name for name in columns if name in table]].mean()
    return f"attention by layer (mean of its heads)\n{mean.map('{:.3g}'.format).to_string()}"


COLUMNS = {
    **WEIGHTS,
    "layer": "Depth of the attention, from 1.",
    "head": "Number of the head, from 1.",
    "submodule": "Where the call was made.",
    "kind": "softmax, or what else made P of scores; with `cross` where queries and keys are other tokens.",
    **ATTENTION,
    "singular_over_law": "Second singular value of P over that of independent weights "
    "(rankbench.measures.attention_matrices). Only where every query sees every key.",
    "shuffled_over_law": "The same with each row in a random order: 1 but for a finite N and heavy tails.",
    "eigenvalue_over_law": "The same of the second eigenvalue.",
    "row_sum": "Mean sum of a row of P, 1 for a softmax.",
    "sink_weight": "Mean share of the key that gets most.",
    "first_weight": "Mean share of the first key.",
    "own_weight": "Mean share of the query's own token; not of cross-attention.",
    "sink_mass": "sink_weight of P as it is. Only where a row of P does not sum to 1.",
    "first_mass": "first_weight of P as it is. Only where a row of P does not sum to 1.",
    "own_mass": "own_weight of P as it is. Only where a row of P does not sum to 1.",
    "distance_to_uniform": "||P - U||_F / sqrt(N) of P as it is, U the average over the keys that a query sees.",
    "largest_logit": "Largest |logit| of a key that is seen; nan if no softmax made P.",
    "distance_to_identity": "||P - I||_F / sqrt(N) of P as it is; not of cross-attention.",
    "value_cosine": "Mean cosine between a head's output at a token and the token's own value.",
    **SPREAD,
    "num_undefined": "Number of sequences that lack one metric or more of the head.",
    **{name: ATTENTION_FLOORS[name] for name in ("attention_relative_noise_floor", "attention_below_floor")},
    "distance_noise_floor": "Rounding error of both distances, over the first 16 sequences, fewer where P is large.",
    "uniform_below_floor": "1 where distance_to_uniform is no larger than its rounding error, else 0.",
    "identity_below_floor": "1 where distance_to_identity is no larger than its rounding error, else 0.",
    **SPECIAL_TOKENS,
    "entropy_nats": "Entropy of a row over all tokens (nats). This and the next three: of networks of sub-layers "
    "(rankbench.measures.entropy_bound).",
    "least_entropy_nats": "Least entropy of a row (nats).",
    "score_norm_bound": "Bound on the norm of a row's scores, from the norms of maps and tokens.",
    "entropy_bound_nats": "Least entropy that scores of this norm can have (nats).",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_attention,
    digest,
    COLUMNS,
    ("sink_weight",),
    needs={"attention"},
    lines="weights",
)

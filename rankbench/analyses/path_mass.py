"""What passes through each path length and each head of a frozen network, and what it does to the loss.

Shapes: B batch, N token, D width, L layer, H head, K path length, T part of the output.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject, chunks
from rankbench.analyses.columns import ATTENTION, SPECIAL_TOKENS
from rankbench.analyses.spectrum import check
from rankbench.config.keys import key
from rankbench.measures.attention_matrices import attention_metrics
from rankbench.measures.dong_theory import num_paths
from rankbench.measures.frozen_network import FrozenNetwork, PathSums, sums_through_heads
from rankbench.measures.module_paths import (
    floors_of_parts,
    norms,
    paths_of,
    recorded,
    sequences_of,
)
from rankbench.measures.module_reading import ReadModule
from rankbench.measures.norms import without_absent
from rankbench.measures.paths import NUMBERS_AT_A_TIME
from rankbench.measures.rounding import FLOOR_SEQUENCES, FloorsOfSums, RandomRounding, num_passes, side_by_side
from rankbench.model.attention import visible_keys
from rankbench.model.modules import Example
from rankbench.model.network import attention_steps
from rankbench.model.transformer import Transformer
from rankbench.plots.path_mass import draw_path_mass
from rankbench.runs.tables import mean_of_seeds
from rankbench.seeds import generator_for
from rankbench.tape import Sums, Tape
from rankbench.tasks import Batch
from rankbench.tasks.task import is_scored, majority_baselines, score, token_losses

log = logging.getLogger(__name__)

RANKS = ("attention_stable_rank", "attention_effective_rank", "attention_relative_residual")
SCORED = ("gradient_mass", "loss_without", "accuracy_without")
BELOW = ("below_floor", "gradient_below_floor", "loss_below_floor")
WHOLE = ("loss", "accuracy")
NOTHING = ("nothing", None, None, None)  # key of an empty part, without which the output is whole


@dataclass(frozen=True)
class Options:
    """How paths are followed, on how many sequences."""

    mlp: str = key("MLPs of frozen paths: linear with frozen gates, or a constant.", choices=("gate", "source"))
    sequences: int | None = key("Number of test sequences. null: all.", at_least=1)


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each part of the output X_L. Lengths and bias add up to X_L; heads overlap.

    Of modules alone: X_L is the output (the logits, if there are any). A bias is a path that begins where it is added,
    of length 0 if it passes no head; there are no rows for biases. MLPs are linear with frozen gates, whatever the
    option mlp says.
    """
    return _of_network(subject, options) if subject.networks else _of_modules(subject, options)


def _of_network(subject: Subject, options: Options) -> pd.DataFrame:
    model = subject.network
    layers, heads, skip = model.path_choices
    test = subject.test[: options.sequences]
    counts = [num_paths(layers, heads, length, skip) for length in range(layers + 1)]
    parts: list[dict] = [{"part": "length", "path_length": k, "num_paths": n} for k, n in enumerate(counts)]
    parts.append({"part": "bias"})
    for layer, head in product(range(1, layers + 1), range(1, heads + 1)):
        parts.append({"part": "head", "layer": layer, "head": head, "num_paths": (heads + skip) ** (layers - 1)})
    numbers = len(parts) * test.inputs.shape[1] * model.width
    at_a_time = max(1, NUMBERS_AT_A_TIME // numbers)
    sums: list[dict[str, Tensor]] = [{} for _ in [*parts, "whole"]]
    ranks: dict[str, Tensor] = {}
    remainder = 0.0
    for batch in chunks(test, at_a_time, "path_mass: sequences"):
        network, counted_BN = FrozenNetwork(model, batch.inputs, options.mlp), model.counted(batch.inputs)
        by_length, state = network.by_length(), network.state_BND
        remainder = max(remainder, by_length.remainder().max().item())
        slope = _slope(state, batch.targets, model.read_out)
        for of_part, part_BND in zip(sums, [*_parts_of(network, by_length), torch.zeros_like(state)], strict=True):
            _add(of_part, _of_part(part_BND, state, slope, batch.targets, counted_BN, model.read_out))
        _add(ranks, _ranks(model, batch.inputs))
    whole, num_sequences = sums.pop(), len(test.inputs)
    rows, below = [], _below_floor(subject, test[: min(FLOOR_SEQUENCES, at_a_time)], options.mlp)
    for number, (part, of_part) in enumerate(zip(parts, sums, strict=True)):
        row = _row(part, of_part, num_sequences) | {name: below_T[number].item() for name, below_T in below.items()}
        if part["part"] == "head":
            at = (part["layer"] - 1, part["head"] - 1)
            row |= {name: rank_LH[at].item() / num_sequences for name, rank_LH in ranks.items()}
        if row["num_paths"] != 0:  # without skips there are paths of one length alone
            rows.append(row)
    return pd.DataFrame(rows).assign(
        **subject.what_counts,
        **_whole(whole),
        majority_accuracy=majority_baselines(subject.train, test, subject.task.num_outputs)["majority"],
        remainder=remainder,
    )


def _row(axes: dict, numbers: Mapping[str, Tensor], num_sequences: int) -> dict:
    """A part's row. numbers: sums over all sequences, or over their scored tokens, of what its columns are means of."""
    row = dict.fromkeys(PARTS) | axes | {"num_undefined": int(numbers["num_undefined"])}
    row["mass"] = (numbers["mass"] / (num_sequences - numbers["num_undefined"])).item()
    return row | {name: (numbers[name] / numbers["tokens"]).item() for name in SCORED}


def _whole(without_nothing: Mapping[str, Tensor]) -> dict[str, float]:
    """Loss and accuracy of the whole output, from the sums of an empty part."""
    return {f"whole_{name}": (without_nothing[f"{name}_without"] / without_nothing["tokens"]).item() for name in WHOLE}


def _parts_of(network: FrozenNetwork, sums: PathSums) -> Tensor:
    """The sums of all lengths, the bias term, and the sums through all heads, (T, B, N, D)."""
    return torch.cat([sums.by_length_KBND, sums.bias_BND[None], sums_through_heads(network).flatten(0, 1)])


def _effects(state: Tensor, targets: Tensor, read_out: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Effect on the loss of removing a part, as a function of the part: <slope, part>, and the loss that is added if
    it is cut; (2, B). read_out: maps a state to the outputs that are compared with the targets."""
    slope, loss_B = _slope(state, targets, read_out), _loss_of_each(read_out(state), targets)

    def of(part: Tensor) -> Tensor:
        loss_without_B = _loss_of_each(read_out(state - part), targets)
        return torch.stack([(part * slope).flatten(1).sum(1), loss_without_B - loss_B])

    return of


def _slope(state: Tensor, targets: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradient of the loss with respect to the state."""
    state = state.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(score(read_out(state), targets).loss, state)
    return slope


def _loss_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return token_losses(outputs, targets, is_scored(targets)).reshape(len(outputs), -1).sum(1)


def _below_floor(subject: Subject, batch: Batch, mlp: str) -> dict[str, Tensor]:
    """The columns BELOW of each part, (T,), measured on these sequences."""
    model, counted_BN = subject.network, subject.network.counted(batch.inputs)

    def measured(copies: int) -> tuple[Tensor, Tensor]:
        network = FrozenNetwork(model, side_by_side(batch.inputs, copies), mlp)
        parts_TBND = _parts_of(network, network.by_length())
        effects = _effects(network.state_BND, side_by_side(batch.targets, copies), model.read_out)
        return parts_TBND, torch.stack([effects(part_BND) for part_BND in parts_TBND], dim=1)

    parts_TBND, effects_2TB = measured(1)
    with RandomRounding(generator_for(subject.seed, "rounding")):
        perturbed_parts, perturbed_effects = measured(num_passes(*parts_TBND.shape[-2:]))
    num_sequences = len(batch.inputs)
    floors = FloorsOfSums(parts_TBND, perturbed_parts.split(num_sequences, dim=1), counted_BN)
    of_effects = _effects_below(effects_2TB, perturbed_effects.split(num_sequences, dim=-1))
    return dict(zip(BELOW, (floors.share_below(), *of_effects), strict=True))


def _effects_below(effects: Tensor, perturbed: Sequence[Tensor]) -> Tensor:
    """1 where an effect, summed over its last axis, the sequences, is no more than rounding, else 0."""
    summed, *others = (x.sum(-1).view(-1, 1, 1, 1) for x in (effects, *perturbed))
    return FloorsOfSums(summed, others, None).share_below().view(effects.shape[:-1])


def _ranks(model: Transformer, inputs: Tensor) -> dict[str, Tensor]:
    """Metrics of each head's attention weights, summed over sequences; (L, H) each."""
    attention = model.attentions[0]
    visible_NM = visible_keys(attention.mask, attention.window, inputs.shape[1], inputs.device)
    measured = partial(attention_metrics, stochastic=attention.weighting.stochastic)
    tokens = (visible_NM, model.lengths(inputs), model.counted(inputs))
    by_layer = [measured(step.weights_BHNM, *tokens) for step in attention_steps(model, inputs)]
    return {name: torch.stack([metrics[name].sum(0) for metrics in by_layer]) for name in RANKS}


def _of_modules(subject: Subject, options: Options) -> pd.DataFrame:
    if options.mlp != "gate":
        log.info("%s: analysis.path_mass.mlp=%s is for networks of ours; gates are frozen", subject.run, options.mlp)
    rows = []
    for weights, read in subject.reads.items():
        example, counts = sequences_of(read, options.sequences), paths_of(read)
        through = {
            (read.first[key][0], read.first[key][1] + number): count
            for key, count in counts.through.items()
            for number in range(read.reading.by_key[key].lead.heads)
        }
        sums: dict[tuple, dict[str, Tensor]] = {}
        remainder = 0.0
        for chunk, tape in recorded(read, example):
            lengths = read.sums(tape)
            state, remainder = lengths.state_BND, max(remainder, lengths.remainder)
            slope = None if chunk.targets is None else _slope(state, chunk.targets, _as_it_is)
            parts = [*_parts(read, tape, lengths), (NOTHING, torch.zeros_like(state))]
            for row_key, part in parts:
                numbers = _of_part(part, state, slope, chunk.targets, read.counted(chunk), _as_it_is)
                _add(sums.setdefault(row_key, {}), numbers)
        whole, below = _whole(sums.pop(NOTHING)), _below_floor_of(read, example, subject.seed)
        for ((kind, length, layer, head), numbers), of_part in zip(sums.items(), below, strict=True):
            count = counts.by_length[length] if kind == "length" else through[layer, head]
            axes = {"part": kind, "path_length": length, "layer": layer, "head": head, "num_paths": count}
            row = _row(axes, numbers, example.num_sequences) | of_part
            rows.append(row | whole | {"weights": weights, "remainder": remainder})
    return pd.DataFrame(rows).assign(**subject.what_counts)


def _below_floor_of(read: ReadModule, example: Example, seed: int) -> list[dict[str, float]]:
    """The columns BELOW of each part, measured on the first sequences; without targets only below_floor."""

    def parts_of(tape: Tape) -> Iterator[Tensor]:
        lengths = read.sums(tape, refuse=False)
        if example.targets is not None:
            effects = _effects(lengths.state_BND, example.targets[: len(lengths.state_BND)], _as_it_is)
        for _, part in _parts(read, tape, lengths):
            yield part[None]
            if example.targets is not None:
                yield effects(part).sum(1).view(2, 1, 1, 1)

    each = floors_of_parts(read, example, parts_of, generator_for(seed, "rounding"))
    shares = torch.cat([floors.share_below() for floors in each])
    of_part = 1 if example.targets is None else len(BELOW)
    return [dict(zip(BELOW, below, strict=False)) for below in shares.view(-1, of_part).tolist()]


def _as_it_is(outputs: Tensor) -> Tensor:
    return outputs


def _parts(read: ReadModule, tape: Tape, lengths: Sums) -> Iterator[tuple[tuple, Tensor]]:
    """Kind, length, layer and head of each part of the output, and the part."""
    for length, sum_BND in enumerate(lengths.by_length_KBND):
        yield ("length", length, None, None), sum_BND
    for through in tape.through_heads(read.upto, read.choose):
        depth, first = read.first[through.key]
        for number, sum_BND in enumerate(read.arranged(through.sums)):
            yield ("head", None, depth, first + number), sum_BND


def _of_part(
    part: Tensor,
    state: Tensor,
    slope: Tensor | None,
    targets: Tensor | None,
    counted_BN: Tensor | None,
    read_out: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Sums over sequences, or over their scored tokens, of what the table's rows are means of."""
    size_B, part_B = norms(without_absent(state, counted_BN), 0), norms(without_absent(part, counted_BN), 0)
    numbers = {"mass": torch.where(size_B > 0, part_B / size_B, 0).sum(), "num_undefined": (size_B == 0).sum()}
    if slope is None or targets is None:
        return numbers | dict.fromkeys((*SCORED, "tokens"), torch.full((), float("nan")))
    left = score(read_out(state - part), targets)
    numbers |= {"gradient_mass": (part * slope).sum(), "loss_without": left.loss, "accuracy_without": left.right}
    return numbers | {"tokens": left.tokens}


def _add(total: dict[str, Tensor], numbers: dict[str, Tensor]) -> None:
    """Add these sums to those before them, in place."""
    total |= {name: total.get(name, 0) + number for name, number in numbers.items()}


def digest(table: pd.DataFrame) -> str:
    """Mass and gradient mass by length and by head, mean over seeds, for a terminal."""
    of_heads = table[table.part == "head"].astype({"layer": int, "head": int})
    of_lengths = table[table.part == "length"].astype({"path_length": int})
    heads = of_heads.pivot_table("mass", "layer", "head", "mean")
    lengths = of_lengths.groupby("path_length")[["mass", "gradient_mass"]].mean()
    return (
        f"sums of all paths of a length, in units of the output ({mean_of_seeds(table.seed.nunique())})\n"
        f"{lengths.map('{:.3g}'.format).to_string()}\n"
        f"sum of all paths through each head, in units of the output\n{heads.round(2).to_string()}\n"
        f"largest remainder of the exact sums: {table.remainder.max():.1e}"
    )


PARTS = {
    "part": "length: all paths of path_length; head: all paths through `head` of `layer`; bias: what does not come "
    "from the input.",
    "path_length": "Number of heads that a path passes.",
    "layer": "Number of the layer, from 1; of a module the depth of the attention.",
    "head": "Number of the head, from 1.",
    "num_paths": "Number of paths in the part.",
    "mass": "Frobenius norm of the part over that of X_L; mean over the sequences whose X_L is not zero.",
    "gradient_mass": "<d loss / d X_L, part> (nats per token): growth of the loss, to first order, if the part grows "
    "by 100 %; negative: the part lowers the loss. nan without targets.",
    "loss_without": "Loss of X_L less the part: what is left when these frozen paths are cut (nats per token); nan "
    "without targets.",
    "accuracy_without": "Accuracy of the same; nan without targets.",
    "below_floor": "Share of the first 16 sequences, fewer for large modules, whose part is no more than rounding "
    "(rankbench.measures.rounding).",
    "gradient_below_floor": "1 where gradient_mass over these sequences is no more than rounding, else 0.",
    "loss_below_floor": "1 where loss_without - whole_loss over these sequences is no more than rounding, else 0.",
    "num_undefined": "Number of sequences whose X_L is zero.",
    **{name: f"{ATTENTION[name]} Of heads of networks; mean over sequences." for name in RANKS},
}
COLUMNS = {
    **PARTS,
    **SPECIAL_TOKENS,
    "whole_loss": "Loss of the whole network (nats per token); nan without targets.",
    "whole_accuracy": "Accuracy of the whole network (share of tokens); nan without targets.",
    "majority_accuracy": "Accuracy of the commonest class. No column for modules alone.",
    "remainder": "Largest ||X_L - sum of lengths and bias|| / ||X_L|| of a sequence.",
    "weights": "Of modules alone: given, trained or initialised. Of others the trained network is measured, if any.",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_path_mass,
    digest,
    COLUMNS,
    ("gradient_mass",),
    needs={"attention"},
    check=check,
    trained_alone=True,
    most_panels=6,
)

"""The path-length spectrum of any network: how much of its output, and of its loss, comes from paths of each length.

All paths of a length are summed exactly, with attention weights, norm scales and gates frozen at the full forward pass
(Dong et al. 2021, Theorem 2.1; rankbench.tape). Embeddings and biases that pass no head are of length 0.

What is summed is named: the last states are a property of the network; logits have an offset that no softmax sees, and
often a large part that depends on no input.

Shapes: B sequence, K path length, N token, C classes or output dimensions.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pandas as pd
import scipy
import torch
from torch import Tensor, nn

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.spectrum_columns import (
    BESIDE,
    COLUMNS,
    EXCESS,
    LATER,
    MEASURED,
    NEEDED,
    OF_TARGETS,
    RELATIVE,
    ROWS,
    SCORED,
    WHOLE,
)
from rankbench.config.keys import ConfigError, key
from rankbench.measures.module_paths import (
    check_sums,
    floors_of_parts,
    norms,
    recorded,
    scores,
    sequences_of,
)
from rankbench.measures.module_reading import ReadModule, read_module
from rankbench.measures.module_states import LayerState, layer_states, sums_after_layers
from rankbench.measures.norms import without_absent
from rankbench.measures.partial_outputs import beside_whole, first_within, last_third_later, stays_within
from rankbench.model.modules import Example
from rankbench.model.network import WithLayerStates
from rankbench.plots.figure import uncounted_in_words
from rankbench.plots.spectrum import KINDS, draw_spectrum
from rankbench.progress import counted
from rankbench.runs.tables import as_float, thinned
from rankbench.seeds import generator_for
from rankbench.tape import Sums, Tape
from rankbench.tasks.task import is_scored

log = logging.getLogger(__name__)

CLOSE = 0.01  # nats
PRINTED = ("num_paths", *RELATIVE, *SCORED, "kl_upto", "settled_upto")
REMAINDERS_OF_ROUNDING = 10  # an error within this many remainders of the exact sums is rounding


@dataclass(frozen=True)
class Options:
    """How many sequences are measured, where the biases of values count, and whether each layer's states have a row."""

    value_biases: str = key(
        "Biases of values count with their head, at length 1, or as a source, at length 0.", choices=("head", "source")
    )
    sequences: int | None = key("Number of sequences. null: all.", at_least=1)
    resamples: int = key("Number of resamples of the bootstrap over sequences.", at_least=100)
    each_layer: bool = key("Also the lengths that the states after each layer need, a row for each.")


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each length k, and for the part of X that depends on no input; with each_layer also for each layer.

    S_k sums all paths of k heads to X. Each number is a mean over sequences. X is of the first of these kinds that
    there is in the figure: states, logits, output; of a layer's row it is the state after that layer, before any norm
    that the next layer applies to it.
    """
    # All calls of a network of sub-layers are known to be followed: sums that miss its output magnify rounding, which
    # their remainder says.
    refuse = not subject.networks
    rows = []
    for weights, read in _reads(subject, options.each_layer).items():
        example = sequences_of(read, options.sequences)
        layers = _layers(read, subject.run) if options.each_layer else []
        spread = _spread_of_entries(read.module)
        by_kind, by_layer, num_paths = _values(read, layers, example, options.value_biases, refuse)
        floors = _shares_below(read, example, options.value_biases, subject.seed)
        below = {
            kind: [*shares, *[1.0] * (len(num_paths) - len(shares))]  # no path has a length behind the last
            for kind, shares in zip(by_kind, floors, strict=True)
        }
        for kind in filter(by_kind.__contains__, KINDS):
            values = by_kind[kind]
            log.info(
                "%s, %s weights: path sums and %s differ by %.1e (relative)",
                *(subject.run, weights, kind, values.remainder),
            )
            whole = {name: values.defined(name).mean().item() for name in WHOLE}
            num_undefined = example.num_sequences - len(values.defined("size"))
            counts = {"num_sequences": example.num_sequences, "num_undefined": num_undefined}
            same = {"remainder": values.remainder, **whole, **counts, "frozen": "; ".join(values.frozen)}
            same |= {"measured": read.name_of(kind), "weights_sd": spread}
            for name in (*NEEDED, *LATER):
                same |= _interval(name, values.defined(name), options.resamples)
            axes: dict[str, Any] = {"weights": weights, "of": kind}
            rounding = max(
                values.numbers["kl_upto"][-1].mean().item(), values.unit
            )  # with all paths nothing else is left
            for length, count in enumerate(num_paths):
                row = axes | {"part": "length", "path_length": length, "num_paths": as_float(count)}
                row |= {"below_floor": below[kind][length]}
                for name in MEASURED:
                    row |= _interval(name, values.defined(name, length), options.resamples)
                row["error_below_floor"] = float(row["error_upto"] <= REMAINDERS_OF_ROUNDING * values.remainder)
                row["kl_below_floor"] = float(row["kl_upto"] <= REMAINDERS_OF_ROUNDING * rounding)
                rows.append(row | same)
            if "constant_mass" in values.numbers:
                row = axes | {"part": "constant"}
                for name in ("mass", "share"):
                    row |= _interval(name, values.defined(f"constant_{name}"), options.resamples)
                rows.append(row | same)
        for number, values in by_layer.items():
            row = {"weights": weights, "layer": number + 1, "measured": layers[number].name}
            rows.append(row | {"num_sequences": example.num_sequences} | _of_layer(values, options.resamples))
    return pd.DataFrame(rows, columns=list(ROWS)).assign(**subject.what_counts)


def _reads(subject: Subject, each_layer: bool) -> Mapping[str, ReadModule]:
    """What was read of each module, by weights; with each_layer, networks of ours also return their layers' states."""
    if not each_layer or subject.foreign is not None:
        return subject.reads
    return {
        weights: read_module(WithLayerStates(network), subject.example) for weights, network in subject.networks.items()
    }


def _spread_of_entries(module: nn.Module) -> float:
    """Standard deviation of the entries of all matrices of the module; nan if it has none."""
    numbers, means, variances = [], [], []
    for weight in module.parameters():
        if weight.dim() > 1:  # one at a time, because all of them in double precision are the module's memory twice
            variance, mean = torch.var_mean(weight.double(), correction=0)
            numbers.append(weight.numel())
            means.append(mean.item())
            variances.append(variance.item())
    if not numbers:
        return float("nan")
    around = np.square(np.array(means) - np.average(means, weights=numbers))
    return float(np.average(np.array(variances) + around, weights=numbers)) ** 0.5


def _layers(read: ReadModule, name: str) -> list[LayerState]:
    """The states after the layers; none, which a line says, of a module without layers."""
    try:
        return layer_states(read)
    except ConfigError as error:
        log.warning("%s: no rows of layers, because no layers were found: %s", name, error)
        return []


@dataclass
class _Values:
    """Of one kind of X, a few sequences at a time: numbers of each length and sequence, (K, B), or of each sequence,
    (1, B); the largest remainder; the kinds of frozen parts in their order; the machine epsilon of X."""

    chunks: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    remainder: float = 0.0
    frozen: dict[str, None] = field(default_factory=dict)
    unit: float = 0.0

    def add(self, numbers: dict[str, Tensor], sums: Sums) -> None:
        for name, values in numbers.items():
            self.chunks[name].append(values)
        self.remainder = max(self.remainder, sums.remainder)
        self.frozen |= dict.fromkeys(part.kind for part in sums.frozen)
        self.unit = torch.finfo(sums.state_BND.dtype).eps

    @cached_property
    def numbers(self) -> dict[str, Tensor]:
        """Those of all sequences, once all are added."""
        return {name: torch.cat(parts, -1).double().cpu() for name, parts in self.chunks.items()}

    def defined(self, name: str, length: int = 0) -> Tensor:
        """Those of a length, without the sequences that have none: no scored target, few tokens, or an X of zero."""
        numbers_B = self.numbers[name][length]
        if name in LATER:
            return numbers_B[~numbers_B.isnan()]
        if name in OF_TARGETS:
            return numbers_B[self.numbers["num_scored"][0] > 0]
        return numbers_B if name in BESIDE else numbers_B[self.numbers["size"][0] > 0]


def _of_layer(values: _Values, resamples: int) -> dict[str, Any]:
    """Of the states after a layer, what its row says of all sequences together."""
    num_undefined = values.numbers["size"].numel() - len(values.defined("size"))
    row: dict[str, Any] = {"of": "layer", "part": "layer", "num_undefined": num_undefined}
    for name in NEEDED:
        row |= _interval(name, values.defined(name), resamples)
    return row | {"remainder": values.remainder, "frozen": "; ".join(values.frozen)}


def _values(
    read: ReadModule, layers: list[LayerState], example: Example, value_biases: str, refuse: bool
) -> tuple[dict[str, _Values], dict[int, _Values], list[int]]:
    """The values of each kind of X that the module has, and of each of these layers' states, by its index; and the
    number of paths of each length."""
    parts: dict[str, _Values] = defaultdict(_Values)
    of_layers: dict[int, _Values] = defaultdict(_Values)
    num_paths: list[int] = []
    has_constant = read.upto is None
    for chunk, tape in counted(
        recorded(read, example), example.num_sequences, "spectrum: sequences", lambda pair: pair[0].num_sequences
    ):
        num_paths = num_paths or tape.paths(read.upto, read.choose).by_length
        constants: dict[str, Tensor] = {}
        if has_constant:
            try:
                constants = read.constants(chunk)
            except ConfigError as error:
                has_constant = False
                log.info("the part that depends on no input is left out: %s", error)
        for kind, sums in read.kinds(tape, value_biases, refuse):
            parts[kind].add(_numbers(read, kind, sums, chunk, len(num_paths), constants.get(kind)), sums)
        del sums  # before those of the next sequences
        if layers:
            for number, sums in sums_after_layers(tape, layers, value_biases, refuse):
                of_layers[number].add(_numbers_of_layer(read, layers, sums, chunk), sums)
    for of_kind in parts.values():  # whatever X is, the loss is that of the output
        of_output = parts["output"].numbers
        of_kind.numbers.update({name: of_output[name] for name in (*SCORED, *WHOLE, *BESIDE, *LATER, "num_scored")})
        of_kind.numbers[EXCESS] = of_kind.numbers["loss_upto"] - of_kind.numbers["whole_loss"]
    return parts, dict(sorted(of_layers.items())), num_paths


def _numbers_of_layer(read: ReadModule, layers: Sequence[LayerState], sums: Sums, chunk: Example) -> dict[str, Tensor]:
    """The size of the states of each of these sequences and the lengths that they need, (1, B)."""
    places = [layer.place for layer in layers]
    seen = partial(without_absent, present_BN=read.counted_after(places, chunk, sums.state_BND.shape[1]))
    X = seen(sums.state_BND)
    size_B = norms(X, 0)
    error_KB = torch.stack([norms(X - upto, 0) for upto in accumulate(map(seen, sums.by_length_KBND))]) / size_B
    return {"size": size_B[None], **_lengths_needed(error_KB)}


def _lengths_needed(error_KB: Tensor) -> dict[str, Tensor]:
    """k95, k99 and k999 of each sequence, (1, B), from the error that is left at each length."""
    return {name: first_within(error_KB, most)[None] for name, most in NEEDED.items()}


def _numbers(
    read: ReadModule, kind: str, sums: Sums, chunk: Example, num_lengths: int, constant: Tensor | None
) -> dict[str, Tensor]:
    """What `_Values.numbers` has of these sequences; one length at a time, because all can take the most memory."""
    seen = partial(without_absent, present_BN=read.counted(chunk))
    missing = [torch.zeros_like(sums.state_BND)] * (num_lengths - len(sums.by_length_KBND))
    S_K, X = [*sums.by_length_KBND, *missing], seen(sums.state_BND)
    size_B = norms(X, 0)
    directions = X / size_B.view(-1, *[1] * (X.dim() - 1))  # first, because the square of a size can overflow

    def share(S: Tensor) -> Tensor:
        return (S * directions).flatten(1).sum(-1) / size_B

    numbers = {"size": size_B[None]}
    numbers["mass"] = torch.stack([norms(S, 0) for S in map(seen, S_K)]) / size_B
    numbers["share"] = torch.stack([share(S) for S in map(seen, S_K)])
    numbers["error_upto"] = torch.stack([norms(X - upto, 0) for upto in accumulate(map(seen, S_K))]) / size_B
    numbers |= _lengths_needed(numbers["error_upto"])
    if kind == "output":
        scored = torch.stack([_scored(x, chunk) for x in chain(accumulate(S_K), [sums.state_BND])], dim=1)
        for column, name, score_KB in zip(SCORED, WHOLE, scored[:2], strict=True):
            numbers[column], numbers[name] = score_KB[:-1], score_KB[-1:]
        numbers["num_scored"] = scored[2, -1:]
        numbers |= _beside(read, S_K, sums.state_BND, chunk)
    if constant is not None:
        c = seen(constant)
        numbers["constant_mass"] = norms(c, 0)[None] / size_B
        numbers["constant_share"] = share(c)[None]
    return numbers


def _beside(read: ReadModule, S_K: Sequence[Tensor], whole: Tensor, chunk: Example) -> dict[str, Tensor]:
    """BESIDE of each length and sequence, (K, B), and LATER of each sequence, (1, B); nan where there is none."""
    nan_KB = torch.full((len(S_K), len(whole)), float("nan"), dtype=torch.float64)
    numbers = dict.fromkeys(BESIDE, nan_KB) | dict.fromkeys(LATER, nan_KB[:1])
    if not read.has_logits:
        return numbers
    beside = beside_whole(accumulate(S_K), whole, chunk.targets)
    counted = read.counted(chunk)
    settled = first_within(beside.divergence, CLOSE)
    close = stays_within(beside.divergence, CLOSE)
    for name, of_tokens in zip(BESIDE, (beside.divergence, beside.agrees, close), strict=False):
        numbers[name] = _mean_of_tokens(of_tokens, counted)
    if beside.excess is not None and beside.whole_loss is not None and chunk.targets is not None:
        close, scored = stays_within(beside.excess.abs(), CLOSE), is_scored(chunk.targets)
        numbers["loss_settled_upto"] = _mean_of_tokens(close, scored)
        numbers["hard_tokens_later"] = last_third_later(settled, beside.whole_loss, scored)[None]
    counted = torch.ones_like(settled, dtype=torch.bool) if counted is None else counted.view_as(settled)
    positions = torch.arange(settled[0].numel(), device=settled.device).expand(len(settled), -1)
    numbers["last_tokens_later"] = last_third_later(settled, positions, counted)[None]
    return numbers


def _mean_of_tokens(of_tokens: Tensor, counted: Tensor | None) -> Tensor:
    """Mean over the tokens that count of each sequence; None: all do. (K, B, ...) to (K, B)."""
    of_KBT = of_tokens.double().reshape(*of_tokens.shape[:2], -1)
    if counted is None:
        return of_KBT.mean(-1)
    counted_BT = counted.reshape(len(counted), -1)
    return torch.where(counted_BT, of_KBT, 0).sum(-1) / counted_BT.sum(-1)


def _shares_below(read: ReadModule, example: Example, value_biases: str, seed: int) -> Iterator[list[float]]:
    """For each kind of X, the share of the first sequences whose sum of each length is no more than rounding."""

    def sums_of(tape: Tape) -> Iterator[Tensor]:
        for _, sums in read.kinds(tape, value_biases, refuse=False):
            yield sums.by_length_KBND

    for floors in floors_of_parts(read, example, sums_of, generator_for(seed, "rounding")):
        yield floors.share_below().tolist()


def _scored(outputs: Tensor, example: Example) -> Tensor:
    """Loss per scored token, accuracy and number of scored tokens of each sequence, (3, B); nan without targets."""
    if example.targets is None:
        return torch.full((3, example.num_sequences), float("nan"))
    each = scores(outputs, example.targets)
    return torch.stack([torch.stack([of.mean_loss, of.accuracy, of.tokens]).double() for of in each], dim=1)


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


def digest(table: pd.DataFrame) -> str:
    """Mass, error, loss and divergence by length, mean over seeds, for a terminal."""
    lengths, constant = table[table.part == "length"], table[table.part == "constant"]
    mean = lengths.astype({"path_length": int}).groupby(["weights", "of", "path_length"], sort=False)
    printed = mean[list(PRINTED)].mean().dropna(axis=1, how="all").map("{:.3g}".format)
    alone = constant.groupby(["weights", "of"], sort=False)[["mass", "share"]].mean().map("{:.3g}".format)
    of_constant = "" if alone.empty else f"the part that depends on no input\n{alone.to_string()}\n"
    needed = lengths.groupby(["weights", "of"], sort=False)[list(NEEDED)].mean().map("{:.3g}".format)
    of_layers = table[table.part == "layer"].astype({"layer": float})
    by_layer = thinned(of_layers.pivot_table("k99", "weights", "layer", "mean", sort=False))
    after = "; ".join(f"{weights} {' '.join(map('{:.3g}'.format, row))}" for weights, row in by_layer.iterrows())
    numbers = ", ".join(map("{:.0f}".format, by_layer.columns))
    of_each = f"the same for 1 % and the states after layers {numbers}: {after}\n" if after else ""
    about = ", ".join(filter(None, (f"mean of {table.num_sequences.iloc[0]} sequences", uncounted_in_words(table))))
    spread = lengths.groupby("weights", sort=False).weights_sd.mean().map("{:.2g}".format)
    return (
        f"sums of all paths by length ({about})\n{printed.to_string()}\n"
        f"standard deviation of the weights: {', '.join(f'{sd} {weights}' for weights, sd in spread.items())}\n"
        f"first length from which the error is below 5, 1 and .1 %\n{needed.to_string()}\n"
        f"{of_each}{of_constant}largest remainder of the exact sums: {table.remainder.max():.1e}"
    )


def check(subject: Subject, _: Any) -> None:
    """Raise ConfigError for modules whose output is not the sum of its paths."""
    if not subject.networks:
        check_sums(subject.reads)


ANALYSIS = Analysis(
    Options,
    table,
    draw_spectrum,
    digest,
    COLUMNS,
    ("error_upto",),
    needs={"attention"},
    check=check,
    lines="weights",
    most_panels=12,
)

"""Inverts x + c f(x), f an attention layer, by fixed-point iteration; and whole networks, layer by layer.

Kim et al. 2021, sec. 5.2 and app. J, Figs. 3, 5 and 6. Every number here is float64.

Shapes: B sequence, N token, D width.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.columns import LOSS_FALL
from rankbench.analyses.lipschitz import contracted
from rankbench.config.keys import ConfigError, key
from rankbench.measures.attention_layer import attend, fresh_layer
from rankbench.measures.lipschitz_of_networks import COVERED
from rankbench.measures.rounding import FLOOR_SEQUENCES, MARGIN, RandomRounding
from rankbench.model.network import Network, check_one_stream, run
from rankbench.model.sublayers import AnySublayer, AttentionSublayer
from rankbench.plots.invertibility import draw_invertibility
from rankbench.seeds import generator_for

DRIFT = 10  # iterations in which rounding can move an inverse away from the input


@dataclass(frozen=True)
class Options:
    """Which layers are inverted, at which inputs."""

    attentions: list[str] = key("Fresh layers of these kinds. []: the layers of the model.", choices=COVERED)
    tokens: list[int] = key(
        "Numbers of tokens of an input.", at_least=2, nonempty=True, why="attention needs at least 2 tokens"
    )
    widths: list[int] = key("Widths of fresh layers, each with all of tokens.", at_least=1, nonempty=True)
    heads: int = key("Number of heads of a fresh layer.", at_least=1)
    tied: bool = key("Whether a fresh l2 layer has W_Q = W_K.")
    gain: float = key("g: weights of a fresh layer are uniform in [-g/sqrt(width), g/sqrt(width)].", above=0)
    coefficients: list[float] = key("The c of x + c f(x).", nonempty=True)
    ranges: list[list[float]] = key("Ranges [low,high] of inputs, whose first token is 0.", nonempty=True)
    sequences: int = key("Number of inputs.", at_least=1)
    iterations: int = key("Number of iterations of an inversion.", at_least=1)
    network: bool = key("Whether to also invert the whole model on its test set. Needs model.norm=none.")

    def __post_init__(self) -> None:
        check_ranges("invertibility", self.ranges)
        for width in self.widths:
            if width % self.heads:
                raise ConfigError(
                    f"analysis.invertibility.widths={self.widths}: {width} is not divisible by heads={self.heads}"
                )
        if self.network and self.attentions:
            raise ConfigError("analysis.invertibility.network=true: inverts the subject's model; set attentions to []")


def check_ranges(analysis: str, ranges: list[list[float]]) -> None:
    """Raise ConfigError unless every range of inputs is a pair, the lower number first."""
    for pair in ranges:
        if len(pair) != 2 or not pair[0] < pair[1]:
            raise ConfigError(f"analysis.{analysis}.ranges={ranges}: wants pairs [low,high], low below high")


def inputs_of(low: float, high: float, sequences: int, tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """Inputs at which the slope of dot-product attention is steepest, (B, N, D): first token 0, the others uniform."""
    drawn_BND = torch.rand(sequences, tokens, width, generator=generator, dtype=torch.float64)
    x_BND = low + (high - low) * drawn_BND
    x_BND[:, 0] = 0
    return x_BND


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each iterate of an inversion, and for the input of each layer of a network that is inverted as a whole.

    A network has rows for the last iteration only. An error that does not vanish shows that the iteration does not
    invert g, so f is not a contraction. g may still have an inverse.
    """
    rows: list[dict] = []
    if options.attentions:
        for name, tokens, width in product(options.attentions, options.tokens, options.widths):
            # the same inputs for every kind of attention
            generator = generator_for(subject.seed, "invertibility", 1)
            kind = name.removeprefix("contractive_")
            layer = fresh_layer(kind, width, options.heads, options.gain, generator, tied=options.tied)
            layer = contracted(layer.to(subject.device), name, tokens)
            axes = {"weights": "fresh", "part": "attention", "layer": 0, "attention": name}
            rows += _of_layer(functools.partial(attend, layer), tokens, width, subject, options, axes)
    else:
        for weights, model in subject.networks_in_float64():
            for number, attention in enumerate(model.attentions, 1):
                axes = {"weights": weights, "part": "attention", "layer": number, "attention": attention.score_name}
                for tokens in options.tokens:
                    rows += _of_layer(attention, tokens, model.width, subject, options, axes)
            if options.network:
                rows += [{"weights": weights} | row for row in _rows_of_network(model, subject, options)]
    return pd.DataFrame(rows, columns=list(ROWS)).assign(**subject.how_trained)


def _of_layer(
    function: Callable[[Tensor], Tensor], tokens: int, width: int, subject: Subject, options: Options, axes: dict
) -> Iterator[dict]:
    for low, high in options.ranges:
        generator = generator_for(subject.seed, "invertibility")
        x_BND = inputs_of(low, high, options.sequences, tokens, width, generator).to(subject.device)
        for coefficient in options.coefficients:

            def scaled(x: Tensor, c: float = coefficient) -> Tensor:
                return c * function(x)

            iterates = invert(scaled, x_BND + scaled(x_BND), options.iterations)
            floor = _floor(scaled, x_BND[:FLOOR_SEQUENCES], generator_for(subject.seed, "rounding"))
            of_input = {"tokens": tokens, "width": width, "inputs": f"{low:g}..{high:g}", "coefficient": coefficient}
            for iteration, iterate_BND in enumerate(iterates):
                yield axes | of_input | {"iteration": iteration} | _errors(iterate_BND, x_BND, floor)


def invert(
    function: Callable[[Tensor], Tensor], y: Tensor, iterations: int, start: Tensor | None = None
) -> list[Tensor]:
    """Iterates of the fixed point of x = y - f(x), from x = y or another start.

    Kim et al., sec. 4.1 (Behrmann et al. 2019). Where f is a contraction they converge to the inverse of
    g(x) = x + f(x). Returns iterations + 1 tensors, of which the first is the start.
    """
    iterates = [y if start is None else start]
    for _ in range(iterations):
        iterates.append(y - function(iterates[-1]))
    return iterates


def _floor(function: Callable[[Tensor], Tensor], x_BND: Tensor, generator: torch.Generator) -> float:
    """Rounding error of an inverse: how far random rounding moves an iteration that begins at x in DRIFT steps.

    These are so few that the floor is still one of rounding where x is not an attracting fixed point."""
    with RandomRounding(generator):
        drifted_BND = invert(function, x_BND + function(x_BND), DRIFT, start=x_BND)[-1]
    return _floor_of_drift(drifted_BND, x_BND)


def _floor_of_drift(drifted_BND: Tensor, x_BND: Tensor) -> float:
    own = torch.finfo(x_BND.dtype).eps * x_BND.abs().max().item()
    return max(MARGIN * (drifted_BND - x_BND).abs().max().item(), own)


def _errors(iterate_BND: Tensor, x_BND: Tensor, floor: float) -> dict[str, float]:
    largest = (iterate_BND - x_BND).abs().max().item()
    errors = {"error": largest, "relative_error": largest / x_BND.abs().max().item()}
    return errors | {"noise_floor": floor, "below_floor": float(largest <= floor)}


def _rows_of_network(network: Network, subject: Subject, options: Options) -> Iterator[dict]:
    """From the last state to the embedding, every sub-layer y = a x + b f(x) undone as x = y/a - (b/a) f(x)."""
    inputs = subject.inputs_in_float64(options.sequences)
    present_BN, rounding = network.present(inputs), RandomRounding(generator_for(subject.seed, "rounding"))
    steps = list(run(network, inputs))
    with rounding:
        *_, last = run(network, inputs[:FLOOR_SEQUENCES])
    x_BND, drifted_BND = steps[-1].output_BND, last.output_BND
    for step in reversed(steps):
        sublayer = step.sublayer

        def branch_over_skip(x_BND: Tensor, sublayer: AnySublayer = sublayer) -> Tensor:
            present = None if present_BN is None else present_BN[: len(x_BND)]
            return sublayer.branch / sublayer.skip * sublayer.f(x_BND, present)

        x_BND = invert(branch_over_skip, x_BND / sublayer.skip, options.iterations)[-1]
        start_BND = step.input_BND[:FLOOR_SEQUENCES]
        with rounding:
            drifted_BND = invert(branch_over_skip, drifted_BND / sublayer.skip, DRIFT, start=start_BND)[-1]
        if not isinstance(sublayer, AttentionSublayer):
            continue
        axes = {"part": "network", "layer": sublayer.layer, "attention": sublayer.part.score_name}
        axes |= {"tokens": x_BND.shape[1], "width": network.width, "inputs": "test", "coefficient": 1.0}
        # Absent tokens count as inverted.
        inverse_BND = x_BND if present_BN is None else x_BND.where(present_BN[..., None], step.input_BND)
        floor = _floor_of_drift(drifted_BND, start_BND)
        yield axes | {"iteration": options.iterations} | _errors(inverse_BND, step.input_BND, floor)


def digest(table: pd.DataFrame) -> str:
    """Largest error at the last iteration over that before the first, of the worst seed, for a terminal."""
    axes = ["weights", "attention", "layer", "tokens", "width", "inputs", "coefficient"]
    layers = table[table.part == "attention"]
    last = layers[layers.iteration == layers.iteration.max()].set_index(["seed", *axes]).error
    first = layers[layers.iteration == 0].set_index(["seed", *axes]).error
    worst = (last / first).groupby(axes, sort=False).max().unstack("coefficient")
    most, seeds = layers.iteration.max(), table.seed.nunique()
    lines = [f"share of the error left after {most} iterations, by c (worst of {seeds} seeds)"]
    lines.append(worst.map("{:.1e}".format).to_string())
    network = table[table.part == "network"]
    if len(network):
        errors = network.groupby(["weights", "layer"], sort=False).relative_error.max().map("{:.1e}".format)
        lines += ["relative error of the whole network's inverse, at the input of each layer", errors.to_string()]
    return "\n".join(lines)


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError for a network that cannot be inverted here, or that is contractive for too few keys."""
    network = subject.network
    if options.attentions:
        return
    check_one_stream(network, "invertibility")
    if options.network and (network.has_norms or any(sublayer.skip == 0 for sublayer in network.sublayers)):
        raise ConfigError(
            "analysis.invertibility.network=true: only layers of the form x + f(x) can be undone; use model.norm=none "
            "and skips around every sub-layer, or set network to false"
        )
    network.attentions[0].num_keys(max(options.tokens))


ROWS = {
    "weights": "trained, initialised, or fresh for the layers of the option `attentions`.",
    "part": "attention: g(x) = x + c f(x) is inverted from g(x); network: the inputs of layer `layer` are computed "
    "from the last state by undoing each sub-layer.",
    "layer": "Number of the layer; 0 for fresh layers.",
    "attention": "Kind of attention.",
    "tokens": "Number of tokens of an input.",
    "width": "Width of a token.",
    "inputs": "Range of the inputs; test for a network, the test set.",
    "coefficient": "c; 1 for a network.",
    "iteration": "Number of iterations.",
    "error": "Largest |x^ - x| over sequences, tokens and coordinates.",
    "relative_error": "The same over the largest |x|.",
    "noise_floor": "Rounding error of `error` (rankbench.measures.rounding), from the first 16 inputs.",
    "below_floor": "1 where error is no larger than noise_floor, else 0.",
}
COLUMNS = ROWS | LOSS_FALL
ANALYSIS = Analysis(
    Options,
    table,
    draw_invertibility,
    digest,
    COLUMNS,
    ("coefficient", "iteration"),
    needs={"sublayers"},
    check=check,
    most_panels=6,
)

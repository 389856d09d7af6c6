"""Inverting x + c f(x) by its fixed-point iteration, f an attention layer; and whole networks, layer by layer.

Kim et al. 2021, sec. 5.2 and app. J, Figs. 3, 5 and 6. Every number here is float64.

Shapes: B sequence, N token, D width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Plan, Subject
from rankbench.analyses.lipschitz import contracted, fresh
from rankbench.config import ConfigError, ModelConfig, unknown
from rankbench.constants import COVERED
from rankbench.lipschitz import attend, invert
from rankbench.model.trace import Trace
from rankbench.model.transformer import Transformer
from rankbench.plots.invertibility import draw_invertibility
from rankbench.seeds import generator_for


@dataclass(frozen=True)
class Options:
    """attentions: of COVERED, fresh layers of the next four keys; []: the subject's model. tokens, widths: every pair
    is a layer of its own (of a model: its width); heads, tied (l2: W_Q = W_K); gain: weights are uniform in
    +-gain/sqrt(width). coefficients: the c. ranges: [low, high] of the inputs, uniform but for the first token, which
    is 0. sequences: how many of them. iterations: of the inversion. network: invert the subject's model on its test
    set too, from its last state to its embedding; it must have norm=none.
    """

    attentions: list[str]
    tokens: list[int]
    widths: list[int]
    heads: int
    tied: bool
    gain: float
    coefficients: list[float]
    ranges: list[list[float]]
    sequences: int
    iterations: int
    network: bool

    def __post_init__(self) -> None:
        for attention in self.attentions:
            if attention not in COVERED:
                raise ConfigError(unknown("analysis.invertibility.attentions", attention, COVERED))
        for key in ("tokens", "widths", "coefficients", "ranges"):
            if not getattr(self, key):
                raise ConfigError(f"analysis.invertibility.{key}=[]: name at least one")
        for key, least in (("heads", 1), ("sequences", 1), ("iterations", 1)):
            if getattr(self, key) < least:
                raise ConfigError(f"analysis.invertibility.{key}={getattr(self, key)}: must be at least {least}")
        if not self.gain > 0:
            raise ConfigError(f"analysis.invertibility.gain={self.gain}: must be above 0")
        if min(self.tokens) < 2:
            raise ConfigError(f"analysis.invertibility.tokens={self.tokens}: attention needs at least 2 tokens")
        for pair in self.ranges:
            if len(pair) != 2 or not pair[0] < pair[1]:
                raise ConfigError(
                    f"analysis.invertibility.ranges={self.ranges}: wants pairs [low,high], low below high"
                )
        for width in self.widths:
            if width < 1 or width % self.heads:
                raise ConfigError(
                    f"analysis.invertibility.widths={self.widths}: {width} is not divisible by heads={self.heads}"
                )
        if self.network and self.attentions:
            raise ConfigError("analysis.invertibility.network=true: of the subject's model; set attentions to []")


def inputs_of(low: float, high: float, sequences: int, tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """Inputs at which dot-product attention is least Lipschitz, (B, N, D): the first token 0, the others uniform."""
    drawn_BND = torch.rand(sequences, tokens, width, generator=generator, dtype=torch.float64)
    x_BND = low + (high - low) * drawn_BND
    x_BND[:, 0] = 0
    return x_BND


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: weights (trained | initialised | fresh), part, layer, attention, tokens, width, inputs (their range),
    coefficient, iteration.

    part: attention, g(x) = x + c f(x) inverted from g(x), or network: the inputs of layer `layer` as found from the
    last state, each sub-layer undone by as many iterations; of those only the last is a row, coefficient is 1, inputs
    test. error: largest |x^ - x| over sequences, tokens and coordinates, relative_error over the largest |x|;
    error_median: the median over sequences of each one's largest.

    An error that stays says that the iteration does not invert g, which a contraction rules out; g may have an inverse
    all the same.
    """
    parts = []
    if options.attentions:
        for attention, tokens, width in product(options.attentions, options.tokens, options.widths):
            # every kind of attention is asked at the same inputs
            generator = generator_for(subject.seed, "invertibility", 1)
            layer = fresh(attention, width, options.heads, options.gain, generator, options.tied)
            layer = contracted(layer, attention, tokens)
            place = {"weights": "fresh", "part": "attention", "layer": 0, "attention": attention}
            parts += _of_layer(lambda x_BND, at=layer: attend(at, x_BND), tokens, width, subject.seed, options, place)
    else:
        for weights, given in subject.models.items():
            model = given.without().double()
            for number, block in enumerate(model.blocks, 1):
                place = {"weights": weights, "part": "attention", "layer": number, "attention": model.cfg.attention}
                of_block = _map_of(block.attention)
                for tokens in options.tokens:
                    parts += _of_layer(
                        of_block, tokens, model.cfg.width, subject.seed, options, place, model.read_out.weight.device
                    )
            if options.network:
                parts.append(pd.DataFrame(_rows_of_network(model, subject, options)).assign(weights=weights))
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def _map_of(attention: torch.nn.Module, present_BN: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    return lambda x_BND: attention(x_BND, "", None, None, present_BN)


def _of_layer(
    function: Callable[[Tensor], Tensor],
    tokens: int,
    width: int,
    seed: int,
    options: Options,
    place: dict,
    device: torch.device | str = "cpu",
) -> Iterator[pd.DataFrame]:
    for low, high in options.ranges:
        x_BND = inputs_of(low, high, options.sequences, tokens, width, generator_for(seed, "invertibility")).to(device)
        for coefficient in options.coefficients:

            def scaled(x: Tensor, c: float = coefficient) -> Tensor:
                return c * function(x)

            found = invert(scaled, x_BND + scaled(x_BND), options.iterations)
            rows = pd.DataFrame([_errors(one, x_BND) for one in found]).assign(iteration=range(len(found)))
            where = {"tokens": tokens, "width": width, "inputs": f"{low:g}..{high:g}", "coefficient": coefficient}
            yield rows.assign(**place, **where)


def _errors(found_BND: Tensor, x_BND: Tensor) -> dict[str, float]:
    error_B = (found_BND - x_BND).abs().flatten(1).amax(1)
    largest = error_B.max().item()
    return {
        "error": largest,
        "relative_error": largest / x_BND.abs().max().item(),
        "error_median": error_B.median().item(),
    }


def _rows_of_network(model: Transformer, subject: Subject, options: Options) -> Iterator[dict]:
    """From the last state to the embedding, every sub-layer y = a x + b f(x) undone as x = y/a - (b/a) f(x)."""
    cfg = model.cfg
    _check_network(cfg)
    inputs = subject.test.inputs[: options.sequences]
    present_BN = model.present(inputs)
    trace = Trace(".attention.input", "embedding", "state")
    model(inputs, trace=trace)
    x_BND = trace["state"]
    for number in range(cfg.layers, 0, -1):
        block = model.blocks[number - 1]
        undone = [(_map_of(block.attention, present_BN), block.attention_skip)]
        if block.mlp is not None:
            undone.append((lambda x, at=block: at.mlp(x, "", None), block.mlp_skip))
        for function, skip in reversed(undone):

            def branch(x: Tensor, f: Callable = function, scale: float = block.branch_scale / skip) -> Tensor:
                return scale * f(x)

            x_BND = invert(branch, x_BND / skip, options.iterations)[-1]
        where = {"part": "network", "layer": number, "attention": cfg.attention, "tokens": x_BND.shape[1]}
        where |= {"width": cfg.width, "inputs": "test", "coefficient": 1.0, "iteration": options.iterations}
        wanted_BND = trace[f"layers.{number - 1}.attention.input"]
        found_BND = x_BND if present_BN is None else x_BND.where(present_BN[..., None], wanted_BND)
        yield where | _errors(found_BND, wanted_BND)


def digest(table: pd.DataFrame) -> str:
    """Largest error at the last iteration over that before the first, the worst seed, for a terminal."""
    axes = ["weights", "attention", "layer", "tokens", "width", "inputs", "coefficient"]
    layers = table[table.part == "attention"]
    last = layers[layers.iteration == layers.iteration.max()].set_index(["seed", *axes]).error
    first = layers[layers.iteration == 0].set_index(["seed", *axes]).error
    worst = (last / first).groupby(axes, sort=False).max().unstack("coefficient")
    most, seeds = layers.iteration.max(), table.seed.nunique()
    lines = [
        f"share of the error left after {most} iterations, by c (worst of {seeds} seeds)",
        worst.map("{:.1e}".format).to_string(),
    ]
    network = table[table.part == "network"]
    if len(network):
        found = network.groupby(["weights", "layer"], sort=False).relative_error.max().map("{:.1e}".format)
        lines += ["relative error of the whole network's inverse, at the input of each layer", found.to_string()]
    return "\n".join(lines)


COLUMNS = [
    *("weights", "part", "layer", "attention", "tokens", "width", "inputs", "coefficient", "iteration"),
    *("error", "relative_error", "error_median"),
]


def check_plan(plan: Plan, options: Options) -> None:
    """ConfigError for a network that has no inverse here, and where it is contractive for too few keys."""
    if options.network:
        _check_network(plan.model.cfg)
    if not options.attentions:
        plan.model.blocks[0].attention.num_keys(max(options.tokens))


def _check_network(cfg: ModelConfig) -> None:
    if cfg.norm != "none" or not cfg.skip or (cfg.mlp and not cfg.mlp_skip):
        raise ConfigError(
            "analysis.invertibility.network=true: layers are undone where x + f(x) is all they do; use model.norm=none "
            "and skips round every sub-layer, or set network to false"
        )


ANALYSIS = Analysis(Options, table, draw_invertibility, digest, check=check_plan)

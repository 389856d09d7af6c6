"""Lipschitz constants of a layer, of blocks and of a network: bounds, certificates at data, measurements.

Kim et al. 2021, Figs. 2, 7 and 8; formulas in rankbench.measures.lipschitz_bounds. Every number here is float64.

Shapes: B sequence, N token, D width, H head, K head width.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject, each_sequence
from rankbench.analyses.columns import SPECIAL_TOKENS
from rankbench.config.keys import ConfigError, key
from rankbench.measures import lipschitz_bounds
from rankbench.measures import lipschitz_of_networks as of_networks
from rankbench.measures.attention_layer import AttentionLayer, fresh_layer
from rankbench.measures.certified_ball import check_covered, on_balls, state_of, through_sublayers
from rankbench.measures.jacobian_ascent import ascend, jacobian_norm, random_starts
from rankbench.model.attention import visible_keys
from rankbench.model.network import Layer, Network, check_one_stream, run
from rankbench.model.sublayers import MlpSublayer
from rankbench.plots.lipschitz import draw_lipschitz
from rankbench.progress import counted
from rankbench.runs.tables import mean_of_seeds
from rankbench.seeds import generator_for
from rankbench.tasks import Corpus

MOST_NUMBERS = 8192  # of a sequence's states: its Jacobian then takes half a GiB, and its norm a few minutes
BELOW_CAP = 1 + 1e-4  # times the cap: a capped matrix has a norm some 1e-6 above it in float32


@dataclass(frozen=True)
class Options:
    """Which layer is bounded and measured, and how the ascent searches for inputs."""

    layer: str | None = key("A fresh layer of this kind. null: the layers of the model.", choices=of_networks.COVERED)
    width: int = key("Width of the fresh layer.", at_least=1)
    heads: int = key("Number of heads of the fresh layer.", at_least=1)
    tied: bool = key("Whether a fresh l2 layer has W_Q = W_K.")
    mask: str = key("Mask of the fresh layer.", choices=("none", "causal"))
    gain: float | None = key("g: weights are uniform in [-g/sqrt(width), g/sqrt(width)]. null: the identity.", above=0)
    tokens: list[int] = key(
        "Numbers of tokens of the fresh layer's inputs.",
        at_least=2,
        nonempty=True,
        why="attention needs at least 2 tokens",
    )
    norms: list[str] = key("p of the constants.", choices=("inf", "2"), nonempty=True)
    radius: float = key("Radius of the ball in which dot-product attention is bounded.", above=0)
    sequences: int | None = key("Number of test sequences at which the model is measured. null: all.", at_least=1)
    radii: list[float] = key("Radii of balls around embedded test sequences (Frobenius norm). []: none.", above=0)
    cap: float | None = key(
        "c: also bounds a network whose matrices all have the spectral norm c, if the network's own are at most c, as "
        "with optimizer.cap=c. null: no such bound.",
        above=0,
    )
    starts: int = key("Number of random inputs at which the ascent begins. 0: no ascent.", at_least=0)
    start_range: float = key("Largest c of the distributions U[-c, c] from which starts are drawn.", above=0)
    steps: int = key("Number of steps of the ascent.", at_least=1)
    lr: float = key("Learning rate of the ascent, which is Adam's.", above=0)
    keep: int = key("Number of the best starts that have rows.", at_least=1)
    record_every: int | None = key("Interval between rows of the ascent. null: its end.", unit="steps", at_least=1)
    mirror: bool = key("Whether a second ascent moves tokens across half-way. Needs layer=l2, width=1, mask=none.")

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(
                f"analysis.lipschitz.width={self.width}: not divisible by analysis.lipschitz.heads={self.heads}"
            )
        if self.layer == "contractive_l2" and not self.tied:
            raise ConfigError("analysis.lipschitz.tied=false: layer=contractive_l2 has no constant to divide by")
        if self.radii and (self.layer is not None or "2" not in self.norms):
            raise ConfigError("analysis.lipschitz.radii: needs layer=null and 2 in norms; set it to []")
        if self.mirror and not (self.layer in ("l2", "contractive_l2") and self.width == 1 and self.mask == "none"):
            raise ConfigError("analysis.lipschitz.mirror=true: for layer=l2 of width=1 with mask=none; set it to false")


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each bound, certificate and measurement, of attention, blocks, the network and its weights."""
    if options.layer is None:
        rows = list(_rows_of_subject(subject, options))
    else:
        generator = generator_for(subject.seed, "lipschitz")
        kind = options.layer.removeprefix("contractive_")
        layer = fresh_layer(kind, options.width, options.heads, options.gain, generator, tied=options.tied)
        layer, rows = layer.to(subject.device), []
        for num_tokens in options.tokens:
            seen_NM = visible_keys(options.mask, None, num_tokens, subject.device)
            masked = contracted(layer._replace(seen_NM=seen_NM), options.layer, num_tokens)
            bounds = {norm: lipschitz_bounds.theorem(masked, num_tokens, norm) for norm in options.norms}
            of_layer = [*_constants(0, masked, num_tokens, options, bounds)]
            of_layer += _ascents(0, masked, num_tokens, options, generator)
            axes = {"weights": "fresh", "attention": options.layer, "tokens": num_tokens}
            rows += [axes | row for row in of_layer]
    columns = [*ROWS, *(BALLS if options.radii else ())]
    whole = pd.DataFrame(rows, columns=columns).fillna({"start": 0, "step": 0}).astype({"start": int, "step": int})
    return whole.assign(**subject.what_counts)


def contracted(layer: AttentionLayer, kind: str, num_tokens: int) -> AttentionLayer:
    """The layer divided by its bound for p = inf if it is contractive_l2, else the layer itself."""
    if kind != "contractive_l2":
        return layer
    return layer._replace(divisor=lipschitz_bounds.theorem_inf(layer._replace(divisor=1.0), num_tokens))


def _row(part: str, layer: int, norm: str, quantity: str, kind: str, value: float) -> dict:
    return {"part": part, "layer": layer, "p": float(norm), "quantity": quantity, "kind": kind, "value": value}


def _constants(
    number: int, layer: AttentionLayer | None, num_tokens: int, options: Options, bounds: dict[str, float]
) -> Iterator[dict]:
    """Rows of the constants that follow from the weights of a layer. bounds: those of the theorem, by norm."""
    row = functools.partial(_row, "attention", number)
    for norm in options.norms:
        yield row(norm, "theorem", "bound", bounds[norm])
        if layer is None or not np.isfinite(bounds[norm]):
            continue
        if norm == "2":
            printed = lipschitz_bounds.theorem_2(layer, num_tokens, printed=True)
            yield row(norm, "theorem_printed", "estimate", printed)
        if layer.maps.w_q_HDK.shape[0] == layer.maps.w_q_HDK.shape[-1] == 1:
            if norm == "inf":
                value = lipschitz_bounds.one_dimension_inf(layer, num_tokens)
                kind = "exact" if layer.num_seen(num_tokens).max() % 2 else "bound"
                yield row(norm, "one_dimension", kind, value)
            elif layer.seen_NM is None:
                yield row(norm, "one_dimension", "bound", lipschitz_bounds.one_dimension_2(layer, num_tokens))
    if layer is None or layer.kind != "dot" or layer.seen_NM is not None or layer.has_biases:
        return
    for quantity, castin in (("ball", False), ("ball_castin", True)) if "2" in options.norms else ():
        value = lipschitz_bounds.dot_ball_2(layer, num_tokens, options.radius, castin=castin)
        yield row("2", quantity, "bound", value)


def _ascents(
    number: int, layer: AttentionLayer, num_tokens: int, options: Options, generator: torch.Generator
) -> Iterator[dict]:
    """Rows of the largest norms that an ascent over a layer's inputs finds."""
    if not options.starts:
        return
    w_q_HDK = layer.maps.w_q_HDK
    starts_BND = random_starts(options.starts, num_tokens, w_q_HDK.shape[1], options.start_range, generator)
    starts_BND = starts_BND.to(w_q_HDK.device)
    every = options.record_every or options.steps
    for norm in options.norms:
        for mirror in (False, True) if options.mirror and norm == "inf" else (False,):
            quantity = "ascent_mirrored" if mirror else "ascent"
            ascent = ascend(layer, starts_BND, norm, options.steps, options.lr, every, mirror=mirror)
            best_B = ascent.values_TB[-1].argsort(descending=True)[: options.keep]
            for step, values_B in zip(ascent.steps_T, ascent.values_TB[:, best_B].tolist(), strict=True):
                if step == 0 and options.record_every is None:
                    continue
                for start, value in enumerate(values_B, 1):
                    row = _row("attention", number, norm, quantity, "lower_bound", value)
                    yield row | {"start": start, "step": step}


# --- The subject's model ---------------------------------------------------------------------------------------------


def _rows_of_subject(subject: Subject, options: Options) -> Iterator[dict]:
    generator = generator_for(subject.seed, "lipschitz")
    for weights, model in subject.networks_in_float64():
        model.requires_grad_(False)
        inputs = subject.inputs_in_float64(options.sequences)
        lengths_B = model.lengths(inputs)
        most = inputs.shape[1] if lengths_B is None else int(lengths_B.max())
        kind = model.attentions[0].score_name
        rows = [*_rows_of_parts(model, most, options), *_rows_at_data(model, inputs, options)]
        rows += _rows_on_ball(model, inputs, most) if "2" in options.norms else []
        rows += _rows_around_data(model, inputs, rows, options, subject.seed) if options.radii else []
        for number, attention in enumerate(model.attentions, 1):
            layer = of_networks.layer_of(attention, most)
            if layer is not None:
                rows += _ascents(number, layer, most, options, generator)
        yield from ({"weights": weights, "attention": kind, "tokens": most} | row for row in rows)


def _rows_of_parts(network: Network, num_tokens: int, options: Options) -> Iterator[dict]:
    """Rows of the constants that follow from weights alone: of weights, attention, layers and the network."""
    whole, largest = dict.fromkeys(options.norms, 1.0), 0.0
    for number, sublayers in enumerate(network.layers, 1):
        for sublayer in sublayers:
            for name, weight in of_networks.matrices(sublayer).items():
                norm_of_weight = lipschitz_bounds.linear_norm(weight, "2")
                largest = max(largest, norm_of_weight)
                yield _row(name, number, "2", "spectral_norm", "exact", norm_of_weight)
        attention = sublayers[0].part
        bounds = {norm: of_networks.attention_bound(attention, num_tokens, norm) for norm in options.norms}
        yield from _constants(number, of_networks.layer_of(attention, num_tokens), num_tokens, options, bounds)
        for norm in options.norms:
            value = _layer_bound(sublayers, norm, bounds[norm])
            whole[norm] *= value
            yield _row("block", number, norm, "theorem", "bound", value)
    for norm, value in whole.items():
        value *= of_networks.norm_bound(network.last_norm, norm)
        yield _row("network", 0, norm, "theorem", "bound", value)
    if options.cap is not None and "2" in options.norms and largest <= options.cap * BELOW_CAP:
        value = of_networks.capped_bound(network, num_tokens, options.cap)
        yield _row("network", 0, "2", "capped", "bound", value)


def _rows_on_ball(network: Network, inputs: Tensor, num_tokens: int) -> Iterator[dict]:
    """Rows of the certificate on the ball that holds the embedded sequences; none where a part has no bound."""
    length_BN, present_BN = network.embed(inputs).norm(dim=-1), network.present(inputs)
    radius = length_BN.max() if present_BN is None else length_BN[present_BN].max()
    bounds = of_networks.certificate(network, num_tokens, radius.item())
    if bounds is None:
        return
    for part, values in (("attention", bounds.attentions), ("block", bounds.layers)):
        for layer, value in enumerate(values, 1):
            yield _row(part, layer, "2", "certificate", "bound", value)
    yield _row("network", 0, "2", "certificate", "bound", bounds.network)


def _rows_around_data(
    network: Network, inputs: Tensor, rows: list[dict], options: Options, seed: int
) -> Iterator[dict]:
    """Rows of the bound and the ascent on balls around the sequences. rows: those with the theorem's bound."""
    sequences = counted(each_sequence(inputs, network.lengths(inputs)), len(inputs), "lipschitz: balls")
    states = (network.embed(x[None])[0] for x in sequences)
    of_theorem = {"part": "network", "p": 2.0, "quantity": "theorem"}
    theorem = next(row["value"] for row in rows if of_theorem.items() <= row.items())
    for ball, norm in on_balls(network, states, options.radii, theorem, generator_for(seed, "balls")):
        radius, part = {"radius": ball.radius}, {"operation": ball.operation, "share": ball.share}
        yield _row("network", 0, "2", "certified_ball", "bound", ball.bound) | radius | part
        yield _row("network", 0, "2", "certified_ball", "lower_bound", norm) | radius


def _layer_bound(sublayers: Layer, p: str, of_attention: float) -> float:
    """Bound on a layer's constant, from that of its attention."""
    product = 1.0
    for sublayer in sublayers:
        of_part = of_networks.mlp_bound(sublayer.part, p) if isinstance(sublayer, MlpSublayer) else of_attention
        product *= of_networks.sublayer_bound(sublayer, p, of_part)
    return product


Axes = tuple[str, int, str]  # part, layer, norm


def _rows_at_data(network: Network, inputs: Tensor, options: Options) -> Iterator[dict]:
    """Rows of the largest Jacobian norm over the sequences."""
    largest: dict[Axes, float] = {}
    sequences = each_sequence(inputs, network.lengths(inputs))
    for sequence in counted(sequences, len(inputs), "lipschitz: sequences"):
        for axes, value in _at_sequence(network, sequence, options.norms):
            largest[axes] = max(largest.get(axes, 0.0), value)
    for (part, layer, norm), value in largest.items():
        yield _row(part, layer, norm, "jacobian", "lower_bound", value)


def _at_sequence(network: Network, sequence: Tensor, norms: list[str]) -> Iterator[tuple[Axes, float]]:
    """Each Jacobian norm at one sequence."""
    steps, counted_1N = list(run(network, sequence[None])), network.counted(sequence[None])
    counted_T = None if counted_1N is None else counted_1N[0].nonzero().squeeze(1)
    for layer, sublayers in enumerate(network.layers, 1):
        of_layer = {step.sublayer.kind: step for step in steps if step.sublayer.layer == layer}
        x_1ND, first = of_layer["attention"].input_BND, sublayers[0]
        read_1ND = first.before(x_1ND, first.norm)
        whole_layer = functools.partial(through_sublayers, sublayers)
        maps: Any = (("attention", first.f, read_1ND), ("block", whole_layer, x_1ND))
        for norm, (part, function, at) in product(norms, maps):
            yield (part, layer, norm), jacobian_norm(*_of_tokens(function, at, counted_T), norm)
    whole = _of_tokens(functools.partial(state_of, network), steps[0].input_BND, counted_T)
    for norm in norms:
        yield ("network", 0, norm), jacobian_norm(*whole, norm)


def _of_tokens(
    function: Callable[[Tensor], Tensor], x_1ND: Tensor, counted_T: Tensor | None
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The map from some of a sequence's tokens to the same tokens of its image, the others held fixed; and the tokens.

    counted_T: their indices; None: all.
    """
    x_ND = x_1ND[0]
    if counted_T is None:
        return lambda y_ND: function(y_ND[None])[0], x_ND
    return lambda y_TD: function(x_ND.index_copy(0, counted_T, y_TD)[None])[0, counted_T], x_ND[counted_T]


def digest(table: pd.DataFrame) -> str:
    """Each quantity, mean over seeds, for a terminal; of an ascent the best start at the end."""
    last = table[(table.start <= 1) & ~table.quantity.isin(["spectral_norm", "certified_ball"])]
    last = last[last.step == last.groupby(["quantity", "tokens"]).step.transform("max")]
    axes = ["weights", "part", "layer", "p"] if table.tokens.nunique() == 1 else ["attention", "p", "tokens"]
    named = last.assign(what=last.quantity + " (" + last.kind + ")")
    mean = named.pivot_table("value", axes, "what", "mean", sort=False)
    numbers = mean.map(lambda value: "" if pd.isna(value) else f"{value:.4g}")
    text = f"Lipschitz constants ({mean_of_seeds(table.seed.nunique())})\n{numbers.to_string()}"
    if "radius" not in table:
        return text
    balls = table[table.quantity == "certified_ball"].pivot_table("value", ["weights", "radius"], "kind", "mean")
    return f"{text}\non balls around the data:\n{balls.map('{:.4g}'.format).to_string()}"


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError for several streams, too large a Jacobian, or a cap where it bounds nothing."""
    network, task = subject.network, subject.task
    is_tied_l2 = all(attention.score_name == "l2" and attention.tied_qk for attention in network.attentions)
    if options.cap is not None and not is_tied_l2:
        raise ConfigError(
            f"analysis.lipschitz.cap={options.cap}: only tied L2 attention has a bound from the norms of its matrices; "
            "use null, or model.attention=l2 model.tied_qk=true"
        )
    if options.layer is None:
        check_one_stream(network, "lipschitz")
        if options.radii:
            check_covered(network, 1 if isinstance(task, Corpus) else task.length)
    if options.layer is not None or isinstance(task, Corpus):  # whose texts, not read here, may be short
        return
    numbers = task.length * network.width
    if numbers > MOST_NUMBERS:
        raise ConfigError(
            f"analysis=lipschitz: the Jacobian of {task.length} tokens of width {network.width} would take "
            f"{8 * numbers**2 / 2**30:.0f} GiB; measure sequences of at most {MOST_NUMBERS // network.width} tokens"
        )


ROWS = {
    "weights": "trained, initialised, or fresh for a layer of the option `layer`.",
    "part": "attention, block, network (from the embedding to the state before the read-out), or the name of a weight.",
    "layer": "Number of the layer; 0 for the network and for fresh layers.",
    "attention": "Kind of attention.",
    "tokens": "Number of tokens.",
    "p": "Of the norm: 2 or inf.",
    "quantity": "theorem: Kim et al., Theorem 3.2 as proved; for cosine attention "
    "rankbench.measures.lipschitz_bounds.cosine_bound (inf: not Lipschitz, or no constant known); for blocks and "
    "networks the product of the parts' constants (Lemma 2.1). theorem_printed: p = 2 as printed. one_dimension: "
    "rankbench's own bound for one head of width 1. ball, ball_castin: for dot-product attention while all tokens are "
    "within `radius`. jacobian: the largest ||J||_p at the test sequences, of the map on the tokens that count. "
    "ascent, ascent_mirrored: the largest ||J||_p of the ascent so far. spectral_norm: of a weight, by SVD. "
    "certificate: holds while no embedded token is longer than the longest in the test sequences; on this ball softmax "
    "attention is bounded, too (rankbench.measures.lipschitz_of_networks.certificate). capped: the theorem's bound on "
    "any network of this shape whose matrices have no singular value above `cap`. certified_ball: holds on balls "
    "around the test sequences (rankbench.measures.certified_ball), or everywhere if it is the theorem's; its "
    "lower_bound is the largest ||J||_p that an ascent found in these balls.",
    "kind": "What `value` is to the Lipschitz constant. exact; bound: never below it; lower_bound: never above it; "
    "estimate: neither.",
    "start": "Of an ascent: number of the start, 1 the best of all; else 0.",
    "step": "Of an ascent: its step; else 0.",
    "value": "The number.",
}
BALLS = {  # with the option `radii` only
    "radius": "Of the ball of certified_ball, in the Frobenius norm over all tokens. No column without `radii`.",
    "operation": "Of its bound: the largest part's layer.sublayer.operation, or theorem. No column without `radii`.",
    "share": "That part's share of the bound; the Jacobian at the data is one more part. No column without `radii`.",
}
COLUMNS = ROWS | BALLS | SPECIAL_TOKENS
ANALYSIS = Analysis(
    Options,
    table,
    draw_lipschitz,
    digest,
    COLUMNS,
    ("quantity", "start"),
    needs={"sublayers"},
    check=check,
    most_panels=12,
)

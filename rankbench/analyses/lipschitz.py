"""Lipschitz constants of a layer, of blocks, of a network: bounds, certificates at data, what is measured.

Kim et al. 2021, Figs. 2, 7 and 8; formulas in rankbench.lipschitz. Every number here is float64.

Shapes: B sequence, N token, D width, H head, K head width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench import lipschitz
from rankbench.analyses.analysis import Analysis, Subject
from rankbench.config import ConfigError, unknown
from rankbench.constants import COVERED, attention_bound, block_bound, layer_of, matrices, norm_bound, theorem
from rankbench.lipschitz import Layer
from rankbench.model.attention import visible_keys
from rankbench.model.trace import Trace
from rankbench.model.transformer import Block, Transformer
from rankbench.plots.lipschitz import draw_lipschitz
from rankbench.seeds import generator_for

NORMS = ("inf", "2")
MASKS = ("none", "causal")


@dataclass(frozen=True)
class Options:
    """layer: null for the subject's model, or one of COVERED for a fresh layer of its own, of the next five keys.

    width, heads, tied (l2: W_Q = W_K), mask; gain: its weights are uniform in +-gain/sqrt(width), null for the identity
    (at width 1 all weights are 1). tokens: numbers of tokens of the fresh layer. norms: of NORMS. radius: of the ball
    in which dot-product attention is bounded. sequences: of the test set, at which the subject's model is measured;
    null: all.

    starts: how many random inputs the ascent begins at, 0 for no ascent; start_range: the largest c of their U[-c, c];
    steps, lr: of Adam; keep: of how many starts, the best, there are rows; record_every: every so many steps are a row
    too, null for the last step alone. mirror: of a fresh layer of width 1, a second ascent for p = inf that moves
    tokens across half-way (rankbench.lipschitz.ascend).
    """

    layer: str | None
    width: int
    heads: int
    tied: bool
    mask: str
    gain: float | None
    tokens: list[int]
    norms: list[str]
    radius: float
    sequences: int | None
    starts: int
    start_range: float
    steps: int
    lr: float
    keep: int
    record_every: int | None
    mirror: bool

    def __post_init__(self) -> None:
        for key, allowed in (("layer", COVERED), ("mask", MASKS)):
            if getattr(self, key) is not None and getattr(self, key) not in allowed:
                raise ConfigError(unknown(f"analysis.lipschitz.{key}", getattr(self, key), allowed))
        for norm in self.norms:
            if norm not in NORMS:
                raise ConfigError(unknown("analysis.lipschitz.norms", norm, NORMS))
        for key in ("norms", "tokens"):
            if not getattr(self, key):
                raise ConfigError(f"analysis.lipschitz.{key}=[]: name at least one")
        smallest = {"width": 1, "heads": 1, "sequences": 1, "starts": 0, "steps": 1, "keep": 1, "record_every": 1}
        for key, least in smallest.items():
            if getattr(self, key) is not None and getattr(self, key) < least:
                raise ConfigError(f"analysis.lipschitz.{key}={getattr(self, key)}: must be at least {least}")
        for key in ("gain", "radius", "start_range", "lr"):
            if getattr(self, key) is not None and not getattr(self, key) > 0:
                raise ConfigError(f"analysis.lipschitz.{key}={getattr(self, key)}: must be above 0")
        if min(self.tokens) < 2:
            raise ConfigError(f"analysis.lipschitz.tokens={self.tokens}: attention needs at least 2 tokens")
        if self.width % self.heads:
            raise ConfigError(
                f"analysis.lipschitz.width={self.width}: not divisible by analysis.lipschitz.heads={self.heads}"
            )
        if self.layer == "contractive_l2" and not self.tied:
            raise ConfigError("analysis.lipschitz.tied=false: layer=contractive_l2 has no constant to divide by")
        if self.mirror and not (self.layer in ("l2", "contractive_l2") and self.width == 1 and self.mask == "none"):
            raise ConfigError("analysis.lipschitz.mirror=true: for layer=l2 of width=1 with mask=none; set it to false")


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: weights (trained | initialised | fresh), part, layer, attention, tokens, p (2 or inf), quantity, kind,
    value; of an ascent also start (1: the best of all starts) and step, both 0 elsewhere.

    part: attention, block, network (layer 0: from the embedding to the state before the read-out) or the name of a
    weight. kind: what `value` is to the Lipschitz constant: exact; bound, never below it; lower_bound, never above it;
    estimate, neither. Quantities:

    theorem: Kim et al., Theorem 3.2 as proved, of cosine attention rankbench.lipschitz.cosine_bound (inf: not
    Lipschitz, or none known); of blocks and networks the product of the parts' constants (Lemma 2.1). theorem_printed:
    p = 2 as printed, an estimate. one_dimension: rankbench's own for one head of width 1. ball, ball_castin:
    dot-product attention with tokens within `radius`, alone. jacobian: the largest ||J||_p at the test sequences.
    local: the largest certificate there, a bound on jacobian (not on other inputs). ascent, ascent_mirrored: the
    largest ||J||_p found. spectral_norm: of a weight, by SVD.
    """
    if options.layer is None:
        rows = list(_rows_of_subject(subject, options))
    else:
        generator = generator_for(subject.seed, "lipschitz")
        layer = fresh(options.layer, options.width, options.heads, options.gain, generator, options.tied)
        rows = []
        for num_tokens in options.tokens:
            seen_NM = visible_keys(options.mask, None, num_tokens)
            here = contracted(layer._replace(seen_NM=seen_NM), options.layer, num_tokens)
            place = {"weights": "fresh", "part": "attention", "layer": 0}
            place |= {"attention": options.layer, "tokens": num_tokens}
            bounds = {norm: theorem(here, num_tokens, norm) for norm in options.norms}
            rows += [place | row for row in _constants(here, num_tokens, options, bounds)]
            rows += [place | row for row in _ascents(here, num_tokens, options, generator)]
    return pd.DataFrame(rows, columns=COLUMNS).fillna({"start": 0, "step": 0}).astype({"start": int, "step": int})


def fresh(
    kind: str, width: int, heads: int, gain: float | None, generator: torch.Generator, tied: bool = True
) -> Layer:
    """A layer of its own with weights uniform in +-gain/sqrt(width), or the identity."""
    limits = None if gain is None else dict.fromkeys("qkvo", gain * width**-0.5)
    return lipschitz.fresh_layer("dot" if kind == "dot" else "l2", width, heads, limits, generator, tied=tied)


def contracted(layer: Layer, kind: str, num_tokens: int) -> Layer:
    """For contractive_l2 the layer over its bound for p = inf, else as it is."""
    if kind != "contractive_l2":
        return layer
    return layer._replace(divisor=lipschitz.theorem_inf(layer._replace(divisor=1.0), num_tokens))


def _row(norm: str, quantity: str, kind: str, value: float) -> dict:
    return {"p": float(norm), "quantity": quantity, "kind": kind, "value": value}


def _constants(layer: Layer | None, num_tokens: int, options: Options, bounds: dict[str, float]) -> Iterator[dict]:
    """What is known of a layer from its weights alone; bounds: by norm."""
    for norm in options.norms:
        yield _row(norm, "theorem", "bound", bounds[norm])
        if layer is None or not np.isfinite(bounds[norm]):
            continue
        if norm == "2":
            printed = lipschitz.theorem_2(layer, num_tokens, printed=True)
            yield _row(norm, "theorem_printed", "estimate", printed)
        if layer.w_q_HDK.shape[0] == layer.w_q_HDK.shape[-1] == 1:
            if norm == "inf":
                most = num_tokens if layer.seen_NM is None else int(layer.seen_NM.sum(-1).max())
                value = lipschitz.one_dimension_inf(layer, num_tokens)
                yield _row(norm, "one_dimension", "exact" if most % 2 else "bound", value)
            elif layer.seen_NM is None:
                yield _row(norm, "one_dimension", "bound", lipschitz.one_dimension_2(layer, num_tokens))
    if layer is not None and layer.kind == "dot" and layer.seen_NM is None and "2" in options.norms:
        plain = layer._replace(b_q_HK=None, b_k_HK=None)
        if all(b is None or not b.any() for b in (layer.b_q_HK, layer.b_k_HK)):
            for quantity, castin in (("ball", False), ("ball_castin", True)):
                value = lipschitz.dot_ball_2(plain, num_tokens, options.radius, castin=castin)
                yield _row("2", quantity, "bound", value)


def _ascents(layer: Layer, num_tokens: int, options: Options, generator: torch.Generator) -> Iterator[dict]:
    if not options.starts:
        return
    width = layer.w_q_HDK.shape[1]
    starts_BND = lipschitz.random_starts(options.starts, num_tokens, width, options.start_range, generator)
    starts_BND = starts_BND.to(layer.w_q_HDK.device)
    for norm in options.norms:
        for quantity, mirror in (("ascent", False), ("ascent_mirrored", True))[
            : 1 + (options.mirror and norm == "inf")
        ]:
            every = options.record_every or options.steps
            found = lipschitz.ascend(layer, starts_BND, norm, options.steps, options.lr, every, mirror=mirror)
            best_B = found.values_TB[-1].argsort(descending=True)[: options.keep]
            for step, values_B in zip(found.steps_T, found.values_TB[:, best_B].tolist(), strict=True):
                if step == 0 and options.record_every is None:
                    continue
                for start, value in enumerate(values_B, 1):
                    yield _row(norm, quantity, "lower_bound", value) | {"start": start, "step": step}


# ---------------------------------------------------------------------------------------------------------------------
# The subject's model


def _rows_of_subject(subject: Subject, options: Options) -> Iterator[dict]:
    generator = generator_for(subject.seed, "lipschitz")
    for weights, given in subject.models.items():
        model = given.without().double().requires_grad_(False)  # a copy
        inputs = subject.test.inputs[: options.sequences]
        lengths_B = model.lengths(inputs)
        most = inputs.shape[1] if lengths_B is None else int(lengths_B.max())
        kind = model.cfg.attention
        rows = [*_rows_of_parts(model, most, options), *_rows_at_data(model, inputs, options)]
        for number, block in enumerate(model.blocks, 1):
            layer = layer_of(block.attention, most)
            if layer is not None:
                rows += [_at("attention", number) | row for row in _ascents(layer, most, options, generator)]
        yield from ({"weights": weights, "attention": kind, "tokens": most} | row for row in rows)


def _at(part: str, layer: int) -> dict:
    return {"part": part, "layer": layer}


def _rows_of_parts(model: Transformer, num_tokens: int, options: Options) -> Iterator[dict]:
    """Constants from weights alone: weights, attention, blocks, the network."""
    whole = dict.fromkeys(options.norms, 1.0)
    for number, block in enumerate(model.blocks, 1):
        for name, weight in matrices(block).items():
            row = _row("2", "spectral_norm", "exact", lipschitz.linear_norm(weight, "2"))
            yield _at(name, number) | row
        layer = layer_of(block.attention, num_tokens)
        bounds = {norm: attention_bound(block.attention, num_tokens, norm) for norm in options.norms}
        yield from (_at("attention", number) | row for row in _constants(layer, num_tokens, options, bounds))
        for norm in options.norms:
            value = block_bound(block, norm, bounds[norm])
            whole[norm] *= value
            yield _at("block", number) | _row(norm, "theorem", "bound", value)
    for norm, value in whole.items():
        if model.last_norm is not None:
            value *= norm_bound(model.last_norm, norm)
        yield _at("network", 0) | _row(norm, "theorem", "bound", value)


def _rows_at_data(model: Transformer, inputs: Tensor, options: Options) -> Iterator[dict]:
    """Jacobian norms and local certificates at each sequence; the largest of each."""
    largest: dict[tuple, float] = {}

    def keep(part: str, layer: int, norm: str, quantity: str, kind: str, value: float) -> None:
        key = (part, layer, norm, quantity, kind)
        largest[key] = max(largest.get(key, 0.0), value)

    lengths_B = model.lengths(inputs)
    for number, sequence in enumerate(inputs):
        sequence = sequence if lengths_B is None else sequence[: lengths_B[number]]
        trace = Trace(".attention.input", ".norm_scale", "embedding", "last_norm_scale")
        model(sequence[None], trace=trace)
        local_network: float | None = 1.0
        for index, block in enumerate(model.blocks):
            x_1ND = trace[f"layers.{index}.attention.input"]
            read_1ND = block.attention_norm(x_1ND, "", None) if block.place == "pre" else x_1ND
            of_attention, of_block = _attention_map(block), _block_map(block)
            for norm in options.norms:
                for part, function, at in (("attention", of_attention, read_1ND), ("block", of_block, x_1ND)):
                    value = lipschitz.jacobian_norm(function, at[0], norm)
                    keep(part, index + 1, norm, "jacobian", "lower_bound", value)
            layer = layer_of(block.attention, len(sequence))
            local_network = None if layer is None else local_network
            if "2" in options.norms and layer is not None:
                local = lipschitz.local_2(layer, read_1ND).item()
                keep("attention", index + 1, "2", "local", "bound", local)
                scales = {name: _largest_scale(trace, f"layers.{index}.{name}") for name in ("attention", "mlp")}
                local = block_bound(block, "2", local, scales)
                keep("block", index + 1, "2", "local", "bound", local)
                local_network = None if local_network is None else local_network * local
        for norm in options.norms:
            value = lipschitz.jacobian_norm(_network_map(model), trace["embedding"][0], norm)
            keep("network", 0, norm, "jacobian", "lower_bound", value)
        if "2" in options.norms and local_network is not None:
            if model.last_norm is not None:
                local_network *= norm_bound(model.last_norm, "2", trace["last_norm_scale"].max().item())
            keep("network", 0, "2", "local", "bound", local_network)
    for (part, layer, *what), value in largest.items():
        yield _at(part, layer) | _row(*what, value)


def _largest_scale(trace: Trace, name: str) -> float:
    """Of the norm at this place; 1 where there is none, which then has no say."""
    scale_BN1 = trace.get(f"{name}.norm_scale")
    return 1.0 if scale_BN1 is None else scale_BN1.max().item()


# Maps of one sequence (N, D). A trace that keeps nothing takes them off the fused kernels, which vmap does not know.


def _attention_map(block: Block) -> Callable[[Tensor], Tensor]:
    return lambda x_ND: block.attention(x_ND[None], "", None, Trace("nothing"))[0]


def _block_map(block: Block) -> Callable[[Tensor], Tensor]:
    return lambda x_ND: block(x_ND[None], "", None, Trace("nothing"))[0]


def _network_map(model: Transformer) -> Callable[[Tensor], Tensor]:
    def network(x_ND: Tensor) -> Tensor:
        x_1ND = x_ND[None]
        for block in model.blocks:
            x_1ND = block(x_1ND, "", None, Trace("nothing"))
        return (x_1ND if model.last_norm is None else model.last_norm(x_1ND, "", None))[0]

    return network


def digest(table: pd.DataFrame) -> str:
    """The quantities by where they are of, mean over seeds, for a terminal; of an ascent the best start at the end."""
    told = table[(table.start <= 1) & (table.quantity != "spectral_norm")]
    told = told[told.step == told.groupby(["quantity", "tokens"]).step.transform("max")]
    axes = ["weights", "part", "layer", "p"] if table.tokens.nunique() == 1 else ["attention", "p", "tokens"]
    named = told.assign(what=told.quantity + " (" + told.kind + ")")
    mean = named.pivot_table("value", axes, "what", "mean", sort=False)
    shown = mean.map(lambda value: "" if pd.isna(value) else f"{value:.4g}")
    return f"Lipschitz constants (mean of {table.seed.nunique()} seeds)\n{shown.to_string()}"


COLUMNS = ["weights", "part", "layer", "attention", "tokens", "p", "quantity", "kind", "start", "step", "value"]
ANALYSIS = Analysis(Options, table, draw_lipschitz, digest, most_panels=12)

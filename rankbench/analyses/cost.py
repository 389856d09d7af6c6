"""What an analysis costs, estimated before it starts: its floating-point operations at the pace of forward passes.

Matrix products and singular values are counted; where there are many of them, they take nearly all of the time. Their
pace is that of the subject's own network, timed for a moment on the device that is going to compute. For cases that
take seconds to minutes the estimate is right within a factor of three (tests/test_cost.py).
"""

import dataclasses
import time
from typing import Any, NamedTuple

import torch

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.keys import as_typed
from rankbench.measures.rounding import num_passes, side_by_side
from rankbench.progress import duration

LONG = 600.0  # seconds; an analysis that takes longer is announced
SLOW = 1e8  # operations per second that every machine reaches: what is quick at this pace is not timed
MOMENT = 0.05  # seconds of forward passes, enough to show their pace
ROUNDED = 5  # plain passes in the time of one with random rounding
SINGULAR_VALUES = 60  # times a^2 b: operations for those of an (a, b) matrix, a <= b, at the pace of products


class Operations(NamedTuple):
    """Floating-point operations of a network's parts on one sequence; attention and mlp are means over the layers."""

    attention: float
    mlp: float
    read_out: float
    layers: int
    heads: int
    num_tokens: int
    width: int

    @classmethod
    def of(cls, subject: Subject) -> "Operations":
        """Operations of the subject's network: products with weights, and with queries, keys and values."""
        network = subject.model
        num_tokens = network.num_tokens(subject.test.inputs)
        of_kind = {"attention": 0.0, "mlp": 0.0}
        for sublayer in network.sublayers:
            numbers = sum(weight.numel() for weight in sublayer.part.parameters())
            of_kind[sublayer.kind] += 2.0 * num_tokens * numbers
        for part in network.attentions:
            of_kind["attention"] += 4.0 * num_tokens**2 * part.heads * part.head_width
        layers, heads, _ = network.path_choices
        read_out = 2.0 * num_tokens * network.read_out.weight.numel()
        per_layer = of_kind["attention"] / layers, of_kind["mlp"] / layers
        return cls(*per_layer, read_out, layers, heads, num_tokens, network.width)

    @property
    def forward(self) -> float:
        """Operations of a forward pass."""
        return self.layers * (self.attention + self.mlp) + self.read_out

    @property
    def rounded_passes(self) -> int:
        """Plain passes in the time of the passes with random rounding that give a floor."""
        return ROUNDED * num_passes(self.num_tokens, self.width)

    @property
    def sums_by_length(self) -> float:
        """Operations for the sums of all frozen paths by length: a layer takes a term for the bias and each length."""
        terms = sum(layer + 2 for layer in range(self.layers))
        return self.forward + terms * (self.attention / 2 + self.mlp)

    def paths(self, through_heads: int, steps: int, *, recomputed: bool, mlp: bool) -> float:
        """Operations for this many steps of paths, of which `through_heads` pass a head. A head costs its share of the
        attention, without the scores if paths are frozen. Recomputed paths pass MLPs only in layers with a head."""
        head = self.attention / self.heads / (1 if recomputed else 2)
        return through_heads * head + (through_heads if recomputed else steps) * self.mlp * mlp

    @property
    def metrics_of_states(self) -> float:
        """Operations for the metrics of every state, which need its singular values."""
        narrow, wide = sorted((self.num_tokens, self.width))
        return SINGULAR_VALUES * (2 * self.layers + 1) * narrow**2 * wide

    @property
    def metrics_of_heads(self) -> float:
        """The same for the attention weights of every head."""
        return SINGULAR_VALUES * self.layers * self.heads * self.num_tokens**3


def announcement(name: str, analysis: Analysis, options: Any, subjects: list[Subject]) -> str | None:
    """A line about an analysis that is going to take longer than LONG: what is large, how long it takes, and options
    with which it takes minutes. None for a quicker analysis."""
    if (cost := analysis.cost) is None:
        return None
    subject, what = subjects[0], cost(subjects[0], options).what

    def operations(chosen: Any) -> float:
        return len(subjects) * cost(subject, chosen).operations

    if operations(options) < LONG * SLOW or operations(options) < LONG * (pace := pace_of(subject)):
        return None
    parts = Operations.of(subject)
    size = f"{parts.layers} layers x {parts.heads} heads x width {parts.width}, {parts.num_tokens} tokens"
    seeds = f" x {len(subjects)} seeds" if len(subjects) > 1 else ""
    line = f"{name}: {what}{seeds} ({size}) take about {duration(operations(options) / pace)}"
    changes: dict[str, Any] = {}
    chosen = options
    for change in analysis.cheaper:
        cheaper = dataclasses.replace(chosen, **change)
        if operations(cheaper) < operations(chosen):
            chosen, changes = cheaper, changes | change
        if operations(cheaper) < LONG * pace:
            break
    if not changes:
        return f"{line}; it continues"
    keys = " ".join(f"analysis.{name}.{key}={as_typed(value)}" for key, value in changes.items())
    return f"{line}; it continues. With {keys} about {duration(operations(chosen) / pace)}"


@torch.no_grad()
def pace_of(subject: Subject) -> float:
    """Operations per second of the subject's forward passes, on as many copies of a sequence as take a moment."""
    sequence, number = subject.test.inputs[:1], 1
    while True:
        inputs = side_by_side(sequence, number)
        began = time.perf_counter()
        subject.model(inputs)
        if inputs.is_cuda:
            torch.cuda.synchronize(inputs.device)
        seconds = time.perf_counter() - began
        if seconds >= MOMENT:
            return number * Operations.of(subject).forward / seconds
        number *= 2

"""The states of a torch module from outside rankbench, layer by layer, as its own submodules return them.

Calls of attention have a depth: 1 for the first, one more after each. The layer of a depth is the outermost submodule
that holds all calls of this depth and no others, and returns a tensor of the same shape as its input. Each layer's
output must be the next layer's input: otherwise the submodules are branches, and their results are not states of the
network. A submodule that runs several times (shared layers) counts each time.

Shapes: B sequence, N token, D width.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankbench.keys import ConfigError
from rankbench.measures.rounding import ALL, RandomRounding, floor_of, num_passes
from rankbench.measures.token_views import View
from rankbench.model.modules import Example
from rankbench.model.tape import COVERED, AttentionCall, tap
from rankbench.model.tape.recording import tensors_in


class Run(NamedTuple):
    """One run of a submodule in a forward pass; `time` numbers its runs from 0."""

    name: str
    time: int


@contextmanager
def _following(module: nn.Module, seen: Callable[[Run, Tensor, Tensor], None]) -> Iterator[list[Run]]:
    """Follow all submodules in a forward pass; yield the list of runs in progress. seen(run, input, output): called at
    the end of each run whose input and output hold a tensor of floats."""
    running: list[Run] = []
    counts: Counter[str] = Counter()

    def enter(name: str, *_: Any) -> None:
        running.append(Run(name, counts[name]))
        counts[name] += 1

    def leave(_: nn.Module, *given_and_result: Any) -> None:
        *given, result = given_and_result
        run, ends = running.pop(), [[x for x in tensors_in(part) if x.is_floating_point()] for part in (given, result)]
        if all(ends):
            seen(run, ends[0][0], ends[1][0])

    with ExitStack() as hooks:
        for name, submodule in module.named_modules():
            if name:
                hooks.callback(submodule.register_forward_pre_hook(partial(enter, name)).remove)
                hooks.callback(submodule.register_forward_hook(leave, with_kwargs=True).remove)
        yield running


@torch.no_grad()
def layers_of(module: nn.Module, example: Example) -> list[Run]:
    """The run of a submodule that is the layer of each depth; ConfigError if no submodule is one."""
    depths: dict[Run, set[int]] = {}
    holders: dict[int, list[list[Run]]] = {}  # by depth, for each attention call the runs around it
    ends: dict[Run, tuple[Tensor, Tensor]] = {}  # input and output of a submodule that keeps the shape

    def seen(run: Run, x: Tensor, y: Tensor) -> None:
        if x.shape == y.shape and x.dim() == 3:
            ends[run] = x, y

    def watch(call: AttentionCall) -> None:
        holders.setdefault(call.depth, []).append(list(running))
        for run in running:
            depths.setdefault(run, set()).add(call.depth)

    with _following(module, seen) as running:
        tap(module, watch, *example.args, **example.kwargs)
    if not holders:
        raise ConfigError(f"{type(module).__name__}: made no attention call that the tape knows; covered: {COVERED}")
    layers = []
    for depth, around in sorted(holders.items()):
        shared = [run for run in around[0] if all(run in others for others in around)]
        fitting = [run for run in shared if depths[run] == {depth} and run in ends]
        if not fitting:
            raise ConfigError(
                f"{type(module).__name__}: the attention calls of depth {depth} have no submodule of their own that "
                "returns states of the same shape (B, N, D) as its input; put each layer into a submodule"
            )
        layers.append(fitting[0])
    for earlier, later in pairwise(layers):
        if not torch.equal(ends[earlier][1], ends[later][0]):
            raise ConfigError(
                f"{type(module).__name__}: the input of {later.name} is not the output of {earlier.name}, so these are "
                "branches, not layers; put each layer, with its skips, into a submodule"
            )
    return layers


@torch.no_grad()
def states_of(module: nn.Module, layers: list[Run], example: Example) -> list[Tensor]:
    """The first layer's input and each layer's output, L + 1 states (B, N, D)."""
    states: dict[Run | None, Tensor] = {}

    def seen(run: Run, x: Tensor, y: Tensor) -> None:
        if run == layers[0]:
            states[None] = x
        if run in layers:
            states[run] = y

    with _following(module, seen):
        module(*example.args, **example.kwargs)
    return [states[None], *(states[run] for run in layers)]


@torch.no_grad()
def states_with_floors(
    module: nn.Module, layers: list[Run], example: Example, generator: torch.Generator, views: Sequence[View] = (ALL,)
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield each state with the floors of its residual, (B,) for each view, as in rankbench.measures.rounding.

    generator: on the CPU, of the perturbed passes.
    """
    states = states_of(module, layers, example)
    counted = [example.counted(states[0].shape[1], view.without) for view in views]
    perturbed_passes = []
    for _ in range(num_passes(*states[0].shape[1:])):
        with RandomRounding(generator):
            perturbed_passes.append(states_of(module, layers, example))
    for state_BND, *perturbed in zip(states, *perturbed_passes, strict=True):
        floors = []
        for view, counted_BN in zip(views, counted, strict=True):
            seen, kept_B = view.of(state_BND, counted_BN)
            floors.append(floor_of(seen(state_BND), map(seen, perturbed), kept_B))
        yield state_BND, floors

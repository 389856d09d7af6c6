"""The states of a torch module that is not ours, layer by layer, as its own submodules return them.

Calls of attention have a depth: 1 for the first, one more behind each. The layer of a depth is the outermost submodule
that holds all calls of this depth and no other, and returns a tensor of the shape that it is given. What one layer
returns must be what the next is given: else the submodules are branches, and their results no states of the network. A
submodule that runs several times (shared layers) counts each time.

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
    """One of the times, from 0, that a submodule runs in a forward pass."""

    name: str
    time: int


@contextmanager
def _following(module: nn.Module, seen: Callable[[Run, Tensor, Tensor], None]) -> Iterator[list[Run]]:
    """Follow all submodules in a forward pass; yields the runs that are going on. seen(run, input, output): called at
    the end of each run that is given and returns a tensor of floats."""
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
    """The run of a submodule that is the layer of each depth; ConfigError where no submodule is one."""
    depths: dict[Run, set[int]] = {}
    holders: dict[int, list[list[Run]]] = {}  # by depth, for each attention call the runs around it
    ends: dict[Run, tuple[Tensor, Tensor]] = {}  # what a submodule that keeps the shape is given and returns

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
                "returns states of the shape (B, N, D) that it is given; put each layer into a submodule"
            )
        layers.append(fitting[0])
    for earlier, later in pairwise(layers):
        if not torch.equal(ends[earlier][1], ends[later][0]):
            raise ConfigError(
                f"{type(module).__name__}: what {later.name} is given is not what {earlier.name} returns, so these are "
                "no layers but branches; put each layer, with its skips, into a submodule"
            )
    return layers


@torch.no_grad()
def states_of(module: nn.Module, layers: list[Run], example: Example) -> list[Tensor]:
    """What enters the first layer and what each layer returns, L + 1 states (B, N, D)."""
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
    """Each state, and for each view the floor of its residual there, (B,), as rankbench.measures.rounding has them.

    generator: on the CPU, of the perturbed passes.
    """
    states = states_of(module, layers, example)
    counted_BN = example.counted(states[0].shape[1])
    perturbed_passes = []
    for _ in range(num_passes(*states[0].shape[1:])):
        with RandomRounding(generator):
            perturbed_passes.append(states_of(module, layers, example))
    for state_BND, *perturbed in zip(states, *perturbed_passes, strict=True):
        floors = []
        for view in views:
            seen, kept_B = view.of(state_BND, counted_BN)
            floors.append(floor_of(seen(state_BND), map(seen, perturbed), kept_B))
        yield state_BND, floors

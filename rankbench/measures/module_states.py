"""The states of a torch module from outside rankbench, layer by layer, as its own submodules return them.

Calls of attention have a depth: 1 for the first, one more after each. A layer is the outermost submodule that holds all
calls of its depths and no others, and returns a tensor of the same shape as its input; of a decoder's layer these are
the depths of its self-attention and its cross-attention. Each layer's output must be the next layer's input: otherwise
the submodules are branches, and their results are not states of the network. Between them, and before and after them,
layers without attention count too if they stand in the same list. A submodule that runs several times (shared layers)
counts each time.

Shapes: B sequence, N token, D width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError, closest
from rankbench.measures.module_reading import ReadModule, axes_or_default
from rankbench.measures.rounding import ALL, RandomRounding, floor_of, num_passes
from rankbench.measures.token_views import View
from rankbench.model.modules import Example
from rankbench.model.network import WithLayerStates
from rankbench.tape import Sums, Tape
from rankbench.tape.following import first_state, following
from rankbench.tape.reading import Axes, ReadCall, State
from rankbench.tape.tags import Visit

MOST_DEPTHS = 3  # of attention calls in a row in one layer


def layers_of(read: ReadModule) -> list[Visit]:
    """The runs of the submodules that are the layers; ConfigError if there are none."""
    if read.asked.layers is not None:
        return _asked_for(read, read.asked.layers)
    states, name = read.reading.states, type(read.module).__name__
    calls = read.reading.leading_to(read.target)
    by_depth = [[call for call in calls if call.depth == depth] for depth in sorted({call.depth for call in calls})]
    layers = _chain(read, by_depth, None)
    if layers is None:
        alone: list[Visit] = []
        named = f"; name its layers: layers=[{', '.join(_lists(read.module)) or '<submodule>,...'}]"
        for group in by_depth:
            if (holder := _holder(states, group, calls)) is None:
                raise ConfigError(
                    f"{name}: the attention calls of depth {group[0].depth} have no submodule of their own that "
                    f"returns states of the same shape (B, N, D) as its input; put each layer into a submodule{named}"
                )
            alone.append(holder)
        earlier, later = next(pair for pair in pairwise(alone) if _bridge(read, *pair) is None)
        raise ConfigError(
            f"{name}: the input of {later.name} is not the output of {earlier.name}, so these are branches, not "
            f"layers; put each layer, with its skips, into a submodule{named}"
        )
    return [*_ends(read, layers[0], -1)[::-1], *layers, *_ends(read, layers[-1], 1)]


def _holder(states: Mapping[Visit, State], group: Sequence[ReadCall], calls: Sequence[ReadCall]) -> Visit | None:
    """The outermost submodule that keeps the shape and holds these calls and no others."""
    for run in group[0].runs:
        if (
            run in states
            and len(states[run].shape) > 2
            and {x.key for x in group} == {call.key for call in calls if run in call.runs}
        ):
            return run
    return None


def _chain(read: ReadModule, by_depth: Sequence[Sequence[ReadCall]], before: Visit | None) -> list[Visit] | None:
    """The layers of these depths, of which the first follows on `before`; None if they are no chain."""
    if not by_depth:
        return []
    calls = read.reading.leading_to(read.target)
    most = len(by_depth) if before is not None else max(1, len(by_depth) - 1)  # not the whole network as one layer
    for number in range(1, min(MOST_DEPTHS, most) + 1):
        layer = _holder(read.reading.states, [call for group in by_depth[:number] for call in group], calls)
        between = [] if before is None or layer is None else _bridge(read, before, layer)
        if layer is None or between is None:
            continue
        rest = _chain(read, by_depth[number:], layer)
        if rest is not None:
            return [*between, layer, *rest]
    return None


def _bridge(read: ReadModule, earlier: Visit, later: Visit) -> list[Visit] | None:
    """The layers without attention between two; None if the one does not lead to the other."""
    states, between, at = read.reading.states, [], earlier
    while states[at].left != states[later].entered:
        if (following_on := _beside(read, at, 1)) is None:
            return None
        between.append(at := following_on)
    return between


def _beside(read: ReadModule, run: Visit, direction: int) -> Visit | None:
    """The layer without attention behind (1) or in front of (-1) this one, in the same list."""
    states, calls = read.reading.states, read.reading.calls
    parent = run.name.rpartition(".")[0]
    for other, state in states.items():
        first, second = (states[run], state) if direction > 0 else (state, states[run])
        is_listed = other.name.rpartition(".")[0] == parent and _is_layer(read.module, run.name, other.name)
        if (
            other != run
            and is_listed
            and first.left == second.entered
            and not any(other in call.runs for call in calls)
        ):
            return other
    return None


def _is_layer(module: nn.Module, layer: str, other: str) -> bool:
    """Whether a submodule beside a layer is one, too: of a list, or of a sequence if it is of the same class."""
    parent = module.get_submodule(layer.rpartition(".")[0])
    same = type(module.get_submodule(layer)) is type(module.get_submodule(other))
    return isinstance(parent, nn.ModuleList) or (isinstance(parent, nn.Sequential) and same)


def _ends(read: ReadModule, run: Visit, direction: int) -> list[Visit]:
    """The layers without attention in front of the first, or behind the last."""
    ends: list[Visit] = []
    while (beside := _beside(read, ends[-1] if ends else run, direction)) is not None and beside not in ends:
        ends.append(beside)
    return ends


def _lists(module: nn.Module) -> list[str]:
    """Patterns for the lists of submodules that may be layers."""
    return [f"{name}.*" for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1]


def _asked_for(read: ReadModule, patterns: Sequence[str]) -> list[Visit]:
    runs = [run for run, state in read.reading.states.items() if len(state.shape) > 2]
    names = list(dict.fromkeys(run.name for run in runs))
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise ConfigError(
                f"layers={pattern}: no such submodule that returns a tensor of the shape of its input"
                f"{closest(pattern, names)}; there are {', '.join(names[:20]) or 'none'}"
            )
    chosen = [run for run in runs if any(fnmatch(run.name, pattern) for pattern in patterns)]
    # a pattern such as layers.* also fits what is inside the layers
    return [run for run in chosen if not any(run.name.startswith(f"{other.name}.") for other in chosen)]


def axes_of_layers(read: ReadModule, layers: Sequence[Visit]) -> list[Axes]:
    """The axes of each layer's states; where the touch did not tell, those of a layer beside it."""
    known = [own for run in layers if (own := read.reading.states[run].axes) is not None and own.tokens]
    axes = []
    for run in layers:
        state = read.reading.states[run]
        fallback = next((other for other in known if max((other.batch or 0), *other.tokens) < len(state.shape)), None)
        own = state.axes if state.axes is not None and state.axes.tokens else fallback
        axes.append(axes_or_default(own, len(state.shape), read.asked.token_axis))
    return axes


class LayerState(NamedTuple):
    """The state after a layer, as the layer returns it: in words, where a tape has it (Tape.sums_of_each), its axes."""

    name: str
    place: Visit | Callable[[object], Tensor]
    axes: Axes


def layer_states(read: ReadModule) -> list[LayerState]:
    """The state after each layer, in order; ConfigError if there are no layers."""
    if isinstance(read.module, WithLayerStates):
        returned = [replace(read, target=x) for x in read.reading.outputs if x.name != read.target.name]
        return [LayerState(f"state after layer {number}", x.choose, x.axes) for number, x in enumerate(returned, 1)]
    layers = layers_of(read)
    named = [f"result of {run.name}{f', run {run.time + 1}' if run.time else ''}" for run in layers]
    return [LayerState(*layer) for layer in zip(named, layers, axes_of_layers(read, layers), strict=True)]


@torch.no_grad()
def sums_after_layers(
    tape: Tape, layers: Sequence[LayerState], value_biases: str, refuse: bool
) -> Iterator[tuple[int, Sums]]:
    """Yield the index of each layer with the sums of all paths of each length to the state after it, (K, B, N, D), in
    one replay. Those of one layer are lost when the next are asked for."""
    for number, sums in tape.sums_of_each([layer.place for layer in layers], value_biases, refuse):
        arranged = layers[number].axes.arranged
        by_length_KBND = torch.stack([arranged(part).flatten(2) for part in sums.by_length_KBND])
        yield number, sums._replace(by_length_KBND=by_length_KBND, state_BND=arranged(sums.state_BND).flatten(2))


@torch.no_grad()
def states_of(read: ReadModule, layers: Sequence[Visit], example: Example) -> list[Tensor]:
    """Copies of the first layer's input and of each layer's output, L + 1 states (B, N, D)."""
    states: dict[Visit | None, Tensor] = {}

    def begun(run: Visit, _: nn.Module, given: object) -> None:
        if run == layers[0] and (state := first_state(given)) is not None:
            states[None] = state.clone()

    def ended(run: Visit, _: nn.Module, result: object) -> None:
        if run in layers and (state := first_state(result)) is not None:
            states[run] = state.clone()

    with following(read.module, begun, ended):
        example.run(read.module)
    axes = axes_of_layers(read, layers)
    arranged = [axes[0].arranged(states[None])]
    arranged += [of.arranged(states[run]) for of, run in zip(axes, layers, strict=True)]
    return [x.flatten(2) for x in arranged]  # several streams of a token are one state


@torch.no_grad()
def states_with_floors(
    read: ReadModule, layers: list[Visit], example: Example, generator: torch.Generator, views: Sequence[View] = (ALL,)
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield each state with the floors of its residual, (B,) for each view. generator: on the CPU."""
    states = states_of(read, layers, example)
    perturbed_passes = []
    for _ in range(num_passes(*states[0].shape[1:])):
        with RandomRounding(generator):
            perturbed_passes.append(states_of(read, layers, example))
    for state_BND, *perturbed in zip(states, *perturbed_passes, strict=True):
        floors = []
        for view in views:
            counted_BN = read.counted_after(layers, example, state_BND.shape[1], view.without)
            seen, kept_B = view.of(state_BND, counted_BN)
            floors.append(floor_of(seen(state_BND), map(seen, perturbed), kept_B))
        yield state_BND, floors

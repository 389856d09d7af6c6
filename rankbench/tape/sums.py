"""Exact sums of all attention paths by length, for an unmodified torch module.

Dong et al. 2021, Theorem 2.1, splits a network of attention alone into paths that take one head or the skip in each
layer. The split holds for any module once the attention weights P, the norms' scales and the gates of the activations
keep the values of one forward pass: the module is then affine, and its output is the sum over all paths through it.
With S_k the sum of all paths with k heads, the calls of the pass become

    attention        S_(k+1) <- P S_k,  S_0 <- 0
    linear map       S_k <- S_k W^T,  b joins S_0
    norm             S_k <- scale (S_k - mean) weight,  shift joins S_0
    activation       S_k <- gate S_k with gate = (act(z) - act(0)) / z,  act(0) joins S_0
    product          S_k <- S_k times the other factor, frozen
    sum              S_k <- S_k + T_k

For L attention calls in a row this replaces (H + 1)^L paths by at most L + 1 slots in each call, half as many on
average: 6 to 7 forward passes for 12 layers. `begin` separates the paths from everything else: by_length and bias are
then those of rankbench.measures.frozen_network.sums_by_length (with mlp="gate"). Without `begin`, a bias is a path that
begins in slot 0 where it is added, and moves on with every head that it passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import name_of_module, named_tensors
from rankbench.tape.counting import Paths, paths_of
from rankbench.tape.read import read
from rankbench.tape.read_out import read_out_of
from rankbench.tape.reading import Reading
from rankbench.tape.recording import Recorder
from rankbench.tape.replay import Frozen, Node, Replay, Slots, nodes_of
from rankbench.tape.rules import COVERED, RULES
from rankbench.tape.steps import Mixed, by_head
from rankbench.tape.tags import AttentionCall, Site, Tag

Upto = str | tuple[str, int] | None
# Rounding of n calls adds up like a random walk, to about sqrt(n) eps of what is summed.
ROUNDING = 8


class Sums(NamedTuple):
    """A module's output as the sum of its paths: by_length_KBND[k] sums all paths with k heads.

    bias_BND: everything that does not come from where the paths begin; None if biases are paths of their own, which
    begin in slot 0. state_BND: the output, sum_k by_length + bias. frozen: the frozen factors of the paths, by call.
    remainder: ||output - sum||_F / ||output||_F. B, N, D: the output's axes, whatever they are.
    """

    by_length_KBND: Tensor
    bias_BND: Tensor | None
    state_BND: Tensor
    frozen: list[Frozen]
    remainder: float


class ThroughHeads(NamedTuple):
    """For one attention call, by its key, the sum of all paths through each head, (H, *shape of the output)."""

    key: Site
    sums: Tensor


def record(
    module: Callable,
    /,
    *args: Any,
    begin: str | None = None,
    reading: Reading | None = None,
    keep: str | None = None,
    **kwargs: Any,
) -> "Tape":
    """Record module(*args, **kwargs), one ordinary forward pass of an unmodified module.

    begin=None: everything that has passed no head is slot 0, including the embedding and every bias. begin=<name of a
    submodule>, or "inputs" for the arguments: paths begin at its result, and everything else (biases, norm shifts,
    positions added later) is a term of its own that no head moves, as in rankbench.measures.frozen_network. With
    "inputs", paths begin at the arguments of floats and at the embeddings of those of whole numbers.

    reading: which products are attention (rankbench.tape.read); None reads the module on these arguments first. keep: a
    submodule whose result is kept, so that `sums_behind` needs no second pass for it.
    """
    return recorded(module, args, kwargs, begin, reading, keep)


def recorded(
    module: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    begin: str | None = None,
    reading: Reading | None = None,
    keep: str | None = None,
) -> "Tape":
    """`record` of a module whose own arguments may have any names."""
    reading = read(module, args, kwargs) if reading is None else reading
    recorder = Recorder(module, RULES, begin, verdicts=reading.verdicts, keep=keep)
    output = recorder.run(args, dict(kwargs))
    if not recorder.num_attention or reading.uncovered:
        raise ConfigError(f"{name_of_module(module)}: {nothing_read(reading)}")
    return Tape(module, args, dict(kwargs), recorder, output, reading)


def nothing_read(reading: Reading) -> str:
    """Why a module has no heads, as the end of a sentence."""
    if reading.uncovered:
        call = reading.uncovered[0]
        if call.function.endswith("multi_head_attention_forward"):
            return f"{call}: bias_k, bias_v, add_zero_attn and static keys are not covered; leave them out"
        return f"{call}: is not covered, and may be attention; write it with matmul or an einsum of two tensors"
    seen = f" ({reading.factors[0].call}: {reading.factors[0].why})" if reading.factors else ""
    return f"made no attention call that the tape knows{seen}; covered: {COVERED}"


def tap(
    module: Callable,
    watch: Callable[[AttentionCall], None],
    /,
    *args: Any,
    reading: Reading | None = None,
    **kwargs: Any,
) -> Any:
    """Run the module and return its output; watch(call) gets each attention call, with weights and q, k, v.

    Nothing is kept: the weights of one call at a time are in memory. reading: as in `record`.
    """
    return tapped(module, watch, args, kwargs, reading)


def tapped(
    module: Callable,
    watch: Callable[[AttentionCall], None],
    args: tuple,
    kwargs: Mapping[str, Any],
    reading: Reading | None = None,
) -> Any:
    """`tap` of a module whose own arguments may have any names."""
    reading = read(module, args, kwargs) if reading is None else reading
    return Recorder(module, RULES, watch=watch, verdicts=reading.verdicts).run(args, dict(kwargs))


class Tape:
    """A recorded pass. It keeps what it froze (queries, keys, gates, norm scales) and what the module returned, not the
    activations in between."""

    def __init__(
        self, module: Callable, args: tuple, kwargs: dict, recorder: Recorder, output: Any, reading: Reading
    ) -> None:
        self.module, self.args, self.kwargs, self.output, self.reading = module, args, kwargs, output, reading
        self.begin, self.epsilon = recorder.begin, recorder.epsilon
        self._results, self._tags = recorder.results, recorder.tags
        self._key_of = recorder.mixed
        self.num_begun = len(recorder.begun)  # inputs at which paths begin, if begin="inputs"

    def sums(
        self, upto: Upto = None, output: Callable | None = None, value_biases: str = "head", refuse: bool = True
    ) -> Sums:
        """All paths, summed by length in one replay.

        upto: the name of a submodule, whose result is taken instead of the output; (name, i) if it runs several times.
        output: function that picks the tensor from what the module returned; by default last_hidden_state, else the
        first tensor. value_biases: "head" counts W_V's bias with the head that it passes, "source" in slot 0 after it.

        ConfigError if a call on the way is not covered, or if the sums miss the output by more than rounding. With
        refuse=False such sums are returned too. Their remainder can also come from a call that magnifies rounding.
        """
        target, state = self._target(upto, output)
        sweeps = self._sweeps(value_biases)
        if not isinstance(target, Node) and self.begin is None:
            return Sums(target[None], None, state, [], 0.0)
        nodes = nodes_of(target)
        return self._sums(sweeps, [sweep.run(nodes) for sweep in sweeps], nodes, state, refuse)

    def _sums(
        self, sweeps: list[Replay], parts: list[Slots | None], nodes: list[Node], state: Tensor, refuse: bool
    ) -> Sums:
        if parts[0] is None:
            raise ConfigError(f"begin={self.begin}: no path leads from there to this tensor; use an earlier begin")
        by_length_KBND = parts[0].dense(0, parts[0].high)
        bias_BND = None if (others := parts[1:]) == [] or others[0] is None else others[0].rows[0]
        terms = [*by_length_KBND, *([] if bias_BND is None else [bias_BND])]
        missing = (state - sum(terms)).norm()
        remainder = (missing / state.norm()).item() if missing > 0 else missing.item()
        if refuse and not missing <= self._rounding(terms, state, len(nodes)):
            self._refuse(nodes, sweeps, remainder)
        frozen = [Frozen(node.call, node.frozen) for node in nodes if node.frozen is not None]
        return Sums(by_length_KBND, bias_BND, state, frozen, remainder)

    def sums_of_each(
        self, places: Sequence[Upto | Callable], value_biases: str = "head", refuse: bool = True
    ) -> Iterator[tuple[int, Sums]]:
        """Yield the index of each of these places with its sums, in the order of the module's calls, in one replay; for
        a tape without `begin`. places: each as `upto` or as `output` of `sums`, which has the other arguments. The
        replay goes on in the memory of the sums, so those of one place are lost when the next are asked for."""
        sweep, wanted, values = self._sweeps(value_biases)[0], dict[Node, list[int]](), dict[int, Tensor]()
        for number, place in enumerate(places):
            target, state = self._found(None, place) if callable(place) else self._found(place, None)
            if isinstance(target, Node):
                wanted.setdefault(target, []).append(number)
                values |= {} if state is None else {target.index: state}
            else:  # before the first head
                yield number, Sums(target[None], None, target, [], 0.0)
        if unknown := {target.index for target in wanted} - set(values):
            values |= self._values(unknown)
        behind = {target: nodes_of(target) for target in wanted}
        for node, _, slots in sweep.steps(sorted(set().union(*behind.values()), key=lambda node: node.index)):
            for number in wanted.get(node, ()):
                yield number, self._sums([sweep], [slots], behind[node], values[node.index], refuse)

    def sums_behind(
        self, states: str | None, output: Callable | None = None, value_biases: str = "head", refuse: bool = True
    ) -> tuple[Sums | None, Sums]:
        """The sums of the last states, and of the output, which is read out of them; in little more than one replay.

        states: the submodule whose result they are; None: what the last map of weights reads. The first is None where
        there are no such states.
        """
        whole, state = self._target(None, output)
        node, value = self._states(states, whole)
        if not isinstance(whole, Node) or node is None or node is whole:
            return None, self.sums(None, output, value_biases, refuse)
        nodes, sweep = nodes_of(node), self._sweeps(value_biases)[0]
        slots = sweep.run(nodes)
        value = self._values({node.index})[node.index] if value is None else value
        first = self._sums([sweep], [slots], nodes, value, refuse)
        behind = nodes_of(whole)
        if node not in behind or slots is None:
            return first, self.sums(None, output, value_biases, refuse)
        return first, self._sums([sweep], [sweep.run(behind, (node, slots))], behind, state, refuse)

    def constant(self, states: str | None, output: Callable | None = None) -> tuple[Tensor | None, Tensor | None]:
        """The parts of the last states and of the output that depend on no input: biases, shifts, positions, carried on
        by the frozen network. For a tape with begin="inputs"."""
        whole, _ = self._found(None, output)
        node, _ = self._states(states, whole)
        parts: dict[Node | Tensor | None, Tensor | None] = {}
        for target in (whole, node):
            if isinstance(target, Node) and target not in parts:
                for each, _, slots in Replay(shift=0, source=False).steps(nodes_of(target)):
                    if each is node or each is whole:
                        parts[each] = None if slots is None else slots.rows[0].clone()  # later steps may overwrite it
        return parts.get(node), parts.get(whole)

    def _states(self, name: str | None, whole: Node | Tensor) -> tuple[Node | None, Tensor | None]:
        """The node of the last states, and its value if it was kept; None where there are none."""
        if name is None:
            return read_out_of(whole), None
        if name not in self._results:
            return None, None
        tag, value = self._results[name][-1]
        return tag.node, value

    def paths(self, upto: Upto = None, output: Callable | None = None) -> Paths:
        """The number of paths to a tensor, counted on the graph of the calls.

        A path is the sequence of heads that it passes: routes that differ in a skip or an MLP are one path. Where
        nothing joins the heads of a call before the next, each leads to its own alone.
        """
        target, _ = self._found(upto, output)
        return paths_of(nodes_of(target), self._counted_as, self.reading)

    def through_heads(self, upto: Upto = None, output: Callable | None = None) -> Iterator[ThroughHeads]:
        """For each attention call on the way to the output, the paths through its heads: one replay of H rows per
        call. Calls that have one P are one."""
        target, _ = self._found(upto, output)
        nodes = nodes_of(target)
        whole = Replay(shift=0, constants=self.begin is None)
        keys = {node: self._counted_as(node) for node in nodes if isinstance(node.step, Mixed)}
        last = {key: node for node, key in keys.items()}
        waiting: dict[Site, Tensor] = {}
        for node, inputs, _ in whole.steps(nodes):
            if not isinstance(node.step, Mixed) or inputs[0] is None:
                continue
            key, lead = keys[node], self.reading.by_key[keys[node]].lead
            values, _ = node.step.values(whole, inputs[0])
            rows = node.step.mix(node.step.weights(), values.rows)
            rows = by_head(rows, lead.numbers(rows.shape[1:-2]), lead.heads)
            behind = Replay(shift=0, constants=False).run(nodes, (node, Slots(0, rows)))
            assert behind is not None  # every node leads to the last
            waiting[key] = behind.rows if key not in waiting else waiting[key] + behind.rows
            if node is last[key]:
                yield ThroughHeads(key, waiting.pop(key))

    def _counted_as(self, node: Node) -> Site:
        """The attention call whose heads a node passes: of several with one P the first."""
        call = self.reading.by_key[self._key_of[node]]
        return call.twin or call.key

    def _sweeps(self, value_biases: str) -> list[Replay]:
        """One sweep for everything; with `begin`, one for the paths and one for everything else."""
        if value_biases not in ("head", "source"):
            raise ConfigError(f"value_biases={value_biases}: must be head or source")
        if self.begin is None:
            return [Replay(value_biases=value_biases)]
        if value_biases != "head":
            raise ConfigError(f"value_biases={value_biases}: with begin={self.begin} no bias is a path; use head")
        return [Replay(constants=False), Replay(shift=0, source=False)]

    # --- which tensor ------------------------------------------------------------------------------------------------

    def _target(self, upto: Upto, output: Callable | None) -> tuple[Node | Tensor, Tensor]:
        """What to replay, and its recorded value."""
        target, state = self._found(upto, output)
        if state is None:
            state = self._values({target.index})[target.index] if isinstance(target, Node) else target
        return target, state

    def _found(self, upto: Upto, output: Callable | None) -> tuple[Node | Tensor, Tensor | None]:
        """What to replay, and its value if the module returned it."""
        if upto is None:
            state = _main_tensor(self.output) if output is None else output(self.output)
            if (tag := self._tags.get(state)) is None:
                raise ConfigError("output: made a new tensor; it must pick one of those that the module returned")
            return self._known(tag, state, "the output"), state
        name, time = upto if isinstance(upto, tuple) else (upto, -1)
        times = self._results.get(name, [])
        if not -len(times) <= time < len(times):
            names = ", ".join(filter(None, self._results))
            raise ConfigError(f"upto={upto}: no such result; submodules that ran: {names}")
        return self._known(*times[time], f"upto={upto}"), None

    def _known(self, tag: Tag, value: Tensor | None, name: str) -> Node | Tensor:
        if tag.opaque is not None:
            raise ConfigError(
                f"{tag.opaque}: not covered, so {name} has no sums by length. Covered: {COVERED}. Rewrite this call "
                "with those or, from Python, use the tape's upto=<a submodule before it>"
            )
        if tag.node is not None:
            return tag.node
        assert value is not None  # it is kept unless paths lead to it
        return value

    def _values(self, wanted: set[int] | None) -> dict[int, Tensor]:
        """The recorded values of the nodes with these indices (None: all), from a second pass."""
        recorder = Recorder(self.module, RULES, self.begin, wanted=wanted, verdicts=self.reading.verdicts)
        recorder.run(self.args, self.kwargs)
        return recorder.values

    # --- the certificate ---------------------------------------------------------------------------------------------

    def _rounding(self, terms: list[Tensor], state: Tensor, num_nodes: int) -> float:
        """The largest difference that rounding explains; it is larger if terms cancel."""
        largest = max(sum(term.norm() for term in terms), state.norm())
        return float(ROUNDING * self.epsilon * num_nodes**0.5 * largest)

    def _refuse(self, nodes: list[Node], sweeps: list[Replay], missing: float) -> None:
        """ConfigError that names the first call where the slots do not sum to the recorded value."""
        values = self._values(None)
        for number, steps in enumerate(zip(*(sweep.steps(nodes) for sweep in sweeps), strict=True), start=1):
            node, value = steps[0][0], values.get(steps[0][0].index)
            if value is None:
                continue
            terms = [row for _, _, slots in steps if slots is not None for row in slots.rows]
            wrong = (value - sum(terms)).norm()
            if not value.isfinite().all():
                raise ConfigError(
                    f"{node.call}: its value is not finite, so nothing sums to it; check inputs and masks"
                )
            if wrong > self._rounding(terms, value, number):
                raise ConfigError(
                    f"{node.call}: from here on the sums by length miss the recorded value, by "
                    f"{wrong / value.norm():.1e} of it ({missing:.1e} of the output); the tape is wrong about this "
                    "call (or the call magnifies rounding, as a norm of equal numbers does); write it in another way "
                    "or, from Python, use the tape's upto=<a submodule before it>"
                )
        raise ConfigError(
            f"remainder={missing:.1e}: the sums by length miss the output by more than rounding, and no single call is "
            "to blame; use module.double() with inputs in float64"
        )


def _main_tensor(output: Any) -> Tensor:
    """last_hidden_state if there is one, else the first floating-point tensor."""
    named = dict(named_tensors(output))
    if not named:
        raise ConfigError(f"the module returned {type(output).__name__} without a tensor of floats; give output=")
    return named.get("last_hidden_state", next(iter(named.values())))

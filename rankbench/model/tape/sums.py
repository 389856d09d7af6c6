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

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankbench.keys import ConfigError
from rankbench.model.tape.recording import AttentionCall, Recorder, Tag, tensors_in
from rankbench.model.tape.replay import Call, Frozen, Mixed, Node, Slots, Sweep, by_head, nodes_of
from rankbench.model.tape.rules import COVERED, RULES

Upto = str | int | tuple[str, int] | None
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
    """For one attention call, the sum of all paths through each head.

    sums: (H, *shape of the output), or by length (K, H, *shape of the output).
    """

    call: Call
    sums: Tensor


def record(module: Callable, *args: Any, begin: str | None = None, **kwargs: Any) -> "Tape":
    """Record module(*args, **kwargs), one ordinary forward pass of an unmodified module.

    begin=None: everything that has passed no head is slot 0, including the embedding and every bias. begin=<name of a
    submodule>, or "inputs" for the arguments: paths begin at its result, and everything else (biases, norm shifts,
    positions added later) is a term of its own that no head moves, as in rankbench.measures.frozen_network.
    """
    recorder = Recorder(module, RULES, begin)
    output = recorder.run(args, kwargs)
    if not recorder.attention:
        raise ConfigError(f"{_name(module)}: made no attention call that the tape knows; covered: {COVERED}")
    return Tape(module, args, kwargs, recorder, output)


def tap(module: Callable, watch: Callable[[AttentionCall], None], *args: Any, **kwargs: Any) -> Any:
    """Run the module and return its output; watch(call) gets each attention call, with weights and q, k, v.

    Nothing is kept: the weights of one call at a time are in memory.
    """
    return Recorder(module, RULES, watch=watch).run(args, kwargs)


class Tape:
    """A recorded pass. It keeps what it froze (queries, keys, gates, norm scales), not the activations in between.

    output: what the module returned. calls: its attention calls, numbered from 1 in `upto`.
    """

    def __init__(self, module: Callable, args: tuple, kwargs: dict, recorder: Recorder, output: Any) -> None:
        self.module, self.args, self.kwargs, self.output = module, args, kwargs, output
        self.begin, self.epsilon = recorder.begin, recorder.epsilon
        self.calls = [node.call for node in recorder.attention]
        self._attention, self._results, self._tags = recorder.attention, recorder.results, recorder.tags

    def sums(
        self, upto: Upto = None, output: Callable | None = None, value_biases: str = "head", refuse: bool = True
    ) -> Sums:
        """All paths, summed by length in one replay.

        upto: the name of a submodule, whose result is taken instead of the output; (name, i) if it runs several times;
        or the number of an attention call, for that call's result. output: function that picks the tensor from what the
        module returned; by default last_hidden_state, else the first tensor. value_biases: "head" counts W_V's bias
        with the head that it passes, "source" in slot 0 after the head.

        ConfigError if a call on the way is not covered, or if the sums miss the output by more than rounding. With
        refuse=False such sums are returned too. Their remainder can also come from a call that magnifies rounding.
        """
        target, state = self._target(upto, output)
        sweeps = self._sweeps(value_biases)
        if not isinstance(target, Node) and self.begin is None:
            return Sums(target[None], None, state, [], 0.0)
        nodes = nodes_of(target) if isinstance(target, Node) else []
        parts = [sweep.run(nodes) for sweep in sweeps]
        if parts[0] is None:
            raise ConfigError(f"begin={self.begin}: no path leads from there to this tensor; use an earlier begin")
        by_length_KBND = parts[0].dense(0, parts[0].high)
        bias_BND = parts[1].rows[0] if len(parts) > 1 else None
        terms = [*by_length_KBND, *([] if bias_BND is None else [bias_BND])]
        missing = (state - sum(terms)).norm()
        remainder = (missing / state.norm()).item() if missing > 0 else missing.item()
        if refuse and not missing <= self._rounding(terms, state, len(nodes)):
            self._refuse(nodes, sweeps, remainder)
        frozen = [Frozen(node.call, node.frozen) for node in nodes if node.frozen is not None]
        return Sums(by_length_KBND, bias_BND, state, frozen, remainder)

    def through_heads(self, by_length: bool = False, heads: int | None = None) -> Iterator[ThroughHeads]:
        """For each attention call on the way to the output, the paths through its heads: one replay of H rows per call.

        heads: number of heads side by side in the first axis of weights with three axes, (B H, N, M); None: that axis
        is a batch.
        """
        target, _ = self._target(None, None)
        nodes = nodes_of(target) if isinstance(target, Node) else []
        whole = self._sweeps("head")[0]
        whole.shift = int(by_length)
        for node, inputs, _ in whole.steps(nodes):
            if not isinstance(node.step, Mixed) or inputs[0] is None:
                continue
            values, _ = node.step.values(whole, inputs[0])
            rows = node.step.mix(node.step.weights(), values.rows)
            rows, num_heads = _one_head_each(rows, heads)
            begin = Slots((values.low + whole.shift) * num_heads * whole.shift, rows)
            continued = Sweep(shift=num_heads * whole.shift, constants=False)
            sums = continued.run(nodes, (node, begin))
            sums = sums.dense(0, sums.high).unflatten(0, (-1, num_heads))
            yield ThroughHeads(node.call, sums if by_length else sums[0])

    def _sweeps(self, value_biases: str) -> list[Sweep]:
        """One sweep for everything; with `begin`, one for the paths and one for everything else."""
        if value_biases not in ("head", "source"):
            raise ConfigError(f"value_biases={value_biases}: must be head or source")
        if self.begin is None:
            return [Sweep(value_biases=value_biases)]
        if value_biases != "head":
            raise ConfigError(f"value_biases={value_biases}: with begin={self.begin} no bias is a path; use head")
        return [Sweep(constants=False), Sweep(shift=0, source=False)]

    # --- which tensor ------------------------------------------------------------------------------------------------

    def _target(self, upto: Upto, output: Callable | None) -> tuple[Node | Tensor, Tensor]:
        """What to replay, and its recorded value."""
        if upto is None:
            state = _main_tensor(self.output) if output is None else output(self.output)
            if state not in self._tags:
                raise ConfigError("output: made a new tensor; it must pick one of those that the module returned")
            return self._known(self._tags[state], state, "the output"), state
        if isinstance(upto, int):
            if not 1 <= upto <= len(self._attention):
                raise ConfigError(f"upto={upto}: there are attention calls 1 to {len(self._attention)}")
            target = self._attention[upto - 1]
        else:
            name, time = upto if isinstance(upto, tuple) else (upto, -1)
            times = self._results.get(name, [])
            if not -len(times) <= time < len(times):
                names = ", ".join(filter(None, self._results))
                raise ConfigError(f"upto={upto}: no such result; submodules that ran: {names}")
            target = self._known(*times[time], f"upto={upto}")
        if not isinstance(target, Node):
            return target, target
        return target, self._values({target.index})[target.index]

    def _known(self, tag: Tag, value: Tensor | None, name: str) -> Node | Tensor:
        if tag.opaque is not None:
            raise ConfigError(
                f"{tag.opaque}: not covered, so {name} has no sums by length. Covered: {COVERED}. Rewrite this call "
                "with those or, from Python, use the tape's upto=<a submodule before it>"
            )
        return value if tag.node is None else tag.node

    def _values(self, wanted: set[int] | None) -> dict[int, Tensor]:
        """The recorded values of the nodes with these indices (None: all), from a second pass."""
        recorder = Recorder(self.module, RULES, self.begin, wanted=wanted)
        recorder.run(self.args, self.kwargs)
        return recorder.values

    # --- the certificate ---------------------------------------------------------------------------------------------

    def _rounding(self, terms: list[Tensor], state: Tensor, num_nodes: int) -> float:
        """The largest difference that rounding explains; it is larger if terms cancel."""
        largest = max(sum(term.norm() for term in terms), state.norm())
        return float(ROUNDING * self.epsilon * num_nodes**0.5 * largest)

    def _refuse(self, nodes: list[Node], sweeps: list[Sweep], missing: float) -> None:
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
    tensor = getattr(output, "last_hidden_state", None)
    if tensor is None:
        tensor = next((x for x in tensors_in(output) if x.is_floating_point()), None)
    if tensor is None:
        raise ConfigError(f"the module returned {type(output).__name__} without a tensor of floats; give output=")
    return tensor


def _one_head_each(rows: Tensor, heads: int | None) -> tuple[Tensor, int]:
    """Split each row (*batch, H, N, K) into one row per head, with the others zero; (T H, ...), and H."""
    if rows.ndim > 4:
        return by_head(rows, rows.shape[-3]), rows.shape[-3]
    if heads is None or rows.ndim < 4:
        return rows, 1
    return by_head(rows.unflatten(-3, (-1, heads)), heads).flatten(-4, -3), heads


def _name(module: Callable) -> str:
    return type(module).__name__ if isinstance(module, torch.nn.Module) else getattr(module, "__name__", str(module))

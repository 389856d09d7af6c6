"""A module from outside rankbench as it is measured: what was read of it, which tensor, and which tokens count.

Shapes: B sequence, H head, N query token, M key token, K width of the values, R sequence or window of one.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError, closest
from rankbench.measures.module_padding import run_at_the_end, tap_calls, with_lengths
from rankbench.model.modules import Example
from rankbench.tape import AttentionCall, Sums, Tape
from rankbench.tape.calls import named_tensors
from rankbench.tape.marks import is_mask
from rankbench.tape.read import read
from rankbench.tape.reading import Axes, Output, ReadCall, Reading
from rankbench.tape.sums import nothing_read, recorded
from rankbench.tape.tags import Site

FEW = 3  # sequences on which a module is read


@dataclass(frozen=True)
class Asked:
    """What a user says of a module; None: it is read.

    mask: the input that says which tokens are present, as present:<name> or absent:<name>. output: the tensor that is
    measured, by its name or that of a submodule. layers: the submodules whose results are the states. token_axis: of
    the measured tensor and of the states.
    """

    mask: str | None = None
    output: str | None = None
    layers: tuple[str, ...] | None = None
    token_axis: int | None = None


NOTHING_ASKED = Asked()


@dataclass(frozen=True, eq=False)
class ReadModule:
    """A module with its inputs, and what was read of them.

    example: the inputs, with the axis of sequences of each and the lengths that were found. target: the tensor that is
    measured. heads: the attention calls on the way to it, one for those that have one P. mask: what says which tokens
    are present, in words.
    """

    module: nn.Module
    example: Example
    reading: Reading
    asked: Asked
    target: Output
    heads: tuple[ReadCall, ...]
    mask: str

    @cached_property
    def first(self) -> dict[Site, tuple[int, int]]:
        """The depth of each of `heads`, and the number of its first head there, both from 1."""
        first, counts = {}, Counter[int]()
        for call in self.heads:
            first[call.key] = call.depth, counts[call.depth] + 1
            counts[call.depth] += call.lead.heads
        return first

    @cached_property
    def axes(self) -> Axes:
        """The axes of the target."""
        return axes_or_default(self.target.axes, len(self.target.shape), self.asked.token_axis)

    @property
    def upto(self) -> str | None:
        """The submodule whose result is the target; None for one of the tensors that the module returns."""
        return self.target.name if self.target.is_submodule else None

    def choose(self, output: object) -> Tensor:
        """The target, out of what the module returned."""
        return dict(named_tensors(output))[self.target.name]

    @property
    def shape_of_sequence(self) -> tuple[int, int]:
        """Tokens and width of the target; one token if it has none."""
        tokens = math.prod(self.target.shape[axis] for axis in self.axes.tokens)
        batch = self.target.shape[self.axes.batch or 0]
        return tokens, math.prod(self.target.shape) // (batch * tokens)

    @property
    def bytes_of_sequence(self) -> int:
        weight = next((x for x in self.module.parameters() if x.is_floating_point()), self.example.tensors[0])
        return math.prod(self.shape_of_sequence) * max(4, weight.element_size())

    @property
    def has_channels(self) -> bool:
        """Whether the target has an axis of channels, or of classes: one number per token or sequence has none."""
        return len(self.target.shape) > 1 + len(self.axes.tokens)

    def arranged(self, x: Tensor) -> Tensor:
        """The target with its sequences first and its tokens next, (B, N, C), or (B, C) without tokens; also of several
        such tensors, (K, ...). Without channels of its own it has C = 1."""
        is_one = x.dim() == len(self.target.shape)
        x = self.axes.arranged(x) if is_one else torch.stack([self.axes.arranged(part) for part in x])
        return x if self.has_channels else x[..., None]

    def counted(self, chunk: Example) -> Tensor | None:
        """Which of the arranged target's tokens count, (B, N) bool; None if all do."""
        tokens = [self.target.shape[axis] for axis in self.axes.tokens]
        return chunk.counted(tokens[0]) if len(tokens) == 1 else None

    def record(self, chunk: Example, begin: str | None = None) -> Tape:
        """The tape of these sequences."""
        return recorded(self.module, chunk.args, chunk.kwargs, begin, self.reading, self.body)

    @cached_property
    def body(self) -> str | None:
        """The submodule of a public checkpoint that returns its last states; None if there is none."""
        prefix = getattr(self.module, "base_model_prefix", "")
        return prefix if prefix and isinstance(getattr(self.module, prefix, None), nn.Module) else None

    def sums(self, tape: Tape, value_biases: str = "head", refuse: bool = True) -> Sums:
        """The target as the sum of its paths by length, arranged. ConfigError if it is not that sum, unless
        refuse=False (rankbench.tape)."""
        return self._arranged(tape.sums(self.upto, self.choose, value_biases, refuse))

    def kinds(self, tape: Tape, value_biases: str, refuse: bool) -> Iterator[tuple[str, Sums]]:
        """The sums of each kind of tensor that the module has, arranged: the last states, the output, and logits less
        their mean over the classes. These take the memory of the output's, which are lost when they are asked for."""
        if self.upto is not None:
            yield "output", self.sums(tape, value_biases, refuse)
            return
        states, output = tape.sums_behind(self.body, self.choose, value_biases, refuse)
        if states is not None and (arranged := self._arranged_like_output(states)) is not None:
            yield "states", arranged
        output = self._arranged(output)
        yield "output", output
        if self.has_logits:
            yield "logits", _centred(output)

    @property
    def has_logits(self) -> bool:
        """Whether the target is scored as classes, or called logits; not without channels, whatever it is called."""
        targets = self.example.targets
        is_of_classes = self.target.name == "logits" if targets is None else not targets.is_floating_point()
        return is_of_classes and self.has_channels

    def constants(self, chunk: Example) -> dict[str, Tensor]:
        """For each of `kinds`, the part that depends on no input; ConfigError if it cannot be followed."""
        tape = self.record(chunk, begin="inputs")
        if tape.num_begun < sum(x.is_touched for x in self.reading.inputs):
            raise ConfigError("the embedding of some input was not seen, because the module copies it first")
        states, output = tape.constant(self.body, self.choose)
        parts: dict[str, Tensor] = {}
        if states is not None and states.dim() == len(self.target.shape):
            parts["states"] = self.arranged(states)
        if output is not None:
            parts["output"] = self.arranged(output)
            parts["logits"] = parts["output"] - parts["output"].mean(-1, keepdim=True)
        return parts

    def name_of(self, kind: str) -> str:
        """The tensor of a kind, in words."""
        if kind == "states":
            return f"result of {self.body}" if self.body else "what the last map of weights reads"
        return f"{self.target.name}{', less its mean over classes' if kind == 'logits' else ''}"

    def _arranged(self, sums: Sums) -> Sums:
        by_length_KBND, state_BND = self.arranged(sums.by_length_KBND), self.arranged(sums.state_BND)
        bias_BND = None if sums.bias_BND is None else self.arranged(sums.bias_BND)
        return sums._replace(by_length_KBND=by_length_KBND, state_BND=state_BND, bias_BND=bias_BND)

    def _arranged_like_output(self, states: Sums) -> Sums | None:
        """The states, if they have the axes of the target."""
        axes, shape = self.axes, states.state_BND.shape
        alike = len(shape) == len(self.target.shape) and max([axes.batch or 0, *axes.tokens]) < len(shape) - 1
        if not alike or any(shape[axis] != self.target.shape[axis] for axis in axes.tokens):
            return None
        return self._arranged(states)

    def tap(self, chunk: Example, watch: Callable[[AttentionCall], None]) -> None:
        """Run the module; watch(call) gets each of `heads` in turn, with weights and logits (R, H, N, M) and values
        (R, H, M, K). Calls that have one P are one, with their values side by side."""
        tap_calls(self.module, self.reading, self.heads, chunk, watch)

    def tokens_of(self, call: AttentionCall, chunk: Example) -> tuple[Tensor | None, Tensor | None]:
        """Which queries of a call count, (B, N) bool, and how many of its keys are present, (B,); None: all.

        A call within windows has other rows than sequences: all of its tokens count.
        """
        of, (rows, _, num_queries, num_keys) = self.reading.by_key[call.key], call.weights.shape
        if rows != chunk.num_sequences:
            return None, None
        counted_BN = self._counted_by([of], chunk, num_queries)
        present_BM = chunk.present(num_keys, of.keys_of) if of.keys_of is not None or _hides(of) else None
        if not all(mask is None or mask.any() for mask in (counted_BN, present_BM)):
            raise ConfigError(
                f"{of.call}: none of its tokens counts, by {self.mask}; say which input marks padding, as "
                "mask=present:attention_mask, or give longer sequences"
            )
        return counted_BN, None if present_BM is None else present_BM.sum(1)

    def counted_after(
        self, layers: Sequence[object], chunk: Example, num_tokens: int, without: str | None = None
    ) -> Tensor | None:
        """Which tokens of the states after these layers count, (B, N) bool; None: all. without: one more kind of tokens
        that does not. They are those that the layers' own attention has as queries, else those of the main input."""
        calls = [call for call in self.reading.calls if any(run in call.runs for run in layers)]
        return self._counted_by(calls, chunk, num_tokens, without) if calls else chunk.counted(num_tokens, without)

    def _counted_by(
        self, calls: Sequence[ReadCall], chunk: Example, num_tokens: int, without: str | None = None
    ) -> Tensor | None:
        """Which of the queries of these calls count. Where it is not known which input's tokens they are, they are the
        main input's if self-attention hides some of them, or if that has no padding."""
        selves = [call for call in calls if call.is_self]
        numbers = [*(call.queries_of for call in calls), *(call.keys_of for call in selves)]
        number = next((number for number in numbers if number is not None), None)
        if number not in (None, chunk.main_input):
            return chunk.present(num_tokens, number)
        is_padded = chunk.lengths_B is not None or chunk.main_input in chunk.padding
        if number is None and (not selves or (is_padded and not any(map(_hides, selves)))):
            return None
        return chunk.counted(num_tokens, without)


def _hides(call: ReadCall) -> bool:
    """Whether a call hides some keys of some sequence on which it was read."""
    return call.hidden_RM is not None and bool(call.hidden_RM.any())


def _centred(output: Sums) -> Sums:
    """The same less the mean over the last axis, in the memory of the output's sums."""
    missing = state = output.state_BND - output.state_BND.mean(-1, keepdim=True)
    for sum_BND in output.by_length_KBND:
        sum_BND -= sum_BND.mean(-1, keepdim=True)
        missing = missing - sum_BND
    return output._replace(state_BND=state, remainder=(missing.norm() / state.norm()).item())


@torch.no_grad()
def read_module(module: nn.Module, example: Example, asked: Asked = NOTHING_ASKED) -> ReadModule:
    """Read a module on a few sequences of its inputs.

    ConfigError if it differs from call to call, or has no attention on the way to the tensor that is measured.
    """
    name = type(module).__name__
    example, few, reading = _read(module, example, asked)
    target = _target(reading, asked, name)
    live = reading.leading_to(target)
    if not live or reading.uncovered:
        raise ConfigError(f"{name}: {nothing_read(reading)}")
    keys = {call.key for call in live}
    heads = tuple(call for call in live if call.twin not in keys)
    example, mask = with_lengths(module, example, few, reading, heads, asked.mask)
    return ReadModule(module, example, reading, asked, target, heads, mask)


def _read(module: nn.Module, example: Example, asked: Asked) -> tuple[Example, Example, Reading]:
    """The example with the axis of sequences of each of its tensors, the few on which it was read, and the reading."""

    def read_on(few: Example) -> tuple[Example, Reading]:
        # two sequences are needed to tell their axis
        few = few.repeated() if few.num_sequences == 1 else few
        return few, read(module, few.args, dict(few.kwargs), asked.output)

    try:
        few, reading = read_on(_few(example))
    except ConfigError:
        raise
    except Exception:
        # the first axis does not count sequences, or the module takes no other number of them
        few, reading = example, read(module, example.args, dict(example.kwargs), asked.output)
    for x in reading.inputs:
        if x.is_touched and x.axes.tokens and x.axes.batch is None:
            raise ConfigError(
                f"{x.name}: tokens are axis {x.axes.tokens[0]} of its shape {x.shape}, and no axis counts sequences; "
                "give it one, as x[None]"
            )
    along = example.along([x.axes.batch if x.is_touched else None for x in reading.inputs])
    return (example, few, reading) if along == example else (along, *read_on(_few(along)))


def _few(example: Example) -> Example:
    """A few sequences, among them those that differ most in padding, as masks, lengths or their last tokens tell."""
    count = example.num_sequences
    if count <= FEW:
        return example
    chosen = [0, 1, count - 1]
    for number, x in enumerate(example.tensors):
        if example.axis(number) == 0 and (padding_B := _padding_in(x)) is not None:
            chosen = [int(padding_B.argmax()), int(padding_B.argmin()), *chosen]
    try:
        return example.at(sorted(list(dict.fromkeys(chosen))[:FEW]))
    except ConfigError:  # as many sequences as tokens
        return example


def _padding_in(x: Tensor) -> Tensor | None:
    """A number for each sequence that may grow or fall with its padding, (B,): of a list of lengths, of tokens or a
    mask. None for other tensors."""
    if not x.is_floating_point() and x.dim() < 3:
        return x.long() if x.dim() == 1 else run_at_the_end(x)
    if x.dim() > 1 and (x.dtype == torch.bool or (x.is_floating_point() and is_mask(x))):
        return (x == 0).flatten(1).sum(1)
    return None


def _target(reading: Reading, asked: Asked, name: str) -> Output:
    """The tensor that is measured: the one asked for, else last_hidden_state, else the first that is returned."""
    outputs = {output.name: output for output in reading.outputs}
    if asked.output is not None and asked.output not in outputs:
        raise ConfigError(
            f"output={asked.output}: {name} returns no such tensor{closest(asked.output, list(outputs))}; it returns "
            f"{', '.join(outputs)}, or give the name of a submodule that returns a tensor of floats"
        )
    if not outputs:
        raise ConfigError(
            f"{name}: its output has no floating-point numbers; return its last states, or give output=<a submodule>"
        )
    usual = "last_hidden_state" if "last_hidden_state" in outputs else next(iter(outputs))
    target = outputs[usual if asked.output is None else asked.output]
    if not target.shape:
        raise ConfigError(
            f"{name}: {target.name} is one number for all sequences; return the last states, or give output="
            "<a submodule>"
        )
    if not target.is_apart:
        raise ConfigError(
            f"{name}: what one sequence of the batch holds changes {target.name} of others, so that each is measured "
            "with the others in it; give a network whose sequences are independent, or another output"
        )
    return target


def axes_or_default(axes: Axes | None, ndim: int, token_axis: int | None) -> Axes:
    """These axes, or what they usually are where the touch did not tell."""
    if token_axis is not None:
        if not 0 <= token_axis < ndim:
            raise ConfigError(f"token_axis={token_axis}: the tensor has {ndim} axes, numbered from 0")
        return Axes(0 if token_axis else 1, (token_axis,))
    if axes is not None and axes.batch is not None:
        return axes
    return Axes(0, (1,) if ndim > 2 else ())

"""Reading a network by touch: which of its products are attention, and which axes hold tokens.

The module runs on one small batch, and again after one number of each input was changed a little. At a product of two
activations the change stands at few indices of the axes that count tokens and sequences, and everywhere along all
others. A product whose summed axis is such an axis of tokens is attention; any other is a frozen factor. The result of
attention is then put back to that of the first pass, with a new change at the token of the query, so that the change
stays at one token at any depth. Names, sizes and libraries play no part.

A third pass, without a change, must give the same numbers as the first: a module that differs from call to call cannot
be measured.

Shapes: N query token, M key token, K head width; `lead` the axes of P in front of N.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from rankbench.keys import ConfigError
from rankbench.model.tape.reading import Axes, Factor, Input, Lead, Output, ReadCall, Reading, State
from rankbench.model.tape.recording import (
    Key,
    Level,
    Product,
    Recorder,
    Role,
    Run,
    Seen,
    Tag,
    Verdict,
    Weighted,
    tensors_in,
)
from rankbench.model.tape.replay import Call
from rankbench.model.tape.rules import RULES

TOUCH = 0.03  # standard deviations by which a number is changed
LEAK = 0.01  # of the largest change along an axis: smaller ones come through scales of norms
REPEATED = 8  # roundings of a call's numbers by which two equal passes may differ


class _Kept(NamedTuple):
    tensors: tuple[Tensor, ...]
    result: Tensor


class Changed(Exception):
    """The products depend on the touched number."""


@contextmanager
def following(
    module: nn.Module,
    begun: Callable[[Run, nn.Module, Any], None],
    ended: Callable[[Run, nn.Module, Any], None],
) -> Iterator[list[Run]]:
    """Follow all submodules in a forward pass; yield the list of runs in progress. begun(run, submodule, arguments),
    ended(run, submodule, result): called unrecorded, so that the calls of the module keep their numbers."""
    running: list[Run] = []
    counts: Counter[str] = Counter()

    def enter(name: str, submodule: nn.Module, args: tuple, kwargs: dict) -> None:
        running.append(Run(name, counts[name]))
        counts[name] += 1
        with torch._C.DisableTorchFunction():
            begun(running[-1], submodule, (args, kwargs))

    def leave(submodule: nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        with torch._C.DisableTorchFunction():
            ended(running.pop(), submodule, result)

    with ExitStack() as hooks:
        for name, submodule in module.named_modules():
            if name:
                hook = submodule.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
                hooks.callback(hook.remove)
                hooks.callback(submodule.register_forward_hook(leave, with_kwargs=True).remove)
        yield running


def first_state(x: Any) -> Tensor | None:
    """The first tensor of floats."""
    return next((tensor for tensor in tensors_in(x) if tensor.is_floating_point()), None)


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


class _State(NamedTuple):
    """Input and result of a submodule that keeps the shape."""

    entered: Tensor
    left: Tensor
    passed: int


class _Plain(Recorder):
    """The first pass, which keeps what the touched one is compared with; or a third one."""

    def __init__(self, module: Callable, submodule: str | None = None) -> None:
        super().__init__(module, RULES, wanted={0})  # no node has the number 0: nothing is kept
        self.kept: dict[Key, _Kept] = {}
        self.sizes: list[tuple[Call, Tensor]] = []  # of each call's result: sum and sum of magnitudes
        self.states: dict[Run, _State] = {}
        self.is_listed = _listed(module) if isinstance(module, nn.Module) else set()
        self.stack: list[Run] = []
        self.submodule = submodule
        self.wanted_result: Tensor | None = None  # of the submodule

    def passed(self, args: tuple, kwargs: dict) -> Any:
        """The module's result, with all states kept."""
        if not isinstance(self.module, nn.Module):
            return self.run(args, kwargs)
        entered: dict[Run, Tensor] = {}

        def begun(run: Run, _: nn.Module, given: Any) -> None:
            if run.name in self.is_listed and (x := first_state(given)) is not None and x.dim() > 2:
                entered[run] = x.clone()  # the submodule may change it

        def ended(run: Run, _: nn.Module, result: Any) -> None:
            x, y = entered.pop(run, None), first_state(result)
            if run.name == self.submodule:
                self.wanted_result = y
            if x is not None and y is not None and x.shape == y.shape:
                self.states[run] = _State(x, y.clone(), self.tag(y).passed)

        with following(self.module, begun, ended) as self.stack:
            return self.run(args, kwargs)

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.num_calls
        result = super().__torch_function__(func, types, args, kwargs)
        x = result if isinstance(result, Tensor) else next(iter(tensors_in(result)), None)
        is_made = "empty" not in self.call.function  # else whatever was in memory
        if (
            self.num_calls > before
            and is_made
            and x is not None
            and x.is_floating_point()
            and x.layout == torch.strided
        ):
            numbers = x.detach().nan_to_num()
            sizes = torch.stack([numbers.sum(dtype=torch.float64), numbers.abs().sum(dtype=torch.float64)])
            self.sizes.append((self.call, torch.cat([sizes, sizes.new_tensor([torch.finfo(x.dtype).eps])])))
        return result

    def verdict(self, product: Product) -> Verdict:
        kept = _Kept(tuple(x.clone() for x in product.tensors), _first(product.seen.result).clone())
        self.kept[self.key_of(product.seen)] = kept
        return product.by_tags


def _listed(module: nn.Module) -> set[str]:
    """Names of the submodules that may be layers: those in lists, and those that hold others."""
    names = {name for name, submodule in module.named_modules() if name and any(True for _ in submodule.children())}
    for name, submodule in module.named_modules():
        if isinstance(submodule, (nn.ModuleList, nn.Sequential)):
            names |= {f"{name}.{child}".lstrip(".") for child, _ in submodule.named_children()}
    return names


class _Touched(_Plain):
    """The pass with changed numbers."""

    def __init__(
        self, module: Callable, submodule: str | None, base: _Plain, scale: float, exchanged: frozenset[int]
    ) -> None:
        super().__init__(module, submodule)
        self.base, self.scale = base, scale
        self.exchanged = exchanged  # inputs of tokens of which one is exchanged for another
        self.marks: list[_Mark | None] = []  # of each input
        self.copied: set[int] = set()  # inputs of tokens of which an embedding looked up a copy, or a part
        self.token_axes: dict[int, int] = {}  # of inputs, as attention calls show them
        self.places: dict[int, int] = {}  # of token inputs: number by place in memory
        self.is_embedded: set[int] = set()
        self.roles: dict[Key, Verdict] = {}
        self.scores: dict[Key, list[list[int]]] = {}  # of products of queries and keys: the touched ones of each
        self.calls: list[ReadCall] = []
        self.factors: list[Factor] = []
        self.given: list = []
        self.of_depth: dict[int, list[tuple[ReadCall, Tensor, tuple]]] = {}

    # --- touching ----------------------------------------------------------------------------------------------------

    def prepared(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.given = [args, kwargs]
        for x in tensors_in(self.given):
            number = sum(mark is not None for mark in self.marks)
            self.marks.append(None)
            if not x.numel() or not x.dim():
                continue
            if x.is_floating_point() and not _is_mask(x):
                at = _place(x.shape, number)
                self._touch(x, at)
                self.marks[-1] = _Mark(tuple(x.shape), at, True)
            elif len(self.marks) - 1 in self.exchanged:
                at = _place(x.shape, number)
                x[at] = _another(x, at)
                self.marks[-1] = _Mark(tuple(x.shape), at, False)
            elif not x.is_floating_point() and x.dtype != torch.bool:
                self.places[x.untyped_storage().data_ptr()] = len(self.marks) - 1
        return args, kwargs

    @property
    def unseen(self) -> frozenset[int]:
        """Inputs that may be tokens, of which no embedding was seen: they are copied before, say."""
        leaves = tensors_in(self.given)
        return frozenset(
            number
            for number, (x, mark) in enumerate(zip(leaves, self.marks, strict=True))
            if (mark is None or number in self.copied) and _is_tokens(x)
        )

    def _touch(self, x: Tensor, at: tuple) -> None:
        noise = torch.randn(x[at].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        deviation = x.double().std().nan_to_num(1.0).item() or 1.0
        x[at] += (self.scale * deviation * (noise.sign() + noise)).to(x)

    def embedded(self, seen: Seen) -> Tag:
        tag, result = super().embedded(seen), seen.result
        for x in tensors_in([seen.args, seen.kwargs]):
            if x.is_floating_point() or not self.reads_tokens(x):
                continue
            index = self.places.get(self.origin_of(x))
            if index is None or result.dim() < 2:
                continue
            given = tensors_in(self.given)[index]
            is_turned = x.dim() == 2 and (x.shape, x.stride()) == (given.shape[::-1], given.stride()[::-1])
            is_given = (x.shape, x.stride()) == (given.shape, given.stride())
            if x.data_ptr() != given.data_ptr() or result.shape[:-1] != x.shape or not (is_turned or is_given):
                self.copied.add(index)
            else:
                at = _place(given.shape, sum(mark is not None for mark in self.marks[:index]))
                self._touch(result, at[::-1] if is_turned else at)
                self.marks[index] = _Mark(tuple(given.shape), at, False)
        return tag

    # --- reading -----------------------------------------------------------------------------------------------------

    def verdict(self, product: Product) -> Verdict:
        key = self.key_of(product.seen)
        old = self.base.kept.get(key) if self.scale else _Kept(product.tensors, _first(product.seen.result))
        if old is None or [x.shape for x in old.tensors] != [x.shape for x in product.tensors]:
            raise Changed(product.seen.call)
        verdict = None
        if product.by_tags.role == Role.ATTENTION:
            verdict = self._attention(product, old, key, product.by_tags.side)
        elif not product.is_kernel:  # weights on the right that no softmax made
            for side, tensor in enumerate(product.tensors[:2]):
                if verdict is None and product.sides[side] is not None and self.tag(tensor).mixes:
                    verdict = self._attention(product, old, key, side, only_sure=True)
        if verdict is None:
            is_softmax = self._is_softmax(product)  # a router's weights, say
            verdict = Verdict(Role.FACTOR) if is_softmax else self._scores(product, old, key)
        self.roles[key] = verdict
        return verdict

    def _scores(self, product: Product, old: _Kept, key: Key) -> Verdict:
        """Scores, if queries and keys each have an axis of tokens; or if nothing is touched, and tags say so."""
        if product.is_kernel or product.to_scores is None:
            return Verdict(Role.FACTOR)
        new, before = product.to_scores(*product.tensors), product.to_scores(*old.tensors)
        touched = [_touched(x, y, -2) for x, y in zip(new, before, strict=True)]
        self.scores[key] = touched
        one_token = all(x.shape[-2] == 1 for x in new)
        # one of the two may be tokens that no input reaches
        are_tokens = all(not at or _is_partly(at, x.shape[-2]) for at, x in zip(touched, new, strict=True))
        return Verdict(Role.SCORES if one_token or are_tokens else Role.FACTOR)

    def _is_softmax(self, product: Product) -> bool:
        """Whether a softmax made what tags take for weights."""
        return product.by_tags.role == Role.ATTENTION and (
            product.is_kernel or self.tag(product.tensors[product.by_tags.side]).level == Level.SOFTMAX
        )

    def _attention(self, product: Product, old: _Kept, key: Key, side: int, only_sure: bool = False) -> Verdict | None:
        """Attention, if the summed axis holds tokens; None if not. only_sure: if the touch shows it."""
        weighted, seen = product.sides[side], product.seen
        p, p0 = weighted.weights(*product.tensors), weighted.weights(*old.tensors)
        v, v0 = weighted.values(*product.tensors), weighted.values(*old.tensors)
        tag = None if product.is_kernel else self.tag(product.tensors[side])
        sums = p0.sum(-1)
        is_mean = bool((p0 >= 0).all()) and bool((sums < 1.01).all())
        is_written_out = not product.is_kernel and tag.form == "exp" and bool(((sums - 1).abs() < 0.01).all())
        is_softmax = product.is_kernel or (is_mean and (tag.level == Level.SOFTMAX or is_written_out))
        has_softmax = is_softmax or tag.level == Level.SOFTMAX or tag.form == "softmax"
        has_scores = product.is_kernel or tag.mixes
        changed = _changes(v, v0)
        at = _touched(v, v0, -2)
        leads = _leads(changed, p)
        kind = "softmax" if is_softmax else "signed" if has_softmax else tag.form or "linear"
        if tag is not None and tag.form == "weights" and not is_mean:
            kind = "signed"
        is_sure, why = True, ""
        if v.shape[-2] == 1 or not at:
            is_sure = False
            if not (product.is_kernel or (has_softmax and has_scores)):
                why = "no input reaches it, and no softmax of scores made its weights"
        elif not _is_partly(at, v.shape[-2]):
            others = sum(
                0 < len(_touched(v, v0, axis)) < v.shape[axis] for axis in range(v.dim()) if axis != v.dim() - 2
            )
            is_sure = False
            if not (has_softmax and has_scores and others < 2):
                why = "sums over an axis that does not count tokens"
        elif not (has_softmax or has_scores or is_written_out):
            why = "neither a softmax nor scores made its weights"
        elif not has_softmax and _touched(p, p0, -1) == at:
            why = "both factors are tokens, as keys and values are in k^T v"
        elif is_softmax and not has_scores and not _moves(p, p0, leads):
            why = "weights of each token by itself, as in a dynamic convolution"
        if only_sure and (why or not is_sure):
            return None
        if why:
            self.factors.append(Factor(seen.call, tuple(p.shape), why))
            return None
        result = _first(seen.result)
        queries = self._queries(product, old, tag, p, side)
        # queries that no input reaches are tokens of their own, from here on touched where no input is
        row = 0 if queries == [] else p.shape[-2] - 1 if queries is None else queries[-1]
        self._put_back(result, old.result, weighted, p, v, leads, row)
        made_p = product.tensors[side]
        if not product.is_kernel and 0 not in made_p.stride():  # what is divided by its sums only afterwards
            made_p.copy_(old.tensors[side])
            self.set_tag(made_p, self.tag(made_p) if made_p not in self.tags else self.tags[made_p])
        lead = _lead(changed, v, p, leads, at)
        inputs = self._input_of(at, p.shape[-1]), self._input_of(queries or (), p.shape[-2])
        is_cross = _is_cross(at, queries, p, inputs)
        logits = self._logits(product, old, tag, lead)
        call = ReadCall(
            key, seen.call, kind, is_sure, lead, tuple(p.shape), is_cross, *inputs,
            hidden_keys(lead.split(p0), logits, is_cross), self.depth + 1, tuple(self.stack),
            sums.mean().item(), tuple(at), self.num_attention + 1,
        )  # fmt: skip
        self.calls.append(self._with_twin(call, p0, self._makers(product, side)))
        return Verdict(Role.ATTENTION, side)

    def _queries(self, product: Product, old: _Kept, tag: Tag | None, p: Tensor, side: int) -> list[int] | None:
        """The touched queries; of weights on the right, which are transposed, the second factor of the scores. None if
        the queries are not known."""
        if product.is_kernel:
            q, q0 = product.to_scores(*product.tensors)[0], product.to_scores(*old.tensors)[0]
            return _touched(q, q0, -2)
        touched = None if tag.scores is None else self.scores.get(tag.scores.key)
        return touched[side] if touched and tag.scores[side].shape[-2] == p.shape[-2] else None

    def _put_back(
        self, result: Tensor, old: Tensor, weighted: Weighted, p: Tensor, v: Tensor, leads: Tensor, row: int
    ) -> None:
        """Give the call the result of the first pass, with a change at this query of the touched sequence."""
        if not leads.any():
            return
        mark = torch.zeros(*p.shape[:-1], v.shape[-1], dtype=result.dtype, device=result.device)
        noise = torch.rand(v.shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
        mark[..., row, :] = leads[..., None].to(mark) * noise.to(mark)
        deviation = old.std().nan_to_num(1.0).item() or 1.0
        result.copy_(old + self.scale * deviation * weighted.back(mark).reshape(result.shape))

    def _logits(self, product: Product, old: _Kept, tag: Tag | None, lead: Lead) -> Tensor | None:
        if tag is None or tag.logits is None:
            return None
        logits = tag.logits
        return lead.split(logits) if logits.dim() == 4 or lead.flattened else None

    def _input_of(self, at: Sequence[int], size: int) -> int | None:
        """Number of the only input that is touched at the same token; None if there is none, or several."""
        if not 0 < len(at) < size:
            return None
        fits: dict[int, tuple[int, ...]] = {}
        for number, mark in enumerate(self.marks):
            if mark is not None and (axes := mark.axes_of(at, size)):
                known = self.token_axes.get(number)
                if known is None or known in axes:
                    fits[number] = axes
        exact = {number: axes for number in fits if (axes := self.marks[number].exact_axes_of(at, size))}
        for number, axes in exact.items():
            if len(axes) == 1:
                self.token_axes.setdefault(number, axes[0])
        chosen = list(exact or fits)
        return chosen[0] if len(chosen) == 1 else None

    @property
    def sequence(self) -> tuple[int, int]:
        """Which of how many sequences is touched."""
        for number, mark in enumerate(self.marks):
            if mark is not None:
                batch = self.axes_of_input(number).batch
                batch = 0 if batch is None else batch
                return mark.at[batch], mark.shape[batch]
        return 0, 0

    def axes_of_input(self, number: int) -> Axes:
        """The axis of tokens of an input: that along which attention calls saw its touch."""
        mark = self.marks[number]
        if mark is None or len(mark.shape) > 3:
            return Axes(0 if mark is not None else None, ())
        ends = [(call.touched, call.num_keys) for call in self.calls if call.keys_of == number]
        found = {mark.axes_of(at, size) for at, size in ends if 0 < len(at) < size}
        axes = {axis for axes in found for axis in axes if len(axes) == 1}
        if len(axes) != 1:
            return Axes(None, ())
        (tokens,) = axes
        return Axes(1 - tokens if len(mark.shape) - mark.has_features > 1 else None, (tokens,))

    def _makers(self, product: Product, side: int) -> tuple:
        """What P is made from: the same for two calls with one P."""
        tensors = product.tensors[:2] if product.is_kernel else [product.tensors[side]]
        return tuple((tag.maker or tag.kind, x.shape) for x in tensors for tag in [self.tag(x)])

    def _with_twin(self, call: ReadCall, p0: Tensor, makers: tuple) -> ReadCall:
        """The call, with an earlier one beside it that has the same P, if there is one."""
        beside = self.of_depth.setdefault(call.depth, [])
        for other, other_p, other_makers in beside:
            if other_p.shape == p0.shape and torch.equal(other_p, p0) and (other_makers == makers or not _is_flat(p0)):
                return replace(call, twin=other.key)
        beside.append((call, p0, makers))
        return call


class _Mark(NamedTuple):
    """Where an input is touched."""

    shape: tuple[int, ...]
    at: tuple[int, ...]
    has_features: bool

    def axes_of(self, at: Sequence[int], size: int) -> tuple[int, ...]:
        """The axes, of the first two, along which the touched token may be that at these indices among so many. A scan
        before has spread the touch to the end, and a convolution to both sides."""
        index = _middle(at, size)
        shifted = [
            axis for axis in self._axes if index == self.at[axis] or size - index == self.shape[axis] - self.at[axis]
        ]
        return self.exact_axes_of(at, size) or tuple(shifted)

    def exact_axes_of(self, at: Sequence[int], size: int) -> tuple[int, ...]:
        """Those that are as long, too."""
        index = _middle(at, size)
        return tuple(axis for axis in self._axes if (self.shape[axis], self.at[axis]) == (size, index))

    @property
    def _axes(self) -> range:
        return range(min(2, len(self.shape))) if len(self.shape) < 4 else range(0)


def _middle(at: Sequence[int], size: int) -> int:
    return at[0] if at[-1] == size - 1 else at[len(at) // 2]


def _place(shape: Sequence[int], number: int) -> tuple[int, ...]:
    """The number of an input that is touched: off the diagonal, so that sequences and tokens differ, and at another
    token for each input."""
    last = [size - 1 for size in shape]
    if len(shape) == 2 or len(shape) == 3:
        last[1] = max(0, shape[1] - 2 - number) if shape[1] > 2 + number else max(0, shape[1] - 2)
    if len(shape) == 1:
        last[0] = max(0, shape[0] - 2 - number)
    if len(shape) == 3:
        last[2] = 0
    if len(shape) > 3:
        last[1] = 0
    return tuple(last)


def _is_tokens(x: Tensor) -> bool:
    """Whether whole numbers may be tokens: of more than two kinds, which masks have, and no list of positions."""
    if x.is_floating_point() or x.dtype == torch.bool or x.dim() not in (1, 2) or x.shape[-1] < 2:
        return False
    return x.unique().numel() > 2 and not bool((x == torch.arange(x.shape[-1], device=x.device)).all())


def _another(x: Tensor, at: tuple[int, ...]) -> Tensor:
    """Another token of the same sequence; the token itself if all are alike."""
    others = x[at[:-1]][x[at[:-1]] != x[at]]
    return others[0] if len(others) else x[at]


def _is_mask(x: Tensor) -> bool:
    """Whether a tensor of floats holds nothing but 0, 1 and the least numbers, as masks do."""
    least = torch.finfo(x.dtype).min
    return bool(((x == 0) | (x == 1) | (x <= least / 2)).all())


def _changes(new: Tensor, old: Tensor) -> Tensor:
    """Which numbers are touched, less leaks."""
    change = (new - old).abs()
    return change > LEAK * change.max() if change.numel() else change > 0


def _touched(new: Tensor, old: Tensor, axis: int) -> list[int]:
    """Indices along an axis at which the tensors differ."""
    if not new.numel() or new.shape != old.shape:
        return []
    change = (new - old).abs().nan_to_num().movedim(axis, 0).flatten(1).amax(1)
    return (change > LEAK * change.max()).nonzero()[:, 0].tolist() if change.max() > 0 else []


def _is_partly(at: Sequence[int], size: int) -> bool:
    """Whether the touch stands at few indices, as along an axis of tokens or sequences. Of features it may miss some by
    chance; a scan carries it from the last token but one to the last."""
    return 0 < len(at) < size and len(at) <= max(2, size // 2)


def _leads(changed: Tensor, p: Tensor) -> Tensor:
    """The leading indices of P whose values are touched."""
    leads, wanted = changed.flatten(-2).any(-1), p.shape[:-2]
    if leads.shape != wanted and leads.dim() and len(wanted):
        if wanted[-1] % leads.shape[-1] == 0:  # groups of heads share their values
            leads = leads.repeat_interleave(wanted[-1] // leads.shape[-1], -1)
        leads = leads.expand(wanted)
    return leads


def _moves(p: Tensor, p0: Tensor, leads: Tensor) -> bool:
    """Whether P changes wherever its values do, as it does if it depends on their tokens."""
    moved = (p - p0).abs().flatten(-2).amax(-1)
    return bool((moved > 1e-4 * moved.max())[leads].all())


def _lead(changed: Tensor, v: Tensor, p: Tensor, leads: Tensor, at: Sequence[int]) -> Lead:
    """The roles of the axes of P in front of its queries."""
    shape = p.shape[:-2]
    if not shape:
        return Lead(1)
    if not at or len(at) == v.shape[-2]:
        return Lead(shape[-1], (len(shape) - 1,)) if len(shape) > 1 else Lead(1)
    whole = [axis for axis, size in enumerate(shape) if size > 1 and _along(leads, axis).all()]
    if len(shape) > 1:
        heads = math.prod(shape[axis] for axis in whole)
        if not whole:  # one head, in an axis of its own
            whole = [len(shape) - 1] if shape[-1] == 1 else []
        return Lead(heads, tuple(whole))
    of_key = max(int(_of_groups(changed.any(-1)[..., index], p).sum()) for index in at)
    if of_key in (1, shape[0]):
        return Lead(of_key, (0,) if of_key > 1 else ())
    first, *_, last = _of_groups(changed.any(-1)[..., at[0]], p).nonzero()[:, 0].tolist()
    return Lead(of_key, (), "inside" if last - first == of_key - 1 else "outside")


def _of_groups(leads: Tensor, p: Tensor) -> Tensor:
    return leads.repeat_interleave(p.shape[-3] // leads.shape[-1], -1)


def _along(leads: Tensor, axis: int) -> Tensor:
    return leads.movedim(axis, 0).reshape(leads.shape[axis], -1).any(1)


def _is_flat(p: Tensor) -> bool:
    """Whether each query gives the same weight to all keys that it sees, as fresh heads may."""
    return bool(((p == 0) | (p == p.amax(-1, keepdim=True))).all())


def _is_cross(
    at: Sequence[int], queries: list[int] | None, p: Tensor, inputs: tuple[int | None, int | None]
) -> bool | None:
    """Whether queries and keys are other tokens; None if the touch does not tell."""
    if not at or queries is None:
        return None if p.shape[-1] == p.shape[-2] or not at else True
    if None not in inputs:
        return inputs[0] != inputs[1]
    # queries that are not touched are no tokens of an input
    return not any(set(at) & {index + offset for index in queries} for offset in {0, p.shape[-1] - p.shape[-2]})


def hidden_keys(p_RHNM: Tensor, logits_RHNM: Tensor | None, is_cross: bool | None) -> Tensor:
    """Keys to which no other query of any head gives weight, (R, M); rows of queries that see no key do not count.

    A padded token may see itself. In causal attention no later query may see the last token either, so there its own
    query counts.
    """
    seen = p_RHNM != 0
    if logits_RHNM is not None and logits_RHNM.shape == p_RHNM.shape:
        nothing = logits_RHNM.amax(-1, keepdim=True) <= torch.finfo(logits_RHNM.dtype).min / 2
        seen &= ~nothing
    seen_RNM = seen.any(1)
    num_queries, num_keys = seen_RNM.shape[1:]
    if not is_cross and num_queries == num_keys and seen_RNM.triu(1).any():
        own_NM = torch.eye(num_keys, dtype=torch.bool, device=seen.device)
        others_RM = (seen_RNM & ~own_NM).any(1)
        return ~torch.where(others_RM.any(1, keepdim=True), others_RM, seen_RNM.any(1))
    return ~seen_RNM.any(1)


# --- a reading --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def read(
    module: Callable, args: tuple = (), kwargs: Mapping[str, Any] = MappingProxyType({}), submodule: str | None = None
) -> Reading:
    """Read a module on these arguments, of two or more sequences if possible, in three passes.

    submodule: one whose result is wanted as an output, too. ConfigError if the module differs from call to call.
    """
    kwargs = dict(kwargs)
    plain, again = _Plain(module, submodule), _Plain(module, submodule)
    output = plain.passed(args, kwargs)
    repeated = again.passed(args, kwargs)
    if (
        _differ(output, repeated)
        or [*plain.states] != [*again.states]
        or any(_differ(state.left, again.states[run].left) for run, state in plain.states.items())
    ):
        _refuse_change(module, plain.sizes, again.sizes)
    del again, repeated
    ways = [(TOUCH, frozenset()), (TOUCH / 100, frozenset()), (0.0, frozenset())]  # 0: what the tags say
    while ways:
        touched = _Touched(module, submodule, plain, *ways.pop(0))
        try:
            touched_output = touched.passed(args, kwargs)
        except Changed:
            continue
        if not touched.unseen or touched.exchanged:
            break
        ways.insert(0, (touched.scale, touched.unseen))
        ways.insert(1, (touched.scale, frozenset({-1})))  # as before
    names = [_name(path) for path, x in tree_flatten_with_path((args, kwargs))[0] if isinstance(x, Tensor)]
    inputs = tuple(
        Input(name, tuple(x.shape), touched.axes_of_input(number), touched.marks[number] is not None)
        for number, (name, x) in enumerate(zip(names, tensors_in([args, kwargs]), strict=True))
    )
    old, new = named_tensors(output), named_tensors(touched_output)
    outputs = [_output(*pair, touched, False) for pair in zip(old, new, strict=True)]
    if plain.wanted_result is not None:
        pair = [(submodule, of_pass.wanted_result) for of_pass in (plain, touched)]
        outputs.append(_output(*pair, touched, True))
    return Reading(
        touched.roles, tuple(touched.calls), tuple(touched.factors), inputs, tuple(outputs), _states(plain, touched),
        tuple(plain.uncovered),
    )  # fmt: skip


def _differ(x: Any, y: Any) -> bool:
    """Whether what two passes returned differs by more than rounding."""
    pairs = [(first, second) for (_, first), (_, second) in zip(named_tensors(x), named_tensors(y), strict=False)]
    return any(
        a.shape != b.shape
        or bool(((a - b).abs() > REPEATED * torch.finfo(a.dtype).eps * a.abs().nan_to_num().max()).any())
        for a, b in pairs
        if a.numel()
    )


def _refuse_change(module: Callable, sizes: list[tuple[Call, Tensor]], again: list[tuple[Call, Tensor]]) -> None:
    """ConfigError that names the first call that differs between two passes."""
    first = next(
        (one for (one, x), (other, y) in zip(sizes, again, strict=False)
         if one.function != other.function or one.module != other.module
         or bool(((x - y)[:2].abs() > REPEATED * x[2] * x[1]).any())),
        None if len(sizes) == len(again) else (sizes + again)[min(len(sizes), len(again))][0],
    )  # fmt: skip
    name = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", str(module))
    raise ConfigError(
        f"{name}: {first or 'it'} gives other numbers when the module runs again on the same inputs, so no two passes "
        "measure one network; take out what differs from call to call (random numbers, a counter, a cache)"
    )


def _name(path: Sequence[Any]) -> str:
    """An argument by its keyword, or by its place: `inputs` for the first, `inputs[1]` for the second."""
    kind, *rest = path
    number = getattr(kind, "idx", 0)
    if number == 1:
        first, *rest = rest
        return f"{first.key}{keystr(tuple(rest))}"
    return "inputs" if len(rest) == 1 and rest[0].idx == 0 else f"inputs{keystr(tuple(rest))}"


def _axes(new: Tensor, old: Tensor, calls: Sequence[ReadCall], sequence: tuple[int, int]) -> Axes | None:
    """Axes of a state: that of tokens is as long as, and touched at the same index as, the keys of an attention call.
    None where the touch does not tell. sequence: which of how many sequences is touched."""
    touched = [_touched(new, old, axis) for axis in range(new.dim())]
    partly = [axis for axis, at in enumerate(touched) if _is_partly(at, new.shape[axis])]
    ends = [axis for axis in partly if (touched[axis], new.shape[axis]) == ([sequence[0]], sequence[1])]
    tokens = [
        axis
        for axis in partly
        if any(
            (call.num_keys, list(call.touched)) == (new.shape[axis], touched[axis]) for call in calls if call.touched
        )
    ]
    if len(tokens) == 1:
        batch = [axis for axis in ends if axis not in tokens][:1]
        alone = [axis for axis in range(new.dim() - 1) if new.shape[axis] == 1 and axis not in tokens]
        return Axes(next(iter(batch or alone), None), tuple(tokens))
    if len(ends) != 1 or tokens:
        return None
    # attention within windows: their keys are not the state's tokens; or a state without tokens
    return Axes(ends[0], tuple(axis for axis in partly if axis != ends[0] and axis < new.dim() - 1))


def _states(plain: _Plain, touched: _Touched) -> dict[Run, State]:
    """What is known of the submodules that keep the shape of their input."""
    states = {}
    sequence = touched.sequence
    for run, (entered, left, _) in plain.states.items():
        inside = [call for call in touched.calls if run in call.runs]
        other = touched.states.get(run)
        same = other is not None and other.left.shape == left.shape
        axes = _axes(other.left, left, inside or touched.calls, sequence) if same else None
        states[run] = State(tuple(left.shape), axes, _digest(entered), _digest(left), other.passed if other else 0)
    return states


def _digest(x: Tensor) -> tuple:
    """Equal for equal tensors."""
    numbers = x.double().nan_to_num()
    return tuple(x.shape), numbers.sum().item(), numbers.square().sum().item(), numbers.flatten()[-1:].tolist()[0]


def _output(old: tuple[str, Tensor], new: tuple[str, Tensor], touched: _Touched, is_submodule: bool) -> Output:
    (name, before), (_, after) = old, new
    axes = _axes(after, before, touched.calls, touched.sequence) if after.shape == before.shape else None
    return Output(name, tuple(before.shape), axes, touched.tag(after).passed, is_submodule)


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of floats in what a module returns, each with the name that `output=` gives it."""
    if isinstance(output, Tensor):
        named = [("output", output)]
    elif isinstance(output, Mapping):
        named = [
            (key if number == 0 else f"{key}.{number}", x)
            for key, value in output.items()
            for number, x in enumerate(tensors_in(value))
        ]
    elif isinstance(output, (tuple, list)):
        named = [(str(number), x) for number, x in enumerate(tensors_in(output))]
    else:
        named = (
            [(name, x) for name, value in vars(output).items() for x in tensors_in(value)]
            if hasattr(output, "__dict__")
            else []
        )
    return [(name, x) for name, x in named if x.is_floating_point() and x.numel()]

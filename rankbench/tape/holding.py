"""A pass in which all tokens but the touched one change: where that changes, too, something other than attention has
mixed them. It shows what reads tokens that the touch may miss, as the first one, or that of the largest norm."""

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import tensors_in
from rankbench.tape.following import first_state
from rankbench.tape.joining import is_behind_attention
from rankbench.tape.mixing import axes_of, enclosing, pixels_of
from rankbench.tape.plain import Changed, Plain, first_of
from rankbench.tape.probe import Touched
from rankbench.tape.recording import Product
from rankbench.tape.tags import Role, Verdict, Visit
from rankbench.tape.touch import beyond_rounding, changed_numbers, is_partly, touched_at
from rankbench.tape.touching import Touching


class Held(NamedTuple):
    """The tokens of a state that stay as they were: the axes of tokens, side by side, and that of features, the indices
    of the held tokens, and which of the tokens of all sequences they are."""

    axes: tuple[int, ...]
    features: int
    at: list[int]
    tokens: Tensor

    def all_changed(self, new: Tensor, old: Tensor) -> bool:
        """Whether all of them differ between two states of one shape by more than rounding."""
        change = (new - old).abs().nan_to_num().amax(self.features)
        return bool(beyond_rounding(change, old)[self.tokens].all())

    def are_among(self, other: "Held") -> bool:
        """Whether the held tokens of another state are these, or more."""
        return self.tokens.shape == other.tokens.shape and not (self.tokens & ~other.tokens).any()


class Holding(Touching):
    """Such a pass, compared with the plain one and the touched one. reached: submodules that read a state whose touched
    tokens have changed. attended: those in which attention reads such values."""

    def __init__(self, touched: Touched) -> None:
        way = touched.way._replace(scale=touched.way.scale / 100)
        if way.exchanged:  # which is no small change
            inputs = tensors_in([*touched.base.arguments])
            way = way._replace(exchanged=frozenset(), left_out=frozenset(range(len(inputs))))
        super().__init__(touched.base, way)
        self.touched = touched
        self.reached: list[Visit] = []
        self.attended: list[str] = []

    def _touch(self, x: Tensor, at: tuple) -> None:
        """Change an input, or its embeddings, at all tokens but the touched one."""
        for number, mark in self.touched.marks.items():
            axes = self.touched.axes_of_input(number).tokens
            if mark.shape[:2] == x.shape[:2] and mark.at[:2] == at[:2] and len(axes) == 1:
                self._change(x, axes, [at[axes[0]]])
                return

    def _change(self, x: Tensor, axes: Sequence[int], held: Collection[int], deviation: Tensor | None = None) -> None:
        """Add random numbers at all indices but some of an axis, or of several side by side as if they were one."""
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
        noise.flatten(axes[0], axes[-1]).movedim(axes[0], 0)[[*held]] = 0
        x += self.way.scale * (x.std() if deviation is None else deviation).nan_to_num(1.0) * noise

    def enter(self, run: Visit, x: Tensor) -> None:
        """Let all tokens of a state but the touched ones differ from the plain pass."""
        old, new = (next(iter(each.entered.get(run, ())), None) for each in (self.base, self.touched))
        if old is None or new is None or (held := held_in(self.touched, new, old, run)) is None:
            return
        if x.shape != old.shape or 0 in x.stride():
            return
        if held.all_changed(x, old):
            self.reached.append(run)
        x.data.copy_(old)
        self._change(x.data, held.axes, held.at)

    def verdict(self, product: Product) -> Verdict:
        """As in the touched pass. Attention returns what it did in the plain one, changed at all other queries."""
        key = self.key_of(product.seen)
        role, side = self.touched.roles.get(key, Verdict(Role.FACTOR))
        old = self.base.kept.get(key)
        if old is None or [x.shape for x in old.tensors] != [x.shape for x in product.tensors]:
            raise Changed(product.seen.call)
        if role == Role.ATTENTION:
            weighted, result = product.sides[side], first_of(product.seen.result)
            assert weighted is not None  # as in the touched pass
            p, v = weighted.weights(*product.tensors), weighted.values(*product.tensors)
            if self._reads_one_state and self._are_changed(
                v, weighted.values(*old.tensors), self.touched.values_held[key]
            ):
                self.attended.append(product.seen.call.module)
            change = torch.zeros((*p.shape[:-1], v.shape[-1]), dtype=result.dtype, device=result.device)
            self._change(change, (-2,), self.touched.queries_held[key], old.result.std())
            result.copy_(old.result + weighted.back(change).reshape(result.shape))
            if not product.is_kernel and 0 not in product.tensors[side].stride():
                product.tensors[side].data.copy_(old.tensors[side])
        return Verdict(role, side)

    @property
    def _reads_one_state(self) -> bool:
        """Whether the submodule that runs reads one state, whose touched tokens stand still."""
        read = next((read for run in reversed(self.stack) if (read := self.entered.get(run))), ())
        return sum(x.is_floating_point() for x in read) < 2

    def _are_changed(self, v: Tensor, old: Tensor, held: Tensor) -> bool:
        """Whether all values of the touched tokens have changed, (*lead, M); no, if there are no other values."""
        is_changed = beyond_rounding((v - old).abs().nan_to_num().amax(-1), old)
        return bool(held.any()) and not held.any(-1).eq(held.all(-1)).all() and bool(is_changed[held].all())


def held_in(touched: Touched, new: Tensor, old: Tensor, run: Visit | None) -> Held | None:
    """The touched tokens of a state; None if not known. run: the submodule that reads or makes it."""
    if not old.is_floating_point() or new.shape != old.shape or old.dim() < 3:
        return None
    found = (_axes_of_rows if old.dim() == 3 else _axes_of_map)(touched, new, old, run)
    if found is None:
        return None
    axes, features = found
    flat_new, flat_old = (x.flatten(axes[0], axes[-1]) for x in (new, old))
    at = touched_at(flat_new, flat_old, axes[0])
    if not 0 < len(at) < prod(old.shape[axis] for axis in axes):
        return None
    return Held(axes, features, at, changed_numbers(new, old).any(features))


def _axes_of_rows(touched: Touched, new: Tensor, old: Tensor, run: Visit | None) -> tuple[tuple[int, ...], int] | None:
    """The axis of the tokens of a state, and that of their features; both first axes where the touched token stands on
    the diagonal of as many tokens as sequences."""
    axes = axes_of(touched, new, old, run)
    if axes is None:
        (first, size), (second, num), of_features = [(touched_at(new, old, axis), old.shape[axis]) for axis in range(3)]
        is_told = is_partly(first, size) and not is_partly(*of_features)
        return ((0, 1), 2) if is_told and (first, size) == (second, num) else None
    if len(axes.tokens) != 1:
        return None
    # where no axis counts sequences, as of windows of tokens, features are last
    features = 2 if axes.batch is None else 3 - axes.tokens[0] - axes.batch
    return None if features == axes.tokens[0] else (axes.tokens, features)


def _axes_of_map(touched: Touched, new: Tensor, old: Tensor, run: Visit | None) -> tuple[tuple[int, ...], int] | None:
    """The axes of the pixels of a map that has passed attention, and that of their features."""
    return pixels_of(new, old) if run is None or is_behind_attention(run, touched) else None


def changed_though_held(touched: Touched) -> list[str]:
    """The submodules that change the touched tokens when all others change; "" is the module itself."""
    if not (touched.way.scale and touched.calls and len(touched.marks) == 1):  # of several inputs each holds others
        return []
    holding, plain = Holding(touched), touched.base
    try:
        holding.passed(*plain.arguments)
    except (Changed, ConfigError):
        return []
    runs = [run for run in (*plain.passages, None) if _is_changed(run, holding)]
    runs += [enclosing(run, plain) for run in holding.reached]
    return [*("" if run is None else run.name for run in runs), *holding.attended]


def _left(of_pass: Plain, run: Visit | None) -> Tensor | None:
    if run is None:
        return first_state(of_pass.output)
    return of_pass.passages[run].left if run in of_pass.passages else None


def _is_changed(run: Visit | None, holding: Holding) -> bool:
    """Whether all touched tokens of what it returned have changed, although it reads these tokens unchanged."""
    touched, plain = holding.touched, holding.base
    new, old, with_touch = (_left(each, run) for each in (holding, plain, touched))
    if new is None or old is None or with_touch is None or new.shape != old.shape:
        return False
    held = held_in(touched, with_touch, old, run)
    if held is None or not held.all_changed(new, old):
        return False
    read = () if run is None else zip(holding.entered[run], plain.entered[run], touched.entered[run], strict=True)
    for x, x0, x_touched in read:
        at = held_in(touched, x_touched, x0, run)
        if x0.is_floating_point() and (at is None or not held.are_among(at) or at.all_changed(x, x0)):
            return False
    return True

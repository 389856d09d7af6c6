"""A touched pass that refuses what would be misread as attention: heads that nothing shows, parts of a softmax, tokens
that something else has mixed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import name_of, tensors_in
from rankbench.tape.choosing import Choosing
from rankbench.tape.marks import Way
from rankbench.tape.plain import Kept, Plain
from rankbench.tape.reading import Lead, ReadCall
from rankbench.tape.recording import Product
from rankbench.tape.replay import Call
from rankbench.tape.rules.products import have_unit_sums
from rankbench.tape.tags import Level, Role, Site, Tag, Verdict, Weighted
from rankbench.tape.touch import changed_numbers, is_partly, touched_at


@dataclass
class Candidate:
    """A product that may be attention, in the touched pass and in the plain one (old, p0, v0).

    side: that of P. tag: of P. p: (*lead, N, M). v: (*lead, M, K). at: the touched keys.
    """

    product: Product
    old: Kept
    key: Site
    side: int
    weighted: Weighted
    tag: Tag
    p: Tensor
    p0: Tensor
    v: Tensor
    v0: Tensor
    at: list[int]

    @property
    def has_scores(self) -> bool:
        """Whether a product of queries and keys made P."""
        return self.product.is_kernel or self.tag.mixes

    @cached_property
    def queries(self) -> tuple[Tensor, Tensor] | None:
        """The queries in both passes, of torch's attention functions alone."""
        if not self.product.is_kernel or (to_scores := self.product.to_scores) is None:
            return None
        return to_scores(*self.product.tensors)[0], to_scores(*self.old.tensors)[0]

    @property
    def has_no_queries(self) -> bool:
        """Whether all queries are zero, as where their map begins at zero: no touch moves them."""
        scores = None if self.tag.scores is None else self.tag.scores[:2][self.side]
        queries = scores if self.queries is None else self.queries[0]
        return queries is not None and not queries.any()

    @property
    def moving(self) -> tuple[Tensor, Tensor]:
        """P in both passes; if a softmax made it, its logits, which move with the touch where a weight stays at 0 or
        1."""
        new, before = self.product.tensors, self.old.tensors
        logits, logits0 = self.tag.logits, self.old.logits[self.side] if self.old.logits else None
        if logits is None or logits0 is None or not logits.shape == logits0.shape == new[self.side].shape:
            return self.p, self.p0
        new, before = ((*x[: self.side], y, *x[self.side + 1 :]) for x, y in ((new, logits), (before, logits0)))
        return self.weighted.weights(*new), self.weighted.weights(*before)


class Checking(Choosing):
    """A touched pass, compared with the plain one."""

    def __init__(self, base: Plain, way: Way, sequences: Mapping[int, int]) -> None:
        super().__init__(base, way, sequences)
        self.rows: dict[Site, list[int]] = {}  # touched queries, of weights that no product of queries and keys made
        # sums over the touched keys at leading indices of one token, by weights that tags take for those of attention
        self.of_one_token: dict[Site, tuple[Call, list[int], Tensor]] = {}
        self.scored_by: dict[int, Site | None] = {}  # of attention calls: their product of queries and keys
        self.unsplit: dict[Call, str] = {}  # with heads and sequences in one axis, of which nothing shows how many: why

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        has_parts = len(self.calls) > 1 and name_of(func)[0] in ("div", "mul")
        if has_parts and len(given := tensors_in([args, kwargs])) == 2:
            for x, divisor in (given, given[::-1]):
                if divisor.numel() < x.numel() and self.tag(divisor).form:
                    self._check_parts_over_their_sum(x, divisor)
        return super().__torch_function__(func, types, args, kwargs)

    def _check_parts_over_their_sum(self, x: Tensor, divisor: Tensor) -> None:
        """ConfigError for what several calls have read with weights that no softmax made, if it is divided by the sum
        of all these weights: one softmax in parts. divisor: or one over it."""
        parts: dict[tuple, list[ReadCall]] = {}
        passed = self.tag(x).passed & ~self.tag(divisor).passed
        for call in self.calls:
            if call.kind not in ("softmax", "signed") and passed >> call.number & 1:
                parts.setdefault((call.call.module, call.call.function, call.depth, call.shape[:-1]), []).append(call)
        for calls in parts.values():
            total, mean = sum(call.row_sum for call in calls), divisor.double().mean().item()
            if len(calls) > 1 and any(abs(y - total) < 0.01 * abs(total) for y in (mean, (1 / divisor).mean().item())):
                raise ConfigError(
                    f"{calls[0].call} and {calls[1].call}: one softmax in parts, whose results are divided by the sum "
                    "of all weights, so that heads would count once for each part; give all keys to one call"
                )

    def _check_heads(self, candidate: Candidate, in_window: bool) -> None:
        """ConfigError for heads that are no axis of P (they share it, or stand among its queries), for windows of what
        may be a convolution, and for values without a touch that the other side of the weights multiplies."""
        call, is_kernel, tag = candidate.product.seen.call, candidate.product.is_kernel, candidate.tag
        shape, v = candidate.p.shape, candidate.v
        if not (candidate.at or is_kernel) and have_unit_sums(candidate.p0.mT) and not have_unit_sums(candidate.p0):
            raise ConfigError(
                f"{call}: multiplies attention weights from the side of their queries, and nothing shows whether that "
                "makes weights again; multiply the values by the weights first"
            )
        if in_window and not (tag.mixes or tag.pairs):
            raise ConfigError(
                f"{call}: weighs windows of tokens with weights that no product of queries and keys made, "
                "so that nothing shows whether it is attention or a dynamic convolution; give it weights of all tokens"
            )
        if len(shape) == v.dim() and any(one == 1 < many for one, many in zip(shape[:-2], v.shape, strict=False)):
            raise ConfigError(
                f"{call}: one P of shape {tuple(shape)} for all values of shape {tuple(v.shape)}; write "
                "these side by side, as the values of one head"
            )
        moving = _rows_that_move(candidate)
        if moving.shape[-1] > 1 and moving[None].flatten(0, -2).any(0).all() and self.holds_one_token(moving.any(-1)):
            raise ConfigError(
                f"{call}: all queries of P of shape {tuple(shape)} are of one token, as where heads stand "
                "among the queries; give heads an axis of their own"
            )

    def _check_parts_of_a_softmax(self, product: Product) -> None:
        """ConfigError for what attention has read, weighted by numbers of its own scores, one row for each query: a
        softmax in parts, which the sums of their exponentials merge."""
        for side, weighted in enumerate(product.sides if not product.is_kernel else ()):
            scores, passed = self.tag(product.tensors[side]).scores, self.tag(product.tensors[1 - side]).passed
            calls = [number for number, key in self.scored_by.items() if scores is not None and key == scores.key]
            is_one_row = weighted is not None and weighted.weights(*product.tensors).shape[-2] == 1
            if is_one_row and any(passed >> number & 1 for number in calls):
                raise ConfigError(
                    f"{product.seen.call}: merges what attention read from parts of the keys by weights of the same "
                    "scores, so that the heads of one softmax would count once for each part; give all keys to one call"
                )

    def _check_slots(self, candidate: Candidate) -> None:
        """ConfigError for values that are touched everywhere, unless queries show the tokens, as where all tokens are
        mapped to a few slots of keys and values (Linformer)."""
        product, call = candidate.product, candidate.product.seen.call
        values = self.tag(product.tensors[1 - candidate.side])
        if not product.is_kernel and values.mixes:
            if values.level == Level.SOFTMAX or values.form:
                raise ConfigError(
                    f"{call}: multiplies attention weights by other weights of attention, so that a path would pass "
                    "the heads of both in one product; multiply the values by one after the other"
                )
            raise ConfigError(
                f"{call}: multiplies what a sum of products of two states has made, as in triangle multiplication or "
                "in scores without a softmax, so nothing shows which axis counts tokens; measure the network up to "
                "there, or without it"
            )
        if not is_partly(self._queries(candidate) or (), candidate.p.shape[-2]):
            raise unreadable(call)
        self.chosen[call] = None  # named among what mixes tokens

    def _is_of_one_token(self, candidate: Candidate, leads: Tensor) -> bool:
        """Whether the touched leading indices of P are those of one token, so that it sums over something else."""
        if not self.holds_one_token(leads):
            return False
        if candidate.product.by_tags == Verdict(Role.ATTENTION, candidate.side):
            self.of_one_token[candidate.key] = candidate.product.seen.call, candidate.at, leads
        return True

    def _check_filled(self, candidate: Candidate, is_softmax: bool) -> None:
        """ConfigError for a softmax of scores whose keys may be tokens although the touch fills them: in a single
        sequence, where a mean, say, has filled one of two axes; and in windows, as where to each token of a patch is
        added what was read of its patch."""
        by_tags, shape, call = candidate.product.by_tags, candidate.p.shape, candidate.product.seen.call
        if not is_softmax or by_tags != Verdict(Role.ATTENTION, candidate.side):
            return
        if shape[-2] > 1 == self.sequence[1]:
            raise ConfigError(
                f"{call}: with one sequence nothing shows whether the keys of P of shape "
                f"{tuple(shape)} are tokens; give two sequences or more"
            )
        v, v0 = candidate.v, candidate.v0
        lead = [size for axis, size in enumerate(v.shape[:-2]) if is_partly(touched_at(v, v0, axis), size)]
        windows, keys = math.prod(lead), (shape[-1], shape[-1] - 1)  # less one that begins each
        tokens = {math.prod(mark.shape[:2]) for mark in self.marks.values() if len(mark.shape) - mark.has_features == 2}
        if windows > self.sequence[1] and windows not in tokens and tokens & {windows * size for size in keys}:
            raise unreadable(call)

    def _split_alike(self, lead: Lead, candidate: Candidate) -> Lead:
        """The lead of a P whose first axis holds heads and sequences. Where no touch arrives, its heads are those into
        which the queries were split."""
        p, scores = candidate.p, candidate.tag.scores
        if p.dim() != 3 or scores is None or candidate.product.is_kernel:
            return lead
        queries = scores[:2][candidate.side]
        state = self.tag(queries).state
        heads = state[-1] // queries.shape[-1] if state else 0
        if not candidate.at and heads > 1 and p.shape[0] % heads == 0:
            return Lead(heads, (), "inside") if heads < p.shape[0] else Lead(heads, (0,))
        if lead.heads != heads and (heads or not (candidate.at or p.shape[0] == self.sequence[1])):
            shown = f"the touch shows {lead.heads}" if candidate.at else "no touch arrives"
            split = f"the queries were split into {heads}" if heads else "nothing shows into how many queries are split"
            self.unsplit[candidate.product.seen.call] = f"{shown}, and {split}"
        return lead

    def _queries(self, candidate: Candidate) -> list[int] | None:
        """The touched queries; None if they are not known."""
        side, num_queries = candidate.side, candidate.p.shape[-2]
        if candidate.queries is not None:
            return touched_at(*candidate.queries, -2)
        if candidate.key in self.rows:
            return self.rows[candidate.key]
        if (scores := candidate.tag.scores) is None or not (touched := self.scores.get(scores.key)):
            return None
        if scores[:2][side].shape[-2] != num_queries:
            return None
        if scores[:2][1 - side].shape[-2] == num_queries and touched[0] != touched[1]:  # weights may be transposed
            found = changed_numbers(*candidate.moving)[None].flatten(0, -3).any(0)
            return min(touched[side], touched[1 - side], key=lambda rows: _misses(found, rows, touched))
        return touched[side]


def _rows_that_move(candidate: Candidate) -> Tensor:
    """The queries that move, (*lead, N): those whose weights change at keys that are not touched."""
    if candidate.queries is not None:
        return changed_numbers(*candidate.queries).any(-1)
    others = [key for key in range(candidate.p.shape[-1]) if key not in candidate.at]
    return changed_numbers(*candidate.moving)[..., others].any(-1)


def _misses(found: Tensor, rows: list[int], touched: list[list[int]]) -> int:
    """How many numbers of P move, (N, M), that should not if these rows and the other columns are touched, or the
    reverse. touched: the indices of both factors of the scores."""
    wanted = torch.zeros_like(found)
    (columns,) = (other for other in touched if other is not rows)
    wanted[rows] = wanted[:, [column for column in columns if column < found.shape[-1]]] = True
    return int((found ^ wanted).sum())


def unreadable(call: Call) -> ConfigError:
    """The refusal of attention to states whose tokens something else has mixed."""
    return ConfigError(
        f"{call}: multiplies states in which something that is no attention (a convolution, a mean, linear attention) "
        "has mixed all tokens, so nothing shows which axis counts tokens; put this attention into a submodule of its "
        "own that reads (B, N, D), or give more tokens"
    )

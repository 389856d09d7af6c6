"""The touched pass that reads a network: it compares the factors of every product of two activations with those of the
plain pass, and decides which product is attention (rankbench.tape.read)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.tape.checking import Candidate, Checking, unreadable
from rankbench.tape.following import first_state
from rankbench.tape.marks import Way
from rankbench.tape.plain import Changed, Kept, Plain, first_of
from rankbench.tape.reading import NO_TOKENS, OF_ITSELF, UNREACHED, Factor, ReadCall
from rankbench.tape.recording import Product
from rankbench.tape.rules.products import have_unit_sums, unclear_axes
from rankbench.tape.tags import Kind, Level, Role, Site, Tag, Verdict, Visit
from rankbench.tape.touch import (
    along,
    are_heads,
    are_rearranged,
    axes_that_share,
    changed_at,
    changed_numbers,
    hidden_keys,
    in_blocks,
    is_flat,
    is_partly,
    is_spread,
    is_zero,
    lead_of,
    leaky_keys,
    most_touched,
    moves_with,
    of_all_heads,
    of_one_window,
    own_queries,
    paired_rows,
    put_back,
    reads_other_tokens,
    touched_at,
    touched_in_part,
    touched_in_windows,
    touched_keys,
    touched_leads,
)


class Touched(Checking):
    """The pass that reads: with changed numbers, whose change attention puts back to one token."""

    def __init__(self, base: Plain, way: Way, sequences: Mapping[int, int]) -> None:
        super().__init__(base, way, sequences)
        self.roles: dict[Site, Verdict] = {}
        # calls whose weights, without scores, change for all queries, and their values
        self.pooled: list[tuple[ReadCall, Tensor]] = []
        self.factors: list[Factor] = []
        self.of_depth: dict[int, list[tuple[ReadCall, Tensor, tuple]]] = {}
        self.begun_anew: dict[Visit, None] = {}  # submodules where the touch of a mixed state begins anew
        self.own_rows: dict[Site, int] = {}  # where queries that no input reaches are touched
        self.own_query: dict[Site, bool] = {}  # of calls of one query: whether it is touched, where its scores show it
        self.queries_held: dict[Site, set[int]] = {}  # of attention calls: touched queries, also of the result
        self.values_held: dict[Site, Tensor] = {}  # which of their values are touched, (*lead, M)
        self.narrowed: Mapping[Visit, tuple[int, ...]] = {}  # submodules whose state is touched at this number alone
        self.num_before: int | None = None  # attention calls in front of the first of these
        self.entered_at: list[list[int]] = []  # indices along the first axes at which a submodule's state was touched

    def another(
        self, way: Way, own_rows: dict[Site, int], narrowed: Mapping[Visit, tuple[int, ...]] = MappingProxyType({})
    ) -> "Touched | None":
        """Another touched pass, with these `own_rows` and `narrowed`; None if it does not show what it touches."""
        other = Touched(self.base, way, self.sequences)
        other.own_rows, other.narrowed = own_rows, narrowed
        try:
            other.passed(*self.base.arguments)
        except (Changed, ConfigError):  # it may stand at a token that cannot be told, as one on the diagonal
            return None
        return other

    def inside(self, run: Visit) -> list[ReadCall]:
        """The attention calls inside a submodule."""
        return [call for call in self.calls if run in call.runs]

    def states_into(self, run: Visit) -> list[tuple[Tensor, Tensor]]:
        """The states that a submodule reads, in this pass and in the plain one."""
        pairs = zip(self.entered.get(run, ()), self.base.entered.get(run, ()), strict=False)
        return [(new, old) for new, old in pairs if old.is_floating_point()]

    def enter(self, run: Visit, x: Tensor) -> None:
        """Where something that is no attention has carried the touch to all tokens, give the state that of the first
        pass, with a change at the one number that was touched most; also where it is to be narrowed to one number."""
        old = first_state(self.base.entered.get(run, ()))
        if run in self.narrowed and old is not None and x.shape == old.shape:
            x.data.copy_(old)
            self._touch(x.data, self.narrowed[run])
            self.num_before = self.num_attention if self.num_before is None else self.num_before
            return
        is_one_token = self.sequence[1] > 1 and 1 in x.shape[:2]
        if old is None or x.dim() != 3 or x.shape != old.shape or 0 in x.stride() or is_one_token:
            return
        self.entered_at = [touched_at(x, old, axis) for axis in (0, 1)]
        if not self._is_mixed(x, old):
            for axis, touched in enumerate(self.entered_at):  # less what a weak mean of all tokens has carried
                if is_partly(touched, x.shape[axis]):
                    others = sorted({*changed_at(x, old, axis)}.difference(touched))
                    x.data.movedim(axis, 0)[others] = old.movedim(axis, 0)[others]
            return
        if self.holds_parts_of_features(x, old):
            return
        at = most_touched(x, old)
        x.data.copy_(old)
        self._touch(x.data, at)
        self.begun_anew[run] = None

    def _is_mixed(self, new: Tensor, old: Tensor) -> bool:
        """Whether something that is no attention has mixed all tokens: of a single sequence, no axis is touched in
        part."""
        at = [(touched_at(new, old, axis), new.shape[axis]) for axis in range(new.dim())]
        return is_spread(new, old) and (self.sequence[1] > 1 or not any(is_partly(*each) for each in at))

    # --- reading -----------------------------------------------------------------------------------------------------

    def verdict(self, product: Product) -> Verdict:
        key = self.key_of(product.seen)
        old = self.base.kept.get(key) if self.way.scale else Kept(product.tensors, first_of(product.seen.result), ())
        if old is None or [x.shape for x in old.tensors] != [x.shape for x in product.tensors]:
            raise Changed(product.seen.call)
        unclear = next((tag.unclear for x in product.tensors if (tag := self.tag(x)).unclear is not None), None)
        if unclear is not None and all(map(is_spread, product.tensors, old.tensors)):
            raise unreadable(unclear)
        self._check_parts_of_a_softmax(product)
        verdict = None
        if product.by_tags.role == Role.ATTENTION:
            verdict = self._attention(product, old, key, product.by_tags.side)
        elif not product.is_kernel:  # weights on the right that no softmax made
            for side, tensor in enumerate(product.tensors[:2]):
                may_mix = self.tag(tensor).mixes or self.way.scale > 0  # which the touch shows
                if verdict is None and product.sides[side] is not None and may_mix:
                    verdict = self._attention(product, old, key, side, only_sure=True)
        if verdict is None:
            made_p = product.tensors[product.by_tags.side]
            is_softmax = product.is_kernel or self.tag(made_p).level == Level.SOFTMAX  # a router's weights, say
            is_factor = product.by_tags.role == Role.ATTENTION and is_softmax
            verdict = Verdict(Role.FACTOR) if is_factor else self._scores(product, old, key)
        self.roles[key] = verdict
        return verdict

    def _scores(self, product: Product, old: Kept, key: Site) -> Verdict:
        """Scores, if queries and keys each have an axis of tokens; or if nothing is touched, and tags say so."""
        if product.is_kernel or product.to_scores is None:
            return Verdict(Role.FACTOR)
        new, before = product.to_scores(*product.tensors), product.to_scores(*old.tensors)
        touched = [touched_at(x, y, -2) for x, y in zip(new, before, strict=True)]
        self.scores[key] = touched
        if not torch.equal(new[0], before[0]):
            self.parts[key, new[0].shape[:-1]] = touched_in_part(new[0], before[0])
        (q, k), (q0, k0) = new, before
        spread = [self._is_mixed(x, y) for x, y in zip(new, before, strict=True)]
        partly = [is_partly(at, x.shape[-2]) for at, x in zip(touched, new, strict=True)]
        slots = [is_all and not is_part for is_all, is_part in zip(spread, partly, strict=True)]  # made of all tokens
        slots[0] &= q.shape[-2] > 1  # one query is no slot, but a token that has read others, say
        if (partly[0] and slots[1]) or (slots[0] and partly[1]):  # scores, if a softmax follows
            self.slots.add(key)
            self.unclear.add(key)
            return Verdict(Role.FACTOR)
        if any(spread):
            self.unclear.add(key)
        if q.dim() == k.dim() and partly[1] and not partly[0]:
            for axis in range(q.dim() - 2):
                at, at_k = touched_at(q, q0, axis), touched_at(k, k0, axis)
                if is_partly(at, q.shape[axis]) and len(at_k) == k.shape[axis] == q.shape[axis]:
                    raise unclear_axes(product.seen.call, product.tensors)
        # one of the two may be tokens that no input reaches
        fits = [not at or is_part or x.shape[-2] == 1 for at, is_part, x in zip(touched, partly, new, strict=True)]
        return Verdict(Role.SCORES if all(fits) else Role.FACTOR)

    def _attention(self, product: Product, old: Kept, key: Site, side: int, only_sure: bool = False) -> Verdict | None:
        """Attention, if the summed axis holds tokens; None if not. only_sure: if the touch shows it."""
        seen, candidate = product.seen, self._candidate(product, old, key, side)
        p, p0, v, v0 = candidate.p, candidate.p0, candidate.v, candidate.v0
        may_pair = not candidate.has_scores and is_partly(candidate.at, v.shape[-2])
        leaky = leaky_keys(v, v0, candidate.at) if may_pair else ()
        if may_pair and (rows := paired_rows(*candidate.moving, candidate.at, leaky)):
            candidate.tag = replace(candidate.tag, mixes=True)
            self.rows[key] = rows
        elif only_sure and not candidate.tag.mixes:
            return None
        tag, changed, leads = candidate.tag, changed_numbers(v, v0), touched_leads(v, v0, p, p0)
        may_slide = not (product.is_kernel or is_partly(candidate.at, v.shape[-2]))
        in_window = touched_in_windows(changed) if may_slide else []
        at = candidate.at = in_window or candidate.at
        kind, is_sure, why = self._kind(candidate, leads)
        if why and not only_sure:
            self.factors.append(Factor(seen.call, tuple(p.shape), why))
        if why or (only_sure and not is_sure):
            return None
        self._check_heads(candidate, bool(in_window))
        queries = self._queries(candidate)
        are_learned = not candidate.has_scores and not is_partly(changed_at(p, p0, -2), p.shape[-2])  # the queries
        reading = (paired_rows(*candidate.moving, at) or None) if queries is None else queries
        row = self._row(key, reading, touched_at(p, p0, -2), p.shape[-2])
        of_blocks = self._blocks(candidate, key)
        is_own = self.own_query.get(key, False)
        if of_blocks is not None and v.dim() == p.dim() and not is_own:  # heads may choose their queries
            of_blocks = {axis: at_axis for axis, at_axis in of_blocks.items() if not are_heads(v, v0, axis)}
        self.queries_held[key], self.values_held[key] = {row, *(queries or ())}, changed.any(-1)
        is_unknown = bool(in_window) and not of_blocks  # which window is the touched token's own
        to_touch = of_one_window(leads, p, p0, self.entered_at) if is_unknown else in_blocks(leads, of_blocks or {})
        shape = *p.shape[:-1], v.shape[-1]
        put_back(first_of(seen.result), old.result, candidate.weighted.back, shape, to_touch, row, self.way.scale)
        moved = not torch.equal(p, p0)
        made_p = product.tensors[side]
        if not product.is_kernel and 0 not in made_p.stride():  # what is divided by its sums only afterwards
            made_p.data.copy_(old.tensors[side])  # not a new version: P may be a part of all heads' P
        leads = of_all_heads(leads, self.sequence) if p.shape[-2] == 1 and not is_own else leads
        lead = lead_of(changed, is_zero(v, v0, p), p, leads, at, of_blocks, self.sequence[1])
        lead = lead.without(axes_that_share(v, p), p.shape) if are_learned else self._split_alike(lead, candidate)
        inputs = self.input_of(at, p.shape[-1]), self.input_of(queries or (), p.shape[-2])
        tokens_of = self.inputs_of(at, p.shape[-1]), self.inputs_of(queries or (), p.shape[-2])
        is_told = not (in_window or is_own or candidate.has_no_queries)
        is_cross = reads_other_tokens(at, queries, p, tokens_of) if is_told else None
        logits = tag.logits
        if logits is not None:
            logits = lead.split(logits) if logits.dim() == p.dim() and (p.dim() == 4 or lead.flattened) else None
        call = ReadCall(
            key, seen.call, kind, is_sure, lead, tuple(p.shape), is_cross, *inputs,
            hidden_keys(lead.split(p0), logits, is_cross), self.depth + 1, tuple(self.stack),
            p0.sum(-1).mean().item(), tuple(at), None if queries is None else tuple(queries), self.num_attention + 1,
        )  # fmt: skip
        if self.leaves_rows(call):  # one query with keys of its own
            self.attends(product.tensors)
        self.calls.append(self._with_twin(call, p0, self._makers(product, side), moved))
        self._is_scored_by(None if tag.scores is None else tag.scores.key, call)
        if are_learned and p.shape[-2] > 1:
            self._pools(call, v0)
        return Verdict(Role.ATTENTION, side)

    def _candidate(self, product: Product, old: Kept, key: Site, side: int) -> Candidate:
        weighted = product.sides[side]
        assert weighted is not None  # nobody asks for another side
        p, p0 = (weighted.weights(*tensors) for tensors in (product.tensors, old.tensors))
        v, v0 = (weighted.values(*tensors) for tensors in (product.tensors, old.tensors))
        tag = Tag(Kind.ACTIVATION) if product.is_kernel else self.tag(product.tensors[side])
        at = touched_at(v, v0, -2) if product.is_kernel or tag.mixes else touched_keys(v, v0)
        return Candidate(product, old, key, side, weighted, tag, p, p0, v, v0, at)

    def _is_scored_by(self, key: Site | None, call: ReadCall) -> None:
        """Keep the product of queries and keys that made the weights of an attention call."""
        self.scored_by[call.number] = key
        if key is not None and key in self.slots:
            self.roles[key] = Verdict(Role.SCORES)
            self.chosen[call.call] = None  # named among what mixes tokens

    def _kind(self, candidate: Candidate, leads: Tensor) -> tuple[str, bool, str]:
        """The kind of attention, whether the touch shows it, and why it is none, if so. leads: the touched leading
        indices."""
        product, side, tag, at = candidate.product, candidate.side, candidate.tag, candidate.at
        p, p0, v, v0 = candidate.p, candidate.p0, candidate.v, candidate.v0
        is_mean = bool((p0 >= 0).all()) and bool((p0.sum(-1) < 1.01).all())
        is_written_out = not product.is_kernel and tag.form == "exp" and have_unit_sums(p0)
        is_softmax = product.is_kernel or (is_mean and (tag.level == Level.SOFTMAX or is_written_out))
        has_softmax = is_softmax or tag.level == Level.SOFTMAX or tag.form in ("softmax", "shares")
        has_scores = candidate.has_scores
        kind = "softmax" if is_softmax else "signed" if has_softmax else tag.form or "linear"
        if tag.form == "weights" and not is_mean:
            kind = "signed"
        is_sure, why = True, ""
        num_keys = 0 if tag.scores is None else (tag.scores.queries, tag.scores.keys)[1 - side].shape[-2]
        could_be = is_softmax or (has_scores and not num_keys == 1 < p.shape[-1])  # scores of one key, not of several
        in_a_loop = not has_scores and self._is_one_of_many(product, p)  # over tokens, whose streams are mixed
        if p.shape[-2] > 1 and could_be and not in_a_loop and self._is_lost(candidate):
            self._check_slots(candidate)
        if v.shape[-2] == 1 or not at:
            is_sure = False
            if not (product.is_kernel or (has_softmax and has_scores)):
                why = UNREACHED
        elif not is_partly(at, v.shape[-2]):
            others = sum(
                0 < len(touched_at(v, v0, axis)) < v.shape[axis] for axis in range(v.dim()) if axis != v.dim() - 2
            )
            is_sure = False
            if not (has_softmax and has_scores and others < 2):
                self._check_filled(candidate, is_softmax)
                why = NO_TOKENS
        elif not has_scores and p.shape[-2] > 1 and bool(((p0 != 0).sum(-2) < 2).all()):  # slots of experts
            why = "sends each of what it sums to one token alone"
        elif not (has_scores or self.tag(product.tensors[1 - side]).taken) and self._is_of_one_token(candidate, leads):
            why = "sums over something else than tokens, for each token by itself"
        elif not (has_softmax or has_scores or is_written_out):
            why = "neither a softmax nor scores made its weights"
        elif not has_softmax and touched_at(p, p0, -1) == at and self._queries(candidate) is None:
            why = "both factors are tokens, as keys and values are in k^T v"
        elif is_softmax and not has_scores and not moves_with(p, p0, leads):
            why = OF_ITSELF
        elif is_softmax and not has_scores and self._is_pooled(product, side, v.shape[-2]):
            why = "sums over what weights without scores pooled, as channels of keys or slots of experts are"
        # behind another scan tags take decays for scores
        elif kind == "decayed" or (kind == "exp" and tag.factors is not None and bool((p0 < 0).any())):
            why = "scores times exponentials, as the decays of a scan are"
        is_pool = tag.form == "softmax" and p.shape[-2] == 1  # of one learned query, whose heads were mixed
        if not (why or is_softmax or is_pool) and self._queries(candidate) is None:
            why = "no product of queries and keys made its weights"
        if not why and not is_softmax and not is_sure and self.way.scale:
            why = "neither a softmax nor the touch shows that it mixes tokens"
        return kind, is_sure, why

    def _row(self, key: Site, queries: list[int] | None, moving: list[int], size: int) -> int:
        """The query at which what attention returns is touched. Those that no input reaches are tokens of their own,
        from here on touched where no input is. queries: touched; None: not known. moving: rows of P that change."""
        if queries and is_partly(queries, size):
            return queries[0 if self.way.beside else -1]
        if key in self.own_rows:  # of the pass beside this one
            return (self.own_rows[key] + (1 if self.way.beside > 0 else -1)) % size
        if queries == []:
            marks = self.marks.values()
            row = next((row for row in range(size) if not any(mark.axes_of([row], size) for mark in marks)), 0)
        else:
            row = moving[-1] if queries is None and is_partly(moving, size) else size - 1
        self.own_rows[key] = row
        return row

    def _is_one_of_many(self, product: Product, p: Tensor) -> bool:
        """Whether the same product was made before of what no input reaches."""
        made = product.seen.call
        return any(
            why == UNREACHED and (call.module, call.function, shape) == (made.module, made.function, p.shape)
            for call, shape, why in self.factors
        )

    def _is_pooled(self, product: Product, side: int, size: int) -> bool:
        """Whether the values are what weights without scores pooled last, a row for each of their channels. They are
        tokens if their own weights are made of them, as where learned queries read what others have read."""
        p, v = self.tag(product.tensors[side]), self.tag(product.tensors[1 - side])
        passed = v.passed & ~p.passed
        calls = [call for call, _ in self.pooled if passed >> call.number & 1 and v.depth == call.depth]
        per_sequence = [math.prod(call.shape[:-1]) // max(1, self.sequence[1]) for call in calls]
        return size in [*(call.num_queries for call in calls), *per_sequence]

    def _pools(self, call: ReadCall, values: Tensor) -> None:
        """Keep a call whose weights, without scores, pool these values; ConfigError if an earlier one does."""
        for other, same in self.pooled:
            where = {(x.call.module, x.call.function, x.depth) for x in (call, other)}
            if len(where) == 1 and same.shape == values.shape and torch.equal(same, values):
                raise ConfigError(
                    f"{other.call} and {call.call}: slots of several experts, written as a loop, whose heads would "
                    "count once for each; give all slots to one call"
                )
        self.pooled.append((call, values.clone()))

    def _is_lost(self, candidate: Candidate) -> bool:
        """Whether values show the touch everywhere in the touched sequence, so that none of their axes is that of
        tokens. Where sequences and tokens are one axis, it stands at one of its indices instead."""
        v, v0, at = candidate.v, candidate.v0, candidate.at
        if v.shape[-2] == 1 or not at or is_partly(at, v.shape[-2]) or not is_spread(v, v0):
            return False
        partly = [axis for axis in range(v.dim()) if is_partly(touched_at(v, v0, axis), v.shape[axis])]
        return all(v.shape[axis] == self.sequence[1] or len(touched_at(v, v0, axis)) > 1 for axis in partly)

    def _blocks(self, candidate: Candidate, key: Site) -> dict[int, list[int]] | None:
        """The touched indices along leading axes along which queries are touched in part; None: not known."""
        tensors, side, (scores, scores0) = candidate.product.tensors, candidate.side, candidate.moving
        if candidate.queries is None:
            known = self.parts_of(tensors[side], tensors[1 - side], candidate.p.shape[:-1])
            if known is not None or candidate.p.shape[-2] > 1 or scores is candidate.p:
                return known
            if (own := own_queries(scores, scores0, candidate.v, candidate.v0)) is None:
                return None
            self.own_query[key] = bool(own.any())
            each = {axis: along(own, axis).nonzero()[:, 0].cpu().tolist() for axis in range(own.dim())}
            return {axis: at for axis, at in each.items() if is_partly(at, own.shape[axis])} or None
        q, q0 = candidate.queries
        return touched_in_part(q, q0) if q.shape[:-1] == candidate.p.shape[:-1] and not torch.equal(q, q0) else None

    def _makers(self, product: Product, side: int) -> tuple:
        """What P is made from: the same for two calls with one P."""
        tensors = product.tensors[:2] if product.is_kernel else [product.tensors[side]]
        return tuple((tag.maker or tag.kind, x.shape) for x in tensors for tag in [self.tag(x)])

    def _with_twin(self, call: ReadCall, p0: Tensor, makers: tuple, moved: bool) -> ReadCall:
        """The call, with an earlier one beside it that has the same P, if there is one. moved: whether P depends on the
        touched token; if not, two that are equal may both be positions' alone."""
        beside = self.of_depth.setdefault(call.depth, [])
        for other, other_p, other_makers in beside:
            if (
                other_p.shape == p0.shape
                and torch.equal(other_p, p0)
                and (other_makers == makers or (moved and not is_flat(p0)))
            ):
                return replace(call, twin=other.key)
            if not (call.touched and other.touched) and are_rearranged(p0, other_p):
                raise ConfigError(
                    f"{call.call} and {other.call}: multiply the same weights in two arrangements, once with values "
                    "that no input reaches, as relative positions are, and nothing shows their heads; leave them out"
                )
        beside.append((call, p0, makers))
        return call

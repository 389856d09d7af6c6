"""A touched pass that refuses what would be misread as attention: heads that nothing shows, parts of a softmax, tokens
that something else has mixed."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.tape.marks import Way
from rankbench.tape.plain import Kept, Plain
from rankbench.tape.recording import Product
from rankbench.tape.replay import Call
from rankbench.tape.rules.products import have_unit_sums
from rankbench.tape.tags import Site, Tag, Weighted
from rankbench.tape.touch import changed_numbers, is_partly, touched_at
from rankbench.tape.weighing import Weighing


class Checking(Weighing):
    """A touched pass, compared with the plain one."""

    def __init__(
        self, module: Callable, submodule: str | None, base: Plain, way: Way, sequences: Mapping[int, int]
    ) -> None:
        super().__init__(module, submodule, base, way, sequences)
        self.rows: dict[Site, list[int]] = {}  # touched queries, of weights that no product of queries and keys made
        self.scored_by: dict[int, Site | None] = {}  # of attention calls: their product of queries and keys

    def _check_heads(
        self, product: Product, old: Kept, tag: Tag, side: int, at: Sequence[int], in_window: bool
    ) -> None:
        """ConfigError for heads that are no axis of P (they share it, or stand among its queries), and for windows of
        what may be a convolution."""
        weighted = product.sides[side]
        assert weighted is not None  # nobody asks for another side
        shape, v = weighted.weights(*product.tensors).shape, weighted.values(*product.tensors)
        moving = self._rows_that_move(product, old, weighted, side, at)
        if not (at or product.is_kernel):
            _check_side(product.seen.call, weighted.weights(*old.tensors))
        if in_window and not (tag.mixes or tag.pairs):
            raise ConfigError(
                f"{product.seen.call}: weighs windows of tokens with weights that no product of queries and keys made, "
                "so that nothing shows whether it is attention or a dynamic convolution; give it weights of all tokens"
            )
        if len(shape) == v.dim() and any(one == 1 < many for one, many in zip(shape[:-2], v.shape, strict=False)):
            raise ConfigError(
                f"{product.seen.call}: one P of shape {tuple(shape)} for all values of shape {tuple(v.shape)}; write "
                "these side by side, as the values of one head"
            )
        if moving.shape[-1] > 1 and moving.flatten(0, -2).any(0).all() and self.holds_one_token(moving.any(-1)):
            raise ConfigError(
                f"{product.seen.call}: all queries of P of shape {tuple(shape)} are of one token, as where heads stand "
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

    def _check_slots(self, product: Product, old: Kept, tag: Tag, p: Tensor, side: int) -> None:
        """ConfigError for values that are touched everywhere, unless queries show the tokens, as where all tokens are
        mapped to a few slots of keys and values (Linformer)."""
        call = product.seen.call
        if not product.is_kernel and self.tag(product.tensors[1 - side]).mixes:
            raise ConfigError(
                f"{call}: multiplies attention weights by other weights of attention, so that a path would pass the "
                "heads of both in one product; multiply the values by one after the other"
            )
        if not is_partly(self._queries(product, old, tag, p, side) or (), p.shape[-2]):
            raise unreadable(call)
        self.chosen[call] = None  # named among what mixes tokens

    def _rows_that_move(self, product: Product, old: Kept, weighted: Weighted, side: int, at: Sequence[int]) -> Tensor:
        """The queries that move, (*lead, N): those whose weights change at keys that are not touched."""
        if product.is_kernel and product.to_scores is not None:
            q, q0 = (product.to_scores(*tensors)[0] for tensors in (product.tensors, old.tensors))
            return changed_numbers(q, q0).any(-1)
        p, p0 = self._weights_or_logits(product, old, weighted, side)
        return changed_numbers(p, p0)[..., [key for key in range(p.shape[-1]) if key not in at]].any(-1)

    def _weights_or_logits(self, product: Product, old: Kept, weighted: Weighted, side: int) -> tuple[Tensor, Tensor]:
        """P in the touched pass and in the plain one; if a softmax made it, its logits, which move with the touch where
        a weight stays at 0 or 1."""
        new, before = product.tensors, old.tensors
        logits, logits0 = self.tag(new[side]).logits, old.logits[side] if old.logits else None
        if logits is not None and logits0 is not None and logits.shape == logits0.shape == new[side].shape:
            new, before = ((*x[:side], y, *x[side + 1 :]) for x, y in ((new, logits), (before, logits0)))
        return weighted.weights(*new), weighted.weights(*before)

    def _queries(self, product: Product, old: Kept, tag: Tag, p: Tensor, side: int) -> list[int] | None:
        """The touched queries; None if they are not known."""
        if product.is_kernel and product.to_scores is not None:
            q, q0 = product.to_scores(*product.tensors)[0], product.to_scores(*old.tensors)[0]
            return touched_at(q, q0, -2)
        if (key := self.key_of(product.seen)) in self.rows:
            return self.rows[key]
        if (scores := tag.scores) is None or not (touched := self.scores.get(scores.key)):
            return None
        if scores[:2][side].shape[-2] != p.shape[-2]:
            return None
        if scores[:2][1 - side].shape[-2] == p.shape[-2] and touched[0] != touched[1]:  # weights may be transposed
            weighted = product.sides[side]
            assert weighted is not None  # nobody asks for another side
            found = changed_numbers(*self._weights_or_logits(product, old, weighted, side))[None].flatten(0, -3).any(0)
            return min(touched[side], touched[1 - side], key=lambda rows: _misses(found, rows, touched))
        return touched[side]


def _misses(found: Tensor, rows: list[int], touched: list[list[int]]) -> int:
    """How many numbers of P move, (N, M), that should not if these rows and the other columns are touched, or the
    reverse. touched: the indices of both factors of the scores."""
    wanted = torch.zeros_like(found)
    (columns,) = (other for other in touched if other is not rows)
    wanted[rows] = wanted[:, [column for column in columns if column < found.shape[-1]]] = True
    return int((found ^ wanted).sum())


def _check_side(call: Call, p: Tensor) -> None:
    """ConfigError for values that show no touch and that the other side of the weights multiplies."""
    if have_unit_sums(p.mT) and not have_unit_sums(p):
        raise ConfigError(
            f"{call}: multiplies attention weights from the side of their queries, and nothing shows whether that "
            "makes weights again; multiply the values by the weights first"
        )


def unreadable(call: Call) -> ConfigError:
    """The refusal of attention to states whose tokens something else has mixed."""
    return ConfigError(
        f"{call}: multiplies states in which something that is no attention (a convolution, a mean, linear attention) "
        "has mixed all tokens, so nothing shows which axis counts tokens; put this attention into a submodule of its "
        "own that reads (B, N, D), or give more tokens"
    )

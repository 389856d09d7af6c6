"""How a product of two tensors may be read: as weights times values, or as queries times keys."""

import string
from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.tape.rules.attention import Move
from rankbench.tape.rules.registry import unchanged


class Moves(NamedTuple):
    """How to bring weights to (*batch, N, M), values to (*batch, M, K), and (*batch, N, K) to the result. is_unclear:
    whether the axis of queries was chosen among several of one size. is_wide: whether K is several axes of features.
    with_all_keys: the layout in which M is all axes that are summed over, if these are several; else None."""

    to_weights: Move
    to_values: Move
    back: Move
    is_unclear: bool = False
    is_wide: bool = False
    with_all_keys: "Moves | None" = None


class Ways(NamedTuple):
    """How a product may be read: with its left factor as weights, with its right one, and as queries times keys."""

    left: Moves | None = None
    right: Moves | None = None
    scores: Moves | None = None


AS_IT_IS, TRANSPOSED = Moves(*(unchanged,) * 3), Moves(*(attrgetter("mT"),) * 3)
MATRICES = Ways(AS_IT_IS, TRANSPOSED, AS_IT_IS)


def letters_of(equation: str, *ndims: int) -> tuple[str, str, str] | None:
    """The letters of both terms and of the result, "..." written out; None if a term repeats a letter."""
    equation = equation.replace(" ", "")
    given, arrow, out = equation.partition("->")
    terms = given.split(",")
    free = [letter for letter in string.ascii_uppercase if letter not in equation]
    if not arrow:
        letters = sorted(letter for letter in set(given) - {",", "."} if given.count(letter) == 1)
        out = ("..." if "..." in given else "") + "".join(letters)
    widths = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)]
    most = max([width for width, term in zip(widths, terms, strict=True) if "..." in term], default=0)
    terms = [term.replace("...", "".join(free[most - width : most])) for term, width in zip(terms, widths, strict=True)]
    left, right = terms
    out = out.replace("...", "".join(free[:most]))
    return None if any(len(set(term)) < len(term) for term in (left, right, out)) else (left, right, out)


def ways_of(a: str, b: str, out: str, sizes: Mapping[str, int]) -> Ways:
    """How to read the product of terms with these letters. sizes: of each letter's axis."""
    scores = _layout(a, b, out, out, sizes, together=True)
    return Ways(_of_weights(a, b, out, sizes), _of_weights(b, a, out, sizes), scores)


def _of_weights(weights: str, values: str, out: str, sizes: Mapping[str, int]) -> Moves | None:
    way = _layout(weights, values, out, weights, sizes, together=False)
    if way is None or sum(x in values and x not in out for x in weights) == 1:
        return way
    return way._replace(with_all_keys=_layout(weights, values, out, weights, sizes, together=True))


def _layout(weights: str, values: str, out: str, order: str, sizes: Mapping[str, int], together: bool) -> Moves | None:
    """The layout of a product of weights and values; None if the letters do not fit.

    order: the term whose order of letters the batch has. Weights may have several letters that the values lack: that of
    the queries, and groups of heads that share their values; none if they are those of one query, as in a pooled
    sequence. Of several letters that are summed over, the last in the weights is that of the keys, others are of heads;
    together: all are of keys, or in scores of features. Several letters of features are as one.
    """
    batch = [x for x in order if x in weights and x in values and x in out]
    summed = [x for x in weights if x in values and x not in out]
    queries = [x for x in weights if x not in values and x in out]
    features = [x for x in values if x not in weights and x in out]
    parts = (batch + summed + queries, batch + summed + features, batch + queries + features)
    is_scores = order == out
    fits = [*map(len, parts)] == [*map(len, (weights, values, out))] and summed and features
    if not fits or (is_scores and not queries):
        return None
    heads, keys = ([], summed) if together else (summed[:-1], summed[-1:])
    tokens = features if is_scores else keys  # of the scores, the axis of keys is their last
    alike = [x for x in queries if len(tokens) == 1 and sizes[x] == sizes[tokens[0]]]
    grid = queries[-len(tokens) :] if len(tokens) > 1 else []  # queries along as many axes as keys
    if [sizes[x] for x in grid] != [sizes[x] for x in tokens]:
        grid = []
    query = grid or (alike if len(alike) == 1 else queries[-1:])
    groups = [x for x in queries if x not in query]
    to_weights = _merged(_permuted(weights, [*batch, *heads, *groups, *query, *keys]), -len(keys), -1)
    to_weights = _merged(to_weights, -1 - len(grid), -2) if grid else to_weights
    to_values = _permuted(values, [*batch, *heads, *keys, *features])
    to_values = _merged(_merged(to_values, -len(features), -1), -1 - len(keys), -2)
    back = _permuted([*batch, *groups, *query, *features], out)
    lengths = [sizes[x] for x in features]
    shape = [*(sizes[x] for x in (*batch, *heads, *groups)), prod(sizes[x] for x in keys), prod(lengths)]
    of_heads = tuple(range(len(batch), len(batch) + len(heads)))

    def shared(x: Tensor) -> Tensor:
        return to_values(x)[(..., *[None] * len(groups), slice(None), slice(None))].expand(shape)

    def summed_up(x: Tensor) -> Tensor:
        x = x if query else x[..., 0, :]
        x = (x.sum(of_heads) if heads else x).unflatten(-1, lengths)
        return back(x.unflatten(-1 - len(features), [sizes[y] for y in grid]) if grid else x)

    return Moves(
        to_weights if query else lambda x: to_weights(x)[..., None, :],
        shared if groups else to_values,
        summed_up,
        len(alike) > 1,
        len(features) > 1,
    )


def _merged(move: Move, first: int, last: int) -> Move:
    """The move, after which these axes become one."""
    return move if first == last else lambda x: move(x).flatten(first, last)


def _permuted(given: Sequence[str], wanted: Sequence[str]) -> Callable[[Tensor], Tensor]:
    order = [given.index(letter) for letter in wanted]
    return lambda x: x.permute(order)


def of_vector(a: Tensor, b: Tensor) -> Ways:
    """How to read the product of a vector and a matrix, either way round."""
    if a.ndim + b.ndim != 3:
        return Ways()
    terms = ("m", "mk") if a.ndim == 1 else ("km", "m")
    return ways_of(*terms, "k", dict(zip("".join(terms), (*a.shape, *b.shape), strict=True)))


def after(way: Moves | None, of_weights: Move, of_values: Move, shape: torch.Size) -> Moves | None:
    """The layout, after a move of each factor, and with the result in this shape."""
    if way is None:
        return None
    return way._replace(
        to_weights=lambda x: way.to_weights(of_weights(x)),
        to_values=lambda x: way.to_values(of_values(x)),
        back=lambda x: way.back(x).reshape(shape),
        with_all_keys=after(way.with_all_keys, of_weights, of_values, shape),
    )

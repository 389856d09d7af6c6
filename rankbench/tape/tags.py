"""What is known about the tensors of a recorded pass.

A tensor is a constant; or an activation with a node, which is linear in earlier nodes; or an activation known only by
its value, because a call that is not covered made it. Such a value may be a frozen factor of another activation, and
may be attention weights. It may not be added, because its effect on single paths is not known.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankbench.tape.calls import ELEMENTWISE, JOINS
from rankbench.tape.replay import Call, Node
from rankbench.tape.steps import Affine


class Kind(IntEnum):
    """What a tensor comes from."""

    WEIGHT, CONSTANT, ACTIVATION = range(3)


class Level(IntEnum):
    """How an activation was made: by linear maps; by a product with a frozen factor; by a covered elementwise function;
    by a product of two activations that sums over an axis, as scores are; by a function that is not covered; by a
    softmax."""

    LINEAR, SCALED, GATED, PRODUCT, OTHER, SOFTMAX = range(6)


class Role(IntEnum):
    """What a product of two activations is: P v; a product of queries and keys; or one of which one side is frozen."""

    ATTENTION, SCORES, FACTOR = range(3)


class Verdict(NamedTuple):
    """The role of a product, and the side that is P or frozen: 0 the left, 1 the right."""

    role: Role
    side: int = 0


class Visit(NamedTuple):
    """One run of a submodule in a forward pass; `time` numbers its runs from 0."""

    name: str
    time: int


class Site(NamedTuple):
    """A product of two activations, found again in every pass: `time` counts the function's products in the module."""

    module: str
    function: str
    time: int


@dataclass(frozen=True)
class Origin:
    """How a tensor came from x W^T + constant, which has this shape: `chain` moves its numbers into the tensor.

    read, affine: x and the map; None if the map is not known. constant: None if there is none.
    """

    shape: torch.Size
    chain: Callable[[Tensor], Tensor]
    constant: Callable[[], Tensor] | None
    read: Node | None = None
    affine: Affine | None = None

    def moved(self, function: Callable[[Tensor], Tensor]) -> "Origin":
        """The origin after another call that only moves numbers."""
        chain = self.chain
        return replace(self, chain=lambda x: function(chain(x)))

    def bias(self) -> Tensor:
        """The part of the tensor that comes from the constant."""
        assert self.constant is not None  # nobody asks otherwise
        return self.chain(self.constant().expand(self.shape))


@dataclass
class Tag:
    """What is known about a tensor.

    opaque: the first call on the way to it whose result is known only by its value. mixes: whether it contains a
    product of activations that sums over an axis, as scores do. maker: the call that made the tensor. scores: the
    product of queries and keys from which it came. logits: the softmax's input, masks included. form: the last
    function, softmax or elementwise, that made weights of scores; shares: exponentials over exponentials; decayed:
    scores times exponentials of something else. factors: the two activations whose elementwise product it is.
    unshifted: what it was before the largest of each row was taken off. pairs: whether it has numbers of pairs of
    tokens: sums of such products, as scores of a query with the keys of its window are, or sums or distances of every
    two. depth: the largest number of attention calls in a row on the way to it. passed: the attention calls on the way
    to it, a bit for each. unclear: the product of two activations from which it came, if nothing showed whether that
    makes scores. counted: of whole numbers and truth values, what they would be as numbers of the activations that they
    were made of. taken: the calls that took tokens by comparing them with others, and that no attention has read since.
    state: shape of the state whose numbers these are, all features of a token along its last axis: of queries, before
    they were split into heads; None if not known. stem: the same for elementwise functions of one tensor.
    """

    kind: Kind
    level: Level = Level.LINEAR
    node: Node | None = None
    opaque: Call | None = None
    mixes: bool = False
    origin: Origin | None = None
    maker: Call | None = None
    scores: "Scores | None" = None
    logits: Tensor | None = None
    form: str = ""
    factors: tuple[Tensor, Tensor] | None = None
    unshifted: Tensor | None = None
    pairs: bool = False
    depth: int = 0
    passed: int = 0
    unclear: Call | None = None
    counted: "Tag | None" = None
    taken: frozenset[Call] = frozenset()
    state: torch.Size | None = None
    stem: object = field(default_factory=object)
    version: int = 0

    @property
    def has_paths(self) -> bool:
        """Whether paths can lead to the tensor."""
        return self.node is not None or self.opaque is not None

    @property
    def compares(self) -> bool:
        """Whether it is made of numbers of several tokens: of scores, say, or distances."""
        return self.mixes or self.pairs


Made = Tag | Sequence[Tag]  # by a call


class Tags:
    """The tag of each tensor, for as long as the tensor lives. A look-up takes a twentieth of the time of torch's
    WeakTensorKeyDictionary, and a recorded pass makes a thousand."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Tensor], Tag]] = {}

    def get(self, x: Tensor) -> Tag | None:
        """The tensor's tag; None if it has none."""
        held = self._held.get(id(x))
        return held[1] if held is not None and held[0]() is x else None

    def __setitem__(self, x: Tensor, tag: Tag) -> None:
        number = id(x)
        self._held[number] = weakref.ref(x, lambda _: self._held.pop(number, None)), tag


class Scores(NamedTuple):
    """A product of queries and keys, (*batch, N or M, K)."""

    queries: Tensor
    keys: Tensor
    key: Site | None


class Weighted(NamedTuple):
    """A product read as P v: how its tensors make P (*batch, N, M) and v (*batch, M, K), and how (*batch, N, K) becomes
    the result."""

    weights: Callable[..., Tensor]
    values: Callable[..., Tensor]
    back: Callable[[Tensor], Tensor]


def combined(tags: Sequence[Tag]) -> Tag:
    """Kind, level and scores of a tensor made of these; the level is of those with paths, if there are any."""
    kind = max((tag.kind for tag in tags), default=Kind.CONSTANT)
    with_paths = [tag for tag in tags if tag.has_paths]
    levels = [tag.level for tag in with_paths or tags if tag.kind == Kind.ACTIVATION]
    scores = next((tag.scores for tag in tags if tag.scores is not None), None)
    logits = next((tag.logits for tag in tags if tag.logits is not None), None)
    form = next((tag.form for tag in tags if tag.form), "")
    unclear = next((tag.unclear for tag in tags if tag.unclear is not None), None)
    level, pairs = max(levels, default=Level.LINEAR), any(tag.pairs for tag in tags)
    taken = frozenset().union(*(tag.taken for tag in tags))
    return Tag(kind, level, scores=scores, logits=logits, form=form, pairs=pairs, unclear=unclear, taken=taken)


def value_only(call: Call, tags: Sequence[Tag], level: Level = Level.OTHER) -> Tag:
    """The tag of a result that is known only by its value."""
    first = call if any(tag.node is not None for tag in tags) else None
    opaque = next((tag.opaque for tag in tags if tag.opaque is not None), first)
    made = combined(tags)
    made.level, made.opaque, made.mixes = max(level, made.level), opaque, any(tag.mixes for tag in tags)
    return made


def as_numbers(call: Call, given: list[Tensor], tags: list[Tag], new: Made, output: Any) -> Made:
    """What is made of whole numbers or truth values that activations made: no constant, if it is of floats, but for
    weights that one number chose, as those of an expert, and zeros, as where experts have not yet written."""
    chosen_by = [(x, tag.counted) for x, tag in zip(given, tags, strict=True) if tag.counted is not None]
    is_constant = isinstance(new, Tag) and new.kind != Kind.ACTIVATION and isinstance(output, Tensor)
    if not (chosen_by and is_constant and output.is_floating_point() and output.any()):
        return new
    is_of_expert = tags[0].kind == Kind.WEIGHT and all(x.numel() == 1 for x, _ in chosen_by)
    return new if is_of_expert else value_only(call, [tag for _, tag in chosen_by])


def activations(tags: Sequence[Tag]) -> list[Tag]:
    """The activations among these, and those that whole numbers and truth values were made of."""
    return [made for tag in tags if (made := tag.counted or tag).kind == Kind.ACTIVATION]


def as_function(name: str, tags: Sequence[Tag], new: Made) -> tuple[Made, object]:
    """What a function of this name makes, and its stem. Of one tensor alone it is an activation function, as
    x * sigmoid(x) is silu(x), and x + |x| twice relu(x). No stem: it reads several tensors, or is not elementwise."""
    made = activations(tags)
    stems = {tag.stem for tag in made}
    if len(stems) != 1 or name not in ELEMENTWISE:
        return new, None
    if isinstance(new, Tag) and len(made) > 1:
        least = [Level.GATED] if name in JOINS else [tag.level for tag in made]
        new = replace(new, level=max(new.level, *least))
    return new, stems.pop()


class AttentionCall(NamedTuple):
    """One attention call: its weights P (*batch, N, M); its values, queries and keys, (*batch, N or M, K).

    batch is (B, H), or the axes that the module has instead. Groups of query heads may share heads of keys and values.
    queries and keys are None if the module does not multiply them by matmul, bmm or einsum. logits(): the softmax's
    input, scaled and masked, in the shape of P; None if no softmax made P. depth: 1 if no other attention call leads to
    this one, else one more than the deepest that does; heads side by side have the same depth.
    """

    index: int  # type: ignore[assignment]  # from 1; hides the method of tuples
    call: Call
    weights: Tensor
    values: Tensor
    queries: Tensor | None
    keys: Tensor | None
    logits: Callable[[], Tensor] | None
    depth: int
    key: Site

"""Recording: one ordinary forward pass of any torch module, watched call by call.

Every tensor of the pass has a tag that says what is known about it. The tensor is a constant; or an activation with a
node, which is linear in earlier nodes; or an activation known only by its value, because a call that is not covered
made it. Such a value may be a frozen factor of another activation, and may be attention weights. It may not be added,
because its effect on single paths is not known.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from rankbench.config.keys import ConfigError
from rankbench.tape.replay import Affine, Call, Node, Source, Step, version


class Kind(IntEnum):
    """What a tensor comes from."""

    WEIGHT, CONSTANT, ACTIVATION = range(3)


class Level(IntEnum):
    """How an activation was made: by linear maps; by a covered elementwise function or product; by a product of two
    activations that sums over an axis, as scores are; by a function that is not covered; by a softmax."""

    LINEAR, GATED, PRODUCT, OTHER, SOFTMAX = range(5)


class Role(IntEnum):
    """What a product of two activations is: P v; a product of queries and keys; or one of which one side is frozen."""

    ATTENTION, SCORES, FACTOR = range(3)


class Verdict(NamedTuple):
    """The role of a product, and the side that is P or frozen: 0 the left, 1 the right."""

    role: Role
    side: int = 0


class Run(NamedTuple):
    """One run of a submodule in a forward pass; `time` numbers its runs from 0."""

    name: str
    time: int


class Key(NamedTuple):
    """A product of two activations, found again in every pass: `time` counts the function's products in the module."""

    module: str
    function: str
    time: int


Parents = tuple[Node | Tensor, ...]  # of a node
Reads = Sequence[Tensor | None]

OUTSIDE = "a tensor that no recorded call made (TorchScript, numpy, or held outside of the module: make it a buffer)"
# Calls that take numbers out of torch, or put them where the tape cannot follow them.
EXITS = {"numpy", "tolist", "item", "__float__", "__int__", "__array__", "__set__"}
# Calls that copy whole numbers, or some of them.
COPIES = {"contiguous", "clone", "to", "long", "int", "reshape", "flatten", "index_select", "getitem", "type", "detach"}
DEPENDS = "so its calls depend on the numbers of its inputs; give other inputs, or fewer at a time"
# Calls that describe a tensor, without reading or making numbers.
DESCRIBES = {"shape", "dtype", "device", "ndim", "size", "dim", "stride", "numel", "is_contiguous", "is_nested"}


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
    function, softmax or elementwise, that made weights of scores. factors: the two activations whose elementwise
    product it is. unshifted: what it was before the largest of each row was taken off. depth: the largest number of
    attention calls in a row on the way to it. passed: the attention calls on the way to it, a bit for each.
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
    depth: int = 0
    passed: int = 0
    version: int = 0

    @property
    def has_paths(self) -> bool:
        """Whether paths can lead to the tensor."""
        return self.node is not None or self.opaque is not None


@dataclass
class Seen:
    """A call with its arguments and its result.

    function: the called function; if that changes its first argument, its twin that makes a new tensor.
    """

    recorder: "Recorder"
    call: Call
    name: str
    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    result: Any

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at this position or of this name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def tag(self, x: Any) -> Tag:
        """`Recorder.tag`."""
        return self.recorder.tag(x)

    def value_only(self, tags: Sequence[Tag], level: Level = Level.OTHER) -> Tag:
        """`Recorder.value_only` of the call."""
        return self.recorder.value_only(self.call, tags, level)

    def node(self, parents: Parents, step: Step, frozen: str | None = None, reads: Reads = (), shape=None) -> Node:
        """`Recorder.node` of the call, with the shape of its result unless another is given."""
        shape = self.result.shape if shape is None else shape
        return self.recorder.node(self.call, parents, step, shape, frozen, reads)


class Scores(NamedTuple):
    """A product of queries and keys, (*batch, N or M, K)."""

    queries: Tensor
    keys: Tensor
    key: Key | None


class Weighted(NamedTuple):
    """A product read as P v: how its tensors make P (*batch, N, M) and v (*batch, M, K), and how (*batch, N, K) becomes
    the result."""

    weights: Callable[..., Tensor]
    values: Callable[..., Tensor]
    back: Callable[[Tensor], Tensor]


@dataclass
class Product:
    """A call that multiplies activations and sums over an axis, and how it may be read.

    tensors: what it multiplies. sides: as P v, with P on the left and on the right. weights: the tensor that is P on
    each side. is_kernel: one of torch's attention functions, whose tensors begin with queries, keys and values.
    to_scores: the tensors as queries and keys. by_tags: what the tags say.
    """

    seen: Seen
    tensors: tuple[Tensor, ...]
    sides: tuple[Weighted | None, ...]
    by_tags: Verdict
    to_scores: Callable[..., tuple[Tensor, Tensor]] | None = None
    is_kernel: bool = False


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
    key: Key


class Recorder(TorchFunctionMode):
    """Tags every tensor of a forward pass, and makes the tape's nodes.

    rules: the rule of each function, by name. begin: name of the submodule at whose result paths begin, or "inputs",
    which are tensors of floats and embeddings of tokens; None: everything that has passed no attention call is slot 0.
    watch: called with each attention call. wanted: indices of the nodes whose values to keep, for a second pass; None
    keeps all. With watch or wanted there is no tape. verdicts: the role of each product of two activations, from an
    earlier reading of the module; None: what the tags say.
    """

    def __init__(
        self,
        module: Callable,
        rules: dict[str, Callable],
        begin: str | None = None,
        watch: Callable[[AttentionCall], None] | None = None,
        wanted: AbstractSet[int] | None = frozenset(),
        verdicts: Mapping[Key, Verdict] | None = None,
    ) -> None:
        super().__init__()
        self.module, self.rules, self.begin, self.watch, self.wanted = module, rules, begin, watch, wanted
        self.verdicts = verdicts
        self.keeps_tape = watch is None and wanted == frozenset()
        self.tags = WeakTensorKeyDictionary()
        self._parts = WeakTensorKeyDictionary()  # parts that share memory with a whole: the whole, and the index
        self.num_calls = self.num_nodes = self.num_attention = 0
        self.depth = 0  # of the call that is being recorded
        self.has_paths = False  # whether any tensor so far has paths
        self.attention: list[Node] = []  # the result of each attention call
        self.mixed: dict[Node, Key] = {}  # the calls of the nodes that pass heads
        self.results: dict[str, list[tuple[Tag, Tensor | None]]] = {}  # by submodule, one for each time it ran
        self.values: dict[int, Tensor] = {}
        self.epsilon = 0.0  # the coarsest rounding in the pass
        self.running: list[Run] = []  # the submodules around the call that is being recorded
        self._times: Counter[str] = Counter()
        self._products: Counter[tuple[str, str]] = Counter()
        self._key: tuple[int, Key] | None = None  # of the product that is being recorded, with the number of its call
        self.uncovered: list[Call] = []  # calls of torch's attention functions that no rule covers
        self.call = Call(0, "", "")  # that is being recorded
        self.begun: set[int] = set()  # where the inputs lie in memory at which paths begin
        # by place in memory: inputs of whole numbers, and copies of them, with the place of the input
        self._tokens: dict[int, tuple[Tensor, int]] = {}

    # --- the pass ----------------------------------------------------------------------------------------------------

    def run(self, args: tuple, kwargs: dict) -> Any:
        """The module's own result. It runs on copies of its arguments, because it may change them in place."""
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = self.prepared(*tree_map_only(Tensor, Tensor.clone, (args, kwargs)))
            self._tag_inputs(args, kwargs)
            with self._named_modules(), without_fast_path(), self:
                output = self.module(*args, **kwargs)
        verdicts = self.verdicts or {}
        for key, verdict in verdicts.items():
            place = key.module, key.function
            if verdict.role == Role.ATTENTION and key.time >= (now := self._products[place]):
                read = sum((other.module, other.function) == place for other in verdicts)
                raise ConfigError(
                    f"{key.module or 'the module'}: {key.function} multiplied {read} times when the network was read, "
                    f"and {now} times now, {DEPENDS}"
                )
        return output

    def prepared(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with which the module runs."""
        return args, kwargs

    def _tag_inputs(self, args: tuple, kwargs: dict) -> None:
        for submodule in self.module.modules() if isinstance(self.module, nn.Module) else ():
            if isinstance(submodule, torch.jit.ScriptModule):
                name = type(submodule).__name__
                raise ConfigError(f"{name}: TorchScript runs unseen by the tape; give the module as Python code")
            # also tensors that a module holds without registering them
            for tensor in tensors_in(vars(submodule)):
                self.set_tag(tensor, Tag(Kind.WEIGHT))
        for tensor in tensors_in([args, kwargs]):
            self.set_tag(tensor, Tag(Kind.ACTIVATION if tensor.is_floating_point() else Kind.CONSTANT))
            if tensor.is_floating_point():
                if self.begin == "inputs":
                    self._begin(tensor)
                    self.begun.add(tensor.untyped_storage().data_ptr())
            elif tensor.numel():
                place = tensor.untyped_storage().data_ptr()
                self._tokens[place] = tensor, place

    def reads_tokens(self, x: Any) -> bool:
        """Whether a tensor is one of the inputs that are whole numbers, or a copy of it, or shares its memory."""
        return isinstance(x, Tensor) and x.numel() > 0 and x.untyped_storage().data_ptr() in self._tokens

    def origin_of(self, x: Tensor) -> int:
        """Place in memory of the input that a tensor of `reads_tokens` is, or is a copy of."""
        return self._tokens[x.untyped_storage().data_ptr()][1]

    def _follow_tokens(self, name: str, given: list[Tensor], result: Any) -> None:
        """Remember a copy of an input of whole numbers."""
        read = [x for x in given if not x.is_floating_point() and self.reads_tokens(x)] if name in COPIES else []
        if len(read) == 1 and isinstance(result, Tensor) and not result.is_floating_point():
            self._tokens.setdefault(result.untyped_storage().data_ptr(), (result, self.origin_of(read[0])))

    @contextmanager
    def _named_modules(self) -> Iterator[None]:
        names = {}
        if isinstance(self.module, nn.Module):
            names = {id(module): name for name, module in self.module.named_modules()}
        if self.begin not in (None, "inputs", *names.values()):
            raise ConfigError(f"begin={self.begin}: no such submodule; allowed: inputs, {', '.join(names.values())}")

        def enter(module: nn.Module, _) -> None:
            name = names.get(id(module), type(module).__name__)
            self.running.append(Run(name, self._times[name]))
            self._times[name] += 1

        def leave(module: nn.Module, _, result: Any) -> None:
            name = self.running.pop().name
            tensor = next((x for x in tensors_in(result) if x.is_floating_point()), None)
            if tensor is not None and self.begin is not None and name == self.begin:
                self._begin(tensor)
            if tensor is not None and self.keeps_tape:
                tag = self.tag(tensor)
                self.results.setdefault(name, []).append((tag, None if tag.has_paths else tensor))

        with ExitStack() as hooks:
            hooks.callback(torch_module.register_module_forward_pre_hook(enter).remove)
            hooks.callback(torch_module.register_module_forward_hook(leave).remove)
            yield

    def _begin(self, tensor: Tensor) -> None:
        call = Call(self.num_calls, "the beginning of the paths", self.begin or "")
        # a copy, because the module may change the tensor in place
        self.set_tag(tensor, Tag(Kind.ACTIVATION, node=self.node(call, (), Source(tensor.clone()), tensor.shape)))
        self.has_paths = True

    @property
    def where(self) -> str:
        """Name of the submodule that is running; empty for the recorded module itself."""
        return self.running[-1].name if self.running else ""

    # --- products of activations -------------------------------------------------------------------------------------

    def key_of(self, seen: Seen) -> Key:
        """The key of the product that is being recorded."""
        if self._key is None or self._key[0] != seen.call.index:
            function = seen.call.function
            self._key = seen.call.index, Key(seen.call.module, function, self._products[seen.call.module, function])
            self._products[seen.call.module, function] += 1
        return self._key[1]

    def verdict(self, product: Product) -> Verdict:
        """The role of a product of two activations; ConfigError if it was not made when the module was read."""
        key = self.key_of(product.seen)
        if self.verdicts is None:
            return product.by_tags
        if key not in self.verdicts:
            raise ConfigError(f"{product.seen.call}: was not made when the network was read, {DEPENDS}")
        return self.verdicts[key]

    def embedded(self, seen: Seen) -> Tag:
        """The tag of rows that an embedding looked up; with begin="inputs", paths begin at those of the inputs."""
        tokens = [x for x in tensors_in([seen.args, seen.kwargs]) if not x.is_floating_point() and self.reads_tokens(x)]
        if self.begin != "inputs" or not tokens:
            return Tag(Kind.ACTIVATION)
        self.has_paths = True
        self.begun |= set(map(self.origin_of, tokens))
        return Tag(Kind.ACTIVATION, node=seen.node((), Source(seen.result.clone())))

    def attended(self, mixed: Node, result: Node, seen: Seen) -> None:
        """Keep the node that passes the heads of an attention call, and that of its result."""
        self.mixed[mixed] = self.key_of(seen)
        self.attention.append(result)

    # --- tags and nodes ----------------------------------------------------------------------------------------------

    def set_tag(self, tensor: Tensor, tag: Tag) -> None:
        """Record what is known about a tensor in its present version."""
        tag.version = version(tensor)
        self.tags[tensor] = tag

    def tag(self, x: Any) -> Tag:
        """What is known about a tensor; a number counts as a weight."""
        if not isinstance(x, Tensor):
            return Tag(Kind.WEIGHT)
        tag = self.tags.get(x)
        if tag is None:
            tag = Tag(Kind.WEIGHT if isinstance(x, nn.Parameter) else Kind.CONSTANT)
            if self.has_paths and tag.kind == Kind.CONSTANT and x.is_floating_point():
                call = Call(self.num_calls, OUTSIDE, self.where)
                tag = Tag(Kind.ACTIVATION, Level.OTHER, opaque=call, maker=call)
            self.set_tag(x, tag)
        return tag

    def node(
        self, call: Call, parents: Parents, step: Step, shape: torch.Size, frozen: str | None = None, reads: Reads = ()
    ) -> Node:
        """A new node. frozen: name of what the step freezes. reads: the tensors that hold it."""
        self.num_nodes += 1
        if not self.keeps_tape:  # its number alone, so that it keeps no tensor alive
            return Node(self.num_nodes, call, (), Source(torch.empty(0)), shape)
        held = [(x, version(x)) for x in (*parents, *reads) if isinstance(x, Tensor)]
        return Node(self.num_nodes, call, parents, step, shape, frozen, held)

    def parent(self, x: Any, like: Tensor) -> Node | Tensor:
        """The parent of a node for this argument: its own node, or a constant tensor."""
        if not isinstance(x, Tensor):
            return torch.as_tensor(x, dtype=like.dtype, device=like.device)
        return self.tag(x).node or x

    def value_only(self, call: Call, tags: Sequence[Tag], level: Level = Level.OTHER) -> Tag:
        """The tag of a result that is known only by its value."""
        opaque = next((tag.opaque for tag in tags if tag.opaque is not None), None)
        if opaque is None and any(tag.node is not None for tag in tags):
            opaque = call
        tag = self.combined(tags)
        return replace(tag, level=max(level, tag.level), opaque=opaque, mixes=any(tag.mixes for tag in tags))

    @staticmethod
    def combined(tags: Sequence[Tag]) -> Tag:
        """Kind, level and scores of a tensor made of these; the level is of those with paths, if there are any."""
        kind = max((tag.kind for tag in tags), default=Kind.CONSTANT)
        with_paths = [tag for tag in tags if tag.has_paths]
        levels = [tag.level for tag in with_paths or tags if tag.kind == Kind.ACTIVATION]
        scores = next((tag.scores for tag in tags if tag.scores is not None), None)
        logits = next((tag.logits for tag in tags if tag.logits is not None), None)
        form = next((tag.form for tag in tags if tag.form), "")
        return Tag(kind, max(levels, default=Level.LINEAR), scores=scores, logits=logits, form=form)

    # --- every call --------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, changes, full_name = _name(func)
        if name in DESCRIBES:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if not args and "condition" not in kwargs:
            args = tuple(kwargs.pop(key) for key in ("input", "tensors") if key in kwargs)
        if len(args) == 1 and "other" in kwargs:
            args = (*args, kwargs.pop("other"))
        given = tensors_in(args) + tensors_in(kwargs)
        in_place = changes or bool(kwargs.get("inplace"))
        self.num_calls += 1
        call = self.call = Call(self.num_calls, full_name, self.where)
        self._check_views(call, given)
        tags = [self.tag(x) for x in given]
        read = args
        if in_place and any(tag.kind == Kind.ACTIVATION for tag in tags):
            old = args[0].clone()  # for the tape: the call overwrites it
            self.set_tag(old, replace(self.tag(args[0])))
            read = (old, *args[1:])
        result = func(*args, **kwargs)
        output = args[0] if in_place else result
        self._follow_tokens(name, given, output)
        if not tensors_in(output):
            if name in EXITS and any(tag.has_paths for tag in tags):
                raise ConfigError(f"{call}: passes an activation on where no tape can follow; use torch functions")
            return result
        self.depth, num_before = max((tag.depth for tag in tags), default=0), self.num_attention
        rule, new = self.rules.get(name), None
        if rule is not None and kwargs.get("out") is None:
            seen = Seen(self, call, name, _out_of_place(func, name, in_place), read, kwargs, output)
            seen.kwargs.pop("inplace", None)
            new = rule(seen)
        if new is None:
            new = self.value_only(call, tags)
            if name == "multi_head_attention_forward":
                self.uncovered.append(call)
        is_attention = self.num_attention > num_before
        passed = 1 << self.num_attention if is_attention else 0
        for tag in tags:
            passed |= tag.passed
        self._tag_results(call, output, new, self.depth + is_attention, passed)
        if name == "getitem" and isinstance(result, Tensor) and _share_memory(result, args[0]):
            self._parts[result] = args[0], args[1]
        elif in_place:
            self._change_whole(call, args[0])
        return result

    def _change_whole(self, call: Call, x: Tensor) -> None:
        """If x, which was changed in place, is x = whole[index]: tag the whole as if x had been put there."""
        while x in self._parts:
            part, (x, index) = x, self._parts[x]
            old = x.clone()  # what is now in the part's place does not matter
            self.set_tag(old, replace(self.tag(x)))
            seen = Seen(self, call, "setitem", _set_item, (old, index, part), {}, x)
            new = self.rules["setitem"](seen) or self.value_only(call, [self.tag(old), self.tag(part)])
            self._tag_results(call, x, new, self.tag(part).depth, self.tag(old).passed | self.tag(part).passed)

    def _tag_results(self, call: Call, output: Any, new: Tag | Sequence[Tag], depth: int, passed: int) -> None:
        tensors = [output] if isinstance(output, Tensor) else list(output)
        new = [replace(new) for _ in tensors] if isinstance(new, Tag) else new
        for tensor, tag in zip(tensors, new, strict=True):
            if not isinstance(tensor, Tensor):
                continue
            if not (tensor.is_floating_point() or tensor.is_complex()):
                tag = Tag(Kind.CONSTANT)
            tag.maker, tag.depth, tag.passed = call, depth, passed
            if tag.has_paths:
                self.has_paths = True
                self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)
            self.set_tag(tensor, tag)
            if tag.node is not None and (self.wanted is None or tag.node.index in self.wanted):
                self.values.setdefault(tag.node.index, tensor.clone())

    def _check_views(self, call: Call, given: list[Tensor]) -> None:
        """ConfigError if an argument was changed in place through another tensor that shares its memory."""
        for x in given:
            tag = self.tags.get(x)
            if tag is None or tag.version == version(x) or not (self.has_paths or tag.kind == Kind.ACTIVATION):
                continue
            raise ConfigError(
                f"{call}: reads a tensor that was changed in place through a view of it; "
                "change the module to make a new tensor there"
            )


@contextmanager
def without_fast_path() -> Iterator[None]:
    """torch's encoder layers run their Python code inside, not a kernel that skips hooks and packs padded sequences."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def tensors_in(x: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and slices."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    elif isinstance(x, slice):
        x = (x.start, x.stop, x.step)
    if isinstance(x, (tuple, list)):
        return [tensor for part in x if part is not None for tensor in tensors_in(part)]
    return []


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


ALIASES = {
    **dict.fromkeys(("__add__", "__radd__", "__iadd__"), "add"),
    **dict.fromkeys(("__sub__", "__isub__", "subtract"), "sub"),
    **dict.fromkeys(("__mul__", "__rmul__", "__imul__", "multiply"), "mul"),
    **dict.fromkeys(("__truediv__", "__itruediv__", "divide", "true_divide"), "div"),
    **dict.fromkeys(("__matmul__", "bmm", "mm", "mv"), "matmul"),
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    **{"__rsub__": "rsub", "__rmatmul__": "rmatmul", "__neg__": "neg", "negative": "neg", "__pow__": "pow"},
    **{"__getitem__": "getitem", "__setitem__": "setitem", "clip": "clamp"},
}
CHANGES_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}


@cache
def _name(func: Any) -> tuple[str, bool, str]:
    """The function's name shared by all its forms, whether it changes its first argument, and its full name."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property, as x.T
        name = getattr(func.__self__, "__name__", name)
    in_place, full_name = name in CHANGES_IN_PLACE, resolve_name(func) or name
    if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
        name, in_place = name.removesuffix("_"), True
    return ALIASES.get(name, name), in_place, full_name


def _set_item(x: Tensor, index: Any, value: Tensor | float) -> Tensor:
    changed = x.clone()
    changed[index] = value
    return changed


def _out_of_place(func: Callable, name: str, in_place: bool) -> Any:
    """The function, or its twin that makes a new tensor."""
    if not in_place or not func.__name__.endswith("_"):
        return func
    if name == "setitem":
        return _set_item
    if name == "copy":
        return lambda x, source, *_: source.expand_as(x).to(x.dtype)
    return getattr(torch.Tensor, name, None) or getattr(torch, name, None) or getattr(nn.functional, name, func)

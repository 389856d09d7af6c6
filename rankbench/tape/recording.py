"""Recording: one ordinary forward pass of any torch module, watched call by call.

Every tensor of the pass has a tag that says what is known about it (tags); the rules of torch's functions make the tags
and the tape's nodes.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import (
    DESCRIBES,
    EXITS,
    as_python,
    einsum_in_pairs,
    in_order,
    is_over_indices,
    name_of,
    out_of_place,
    refuse_unreadable,
    refuse_unseen,
    set_item,
    share_memory,
    tensors_in,
)
from rankbench.tape.following import OF_INPUT, TokenInputs, first_state, state_of
from rankbench.tape.replay import Call, Node, Step, version
from rankbench.tape.steps import Source
from rankbench.tape.tags import (
    AttentionCall,
    Kind,
    Level,
    Made,
    Role,
    Site,
    Tag,
    Tags,
    Verdict,
    Visit,
    Weighted,
    activations,
    as_function,
    as_numbers,
    value_only,
)

Parents = tuple[Node | Tensor, ...]  # of a node
Reads = Sequence[Tensor | None]

OUTSIDE = "a tensor that no recorded call made (TorchScript, numpy, or held outside of the module: make it a buffer)"
DEPENDS = "so its calls depend on the numbers of its inputs; give other inputs, or fewer at a time"


@dataclass
class Seen:
    """A call with its arguments and its result. function: the called one, or, if that changes its first argument, its
    twin that makes a new tensor."""

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

    @property
    def others(self) -> list[Tensor]:
        """All tensors besides the first argument."""
        return tensors_in([self.args[1:], self.kwargs])

    @property
    def of_first(self) -> Callable[[Any], Any]:
        """The function of the first argument alone. It does not keep that alive."""
        function, others, kwargs = self.function, self.args[1:], self.kwargs
        return lambda x: function(x, *others, **kwargs)

    def tag(self, x: Any) -> Tag:
        return self.recorder.tag(x)

    def value_only(self, tags: Sequence[Tag], level: Level = Level.OTHER) -> Tag:
        return value_only(self.call, tags, level)

    def node(self, parents: Parents, step: Step, frozen: str | None = None, reads: Reads = (), shape=None) -> Node:
        """A node of the recorder, with the shape of the call's result unless another is given."""
        shape = self.result.shape if shape is None else shape
        return self.recorder.node(self.call, parents, step, shape, frozen, reads)


@dataclass
class Product:
    """A call that multiplies activations and sums over an axis, and how it may be read.

    tensors: what it multiplies. sides: as P v, with P on the left and on the right. is_kernel: one of torch's attention
    functions, whose tensors begin with queries, keys and values. to_scores: the tensors as queries and keys. by_tags:
    what the tags say.
    """

    seen: Seen
    tensors: tuple[Tensor, ...]
    sides: tuple[Weighted | None, ...]
    by_tags: Verdict
    to_scores: Callable[..., tuple[Tensor, Tensor]] | None = None
    is_kernel: bool = False


class Recorder(TorchFunctionMode):
    """Tags every tensor of a forward pass, and makes the tape's nodes.

    rules: the rule of each function, by name. begin: name of the submodule at whose result paths begin, or "inputs",
    which are tensors of floats and embeddings of tokens; None: everything that has passed no attention call is slot 0.
    watch: called with each attention call. wanted: indices of the nodes whose values to keep, for a second pass; None
    keeps all. With watch or wanted there is no tape. verdicts: the role of each product of two activations, from an
    earlier reading of the module; None: what the tags say. keep: a submodule whose result's value is kept.
    """

    def __init__(
        self,
        module: Callable,
        rules: dict[str, Callable],
        begin: str | None = None,
        watch: Callable[[AttentionCall], None] | None = None,
        wanted: Collection[int] | None = frozenset(),
        verdicts: Mapping[Site, Verdict] | None = None,
        keep: str | None = None,
    ) -> None:
        super().__init__()
        self.module, self.rules, self.begin, self.watch, self.wanted = module, rules, begin, watch, wanted
        self.verdicts, self.keep = verdicts, keep
        self.keeps_tape = watch is None and wanted == frozenset()
        self.tags = Tags()
        self._parts = WeakTensorKeyDictionary()  # parts that share memory with a whole: the whole, and the index
        self.num_calls = self.num_nodes = self.num_attention = self.depth = 0  # depth: of the call that is recorded
        self.has_paths, self.epsilon = False, 0.0  # whether any tensor has paths so far; the coarsest rounding
        self.mixed: dict[Node, Site] = {}  # the calls of the nodes that pass heads
        self.results: dict[str, list[tuple[Tag, Tensor | None]]] = {}  # by submodule, one for each time it ran
        self.values: dict[int, Tensor] = {}
        self.running: list[Visit] = []  # the submodules around the call that is being recorded
        self._times: Counter[str] = Counter()
        self._products: Counter[tuple[str, str]] = Counter()
        self._key: tuple[int, Site] | None = None  # of the product that is being recorded, with the number of its call
        # products of which nothing shows whether they are scores, and those that are if a softmax follows
        self.unclear, self.slots = set[Site](), set[Site]()
        self.uncovered: list[Call] = []  # that may be attention, although no rule covers them
        self.call = Call(0, "", "")  # that is being recorded
        self.begun: set[int] = set()  # where the inputs lie in memory at which paths begin
        self.tokens = TokenInputs()

    # --- the pass ----------------------------------------------------------------------------------------------------

    def run(self, args: tuple, kwargs: dict) -> Any:
        """The module's own result. It runs on copies of its arguments, because it may change them in place."""
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = self.prepared(*tree_map_only(Tensor, Tensor.clone, (args, kwargs)))
            self._tag_inputs(args, kwargs)
            with self._named_modules(), as_python(), self:
                output = self.module(*args, **kwargs)
        for key, verdict in (self.verdicts or {}).items():
            place = key.module, key.function
            if verdict.role == Role.ATTENTION and key.time >= (now := self._products[place]):
                read = sum((other.module, other.function) == place for other in self.verdicts or ())
                raise ConfigError(
                    f"{key.module or 'the module'}: {key.function} multiplied {read} times when the network was read, "
                    f"and {now} times now, {DEPENDS}"
                )
        return output

    def prepared(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with which the module runs."""
        return args, kwargs

    def _tag_inputs(self, args: tuple, kwargs: dict) -> None:
        refuse_unreadable(self.module, tensors_in([args, kwargs]))
        for submodule in self.module.modules() if isinstance(self.module, nn.Module) else ():
            for tensor in tensors_in(vars(submodule)):  # also those that it holds without registering them
                self.set_tag(tensor, Tag(Kind.WEIGHT))
        for x in tensors_in([args, kwargs]):
            self.set_tag(x, Tag(Kind.ACTIVATION if x.is_floating_point() else Kind.CONSTANT, state=OF_INPUT))
            if x.is_floating_point() and self.begin == "inputs":
                self._begin(x)
                self.begun.add(x.untyped_storage().data_ptr())
            elif not x.is_floating_point() and x.numel():
                self.tokens.add(x)

    @contextmanager
    def _named_modules(self) -> Iterator[None]:
        names = {id(x): name for name, x in self.module.named_modules()} if isinstance(self.module, nn.Module) else {}
        if self.begin not in (None, "inputs", *names.values()):
            raise ConfigError(f"begin={self.begin}: no such submodule; allowed: inputs, {', '.join(names.values())}")

        def enter(module: nn.Module, _) -> None:
            name = names.get(id(module), type(module).__name__)
            self.running.append(Visit(name, self._times[name]))
            self._times[name] += 1

        def leave(module: nn.Module, _, result: Any) -> None:
            name = self.running.pop().name
            tensor = first_state(result)
            if tensor is not None and self.begin is not None and name == self.begin:
                self._begin(tensor)
            if tensor is not None and self.keeps_tape:
                with torch._C.DisableTorchFunction():  # so that the module's calls keep their numbers
                    value = tensor.clone() if name == self.keep else None if self.tag(tensor).has_paths else tensor
                self.results.setdefault(name, []).append((self.tag(tensor), value))

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

    def key_of(self, seen: Seen) -> Site:
        """The key of the product that is being recorded."""
        if self._key is None or self._key[0] != seen.call.index:
            function = seen.call.function
            self._key = seen.call.index, Site(seen.call.module, function, self._products[seen.call.module, function])
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

    def weighs(self, seen: Seen, p: Tensor, v: Tensor) -> None:
        """Called with an elementwise product of activations of which a softmax made p."""

    def takes(self, seen: Seen, x: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
        """Whether a call that takes numbers of x, by indices that activations made, takes tokens more than once."""
        return False

    def embedded(self, seen: Seen) -> Tag:
        """The tag of rows that an embedding looked up; with begin="inputs", paths begin at those of the inputs."""
        tokens = [x for x in tensors_in([seen.args, seen.kwargs]) if not x.is_floating_point() and self.tokens.hold(x)]
        if self.begin != "inputs" or not tokens:
            return Tag(Kind.ACTIVATION)
        self.has_paths = True
        self.begun |= set(map(self.tokens.origin_of, tokens))
        return Tag(Kind.ACTIVATION, node=seen.node((), Source(seen.result.clone())))

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

    # --- every call --------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, changes, full_name = name_of(func)
        if name in DESCRIBES:
            return func(*args, **(kwargs or {}))
        in_pairs = einsum_in_pairs(args, lambda x: self.tag(x).kind == Kind.ACTIVATION) if name == "einsum" else None
        if in_pairs is not None:
            with self:
                return in_pairs()
        args, kwargs = in_order(args, kwargs)
        given = tensors_in([args, kwargs])[: 1 if name.endswith("_as") else None]  # of the other it reads the shape
        in_place = changes or bool(kwargs.get("inplace"))
        self.num_calls += 1
        call = self.call = Call(self.num_calls, full_name, self.where)
        if is_over_indices(call, given, lambda x: self.tag(x).counted is not None):
            return func(*args, **kwargs)
        refuse_unseen(call, given)
        tags = [self._tag_of_argument(call, x) for x in given]
        read = args
        if in_place and any(tag.kind == Kind.ACTIVATION for tag in tags):
            old = args[0].clone()  # for the tape: the call overwrites it
            self.set_tag(old, copy(self.tag(args[0])))
            read = (old, *args[1:])
        result = func(*args, **kwargs)
        output = args[0] if in_place else result
        self.tokens.follow(name, given, output)
        if not tensors_in(output):
            if name in EXITS and any(tag.has_paths for tag in tags):
                raise ConfigError(f"{call}: passes an activation on where no tape can follow; use torch functions")
            return result
        self.depth, num_before = max((tag.depth for tag in tags), default=0), self.num_attention
        rule, new = self.rules.get(name), None
        if rule is not None and kwargs.get("out") is None:
            seen = Seen(self, call, name, out_of_place(func, name, in_place), read, kwargs, output)
            seen.kwargs.pop("inplace", None)
            new = rule(seen)
        if new is None:
            is_of_weights = any(tag.level == Level.SOFTMAX for tag in tags)
            is_compared = all(x.dtype == torch.bool for x in tensors_in(output))
            if is_of_weights and not is_compared and sum(tag.kind == Kind.ACTIVATION for tag in tags) > 1:
                self.uncovered.append(call)
            new = value_only(call, tags)
        new = as_numbers(call, given, tags, new, output)
        is_attention = self.num_attention > num_before
        passed = reduce(or_, (tag.passed for tag in tags), is_attention << self.num_attention)
        new, stem = as_function(name, tags, new)
        self._tag_results(call, output, new, self.depth + is_attention, passed, tags, stem)
        if name in ("getitem", "data") and isinstance(result, Tensor) and share_memory(result, args[0]):
            self._parts[result] = args[0], ... if name == "data" else args[1]
        elif in_place:
            self._change_whole(call, args[0])
        return result

    def _change_whole(self, call: Call, x: Tensor) -> None:
        """If x, which was changed in place, is x = whole[index]: tag the whole as if x had been put there."""
        while x in self._parts:
            part, (x, index) = x, self._parts[x]
            old = set_item(x, index, 0)  # what is now in the part's place does not matter
            self.set_tag(old, copy(self.tag(x)))
            seen = Seen(self, call, "setitem", set_item, (old, index, part), {}, x)
            new = self.rules["setitem"](seen) or value_only(call, [self.tag(old), self.tag(part)])
            self._tag_results(call, x, new, self.tag(part).depth, self.tag(old).passed | self.tag(part).passed)

    def _tag_results(
        self, call: Call, output: Any, new: Made, depth: int, passed: int, tags: Sequence[Tag] = (), stem: object = None
    ) -> None:
        tensors = [output] if isinstance(output, Tensor) else list(output)
        new = [copy(new) for _ in tensors] if isinstance(new, Tag) else new
        for tensor, tag in zip(tensors, new, strict=True):
            if not isinstance(tensor, Tensor):
                continue
            tag.stem = stem or object()
            if not (tensor.is_floating_point() or tensor.is_complex()):
                made_of = activations(tags)
                counted = replace(value_only(call, made_of), stem=tag.stem) if made_of else None
                if counted is not None and call.function.endswith(("max", "min")):  # places of extremes
                    counted.form = "largest"
                tag = Tag(Kind.CONSTANT, counted=counted)
            tag.maker, tag.depth, tag.passed, tag.state = call, depth, passed, state_of(call, tensor, tags)
            if tag.has_paths:
                self.has_paths = True
                self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)
            self.set_tag(tensor, tag)
            if tag.node is not None and (self.wanted is None or tag.node.index in self.wanted):
                self.values.setdefault(tag.node.index, tensor.clone())

    def _tag_of_argument(self, call: Call, x: Tensor) -> Tag:
        tag = self.tag(x)
        if tag.version != version(x) and (self.has_paths or tag.kind == Kind.ACTIVATION):
            raise ConfigError(
                f"{call}: reads a tensor that was changed in place through a view of it; "
                "change the module to make a new tensor there"
            )
        return tag

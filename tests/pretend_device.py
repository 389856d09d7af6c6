"""A pretend CUDA device for machines without one: it computes on the CPU and refuses what CUDA would refuse.

    with pretending() as counts:
        x = torch.ones(3, device="cuda")
        x + torch.ones(3)                # RuntimeError: two devices
        x.sum().item()                   # counts.waits["_local_scalar_dense"] is 1

It shows where tensors lie and what a step costs the host: the operations that it launches, and how often it waits for
the device. It does not show speed, rounding, autocast, torch.compile or what a kernel refuses.

A tensor of the device wraps a tensor of the CPU, with device PrivateUse1 for torch's C++ and `cuda` for Python.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._decomp.decompositions import lstm_impl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

INSIDE, OUTSIDE = torch.device("privateuseone:0"), torch.device("cuda:0")
CPU = torch.device("cpu")

COPIES = ("_to_copy", "copy_")
# operations after which the host knows something of the result, so it has waited for the device
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim"}
WAITING |= {"_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_qr", "linalg_lstsq", "_coalesce"}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
TAKES_NUMBERS = {"where", "fill", "fill_", "masked_fill", "masked_fill_"}  # of the CPU, as pointwise operations do
INTEGER_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot"}  # CUDA has none


@dataclass
class Counts:
    """operations: launched on the device, by name, views left out. waits: by what the host waited for."""

    operations: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    recording: "Graph | None" = None  # the graph that is being recorded


class OnDevice(Tensor):
    """A tensor of the device; `raw` holds its numbers on the CPU."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> "OnDevice":
        layout: dict[str, Any] = {"layout": raw.layout}
        if raw.layout == torch.strided:
            layout |= {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        tensor = Tensor._make_wrapper_subclass(cls, raw.size(), dtype=raw.dtype, device=INSIDE, **layout)
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise AssertionError(f"{operation}: a tensor of the pretend device was used outside `pretending`")

    def __repr__(self) -> str:
        return f"OnDevice({self.raw})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = OnDevice(self.raw.clone())
        is_parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]


class Device(TorchDispatchMode):
    """Runs each operation on the CPU, if CUDA would run it, and counts it."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted, name = kwargs.get("device"), operation._schema.name.partition("::")[2]
        ours = [x for x in tree_leaves((args, kwargs)) if isinstance(x, OnDevice)]
        stays = bool(ours) if wanted is None else wanted.type == INSIDE.type
        if not ours and not stays:
            return operation(*args, **kwargs)
        if operation._can_decompose():  # torch hands such operations over whole in inference mode
            with self:
                return operation.decompose(*args, **kwargs)
        if name == "_fused_sdp_choice":
            return 0  # the composite kernel, which every device has
        refuse_what_cuda_refuses(operation, name, args, kwargs, ours)
        waits = self.counts.waits.total()
        self.count(operation, name, args, kwargs, ours, stays)
        if self.counts.recording is not None and (self.counts.waits.total() > waits or crosses(args, kwargs, name)):
            raise RuntimeError(f"{operation}: operation not permitted when stream is capturing")
        raw_args, raw_kwargs = tree_map_only(OnDevice, lambda x: x.raw, (args, kwargs))
        if stays and wanted is not None:
            raw_kwargs["device"] = CPU
        if name == "_efficientzerotensor":  # it has no memory that an operation on the CPU could read
            operation = torch.ops.aten.zeros.default
        if (graph := self.counts.recording) is not None:
            result = graph.record(operation, raw_args, raw_kwargs)
        else:
            result = operation(*raw_args, **raw_kwargs)
        assert all(x.shape == x.raw.shape for x in ours), f"{operation}: changes a shape in place"
        if not stays:
            return result
        before = {id(x.raw): x for x in ours}  # operations in place return their argument
        return tree_map_only(Tensor, lambda x: before[id(x)] if id(x) in before else OnDevice(x), result)

    def count(self, operation: Any, name: str, args: tuple, kwargs: dict, ours: list, stays: bool) -> None:
        is_view = any(about.alias_info and not about.alias_info.is_write for about in operation._schema.returns)
        if not is_view and name not in ("_unsafe_view", "lift_fresh"):
            self.counts.operations[name] += 1
        by_mask = name in INDEXING and any(x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None)
        if name in WAITING or by_mask:
            self.counts.waits[name] += 1
        if name in COPIES:
            onto = isinstance(args[0], OnDevice) if name == "copy_" else stays
            of = isinstance(args[1] if name == "copy_" else args[0], OnDevice)
            later = kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
            if onto != of and not (onto and later):  # memory of the host that is not pinned waits on the way back
                self.counts.waits["to the device" if onto else "to the host"] += 1


def refuse_what_cuda_refuses(operation: Any, name: str, args: tuple, kwargs: dict, ours: list[OnDevice]) -> None:
    """Raise what CUDA raises: of two devices in one operation, of a generator of the CPU, of kernels it lacks."""
    looked_at = (
        args[2:] if name in INDEXING and ours and ours[0] is args[0] else (args, kwargs)
    )  # indices may be on the CPU
    others = [x for x in tree_leaves(looked_at) if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
    if torch.Tag.pointwise in operation.tags or name in TAKES_NUMBERS | INDEXING:
        written = [
            given
            for about, given in zip(operation._schema.arguments, args, strict=False)
            if about.alias_info is not None and about.alias_info.is_write
        ]
        others = [x for x in others if x.ndim or any(x is given for given in written)]
    if others and name not in COPIES:
        shapes = ", ".join(str(tuple(x.shape)) for x in others)
        raise RuntimeError(f"{operation}: tensors on two devices, cuda:0 and cpu, on the latter {shapes}")
    generator = kwargs.get("generator")
    if generator is not None:
        raise RuntimeError(f"{operation}: a generator of the CPU cannot draw on cuda:0")
    if name in INTEGER_PRODUCTS and not ours[0].is_floating_point():
        raise NotImplementedError(f'"{name}_cuda" not implemented for {ours[0].dtype}')
    if name == "linalg_lstsq":
        raise RuntimeError("linalg_lstsq: CUDA has only a driver that assumes full rank")


def crosses(args: tuple, kwargs: dict, name: str) -> bool:
    """Whether an operation copies between the host and the device."""
    if name == "copy_":
        return isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice)
    wanted = kwargs.get("device")
    return name == "_to_copy" and wanted is not None and isinstance(args[0], OnDevice) != (wanted.type == INSIDE.type)


class Graph:
    """A CUDA graph. What is done while it records has no effect; replaying it does all of it, where the tensors lay."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def record(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Keep an operation on numbers of the CPU, and return a result of its shapes."""
        given = [*zip(operation._schema.arguments, args, strict=False)]
        given += [(about, kwargs[about.name]) for about in operation._schema.arguments if about.name in kwargs]
        written = [value for about, value in given if about.alias_info is not None and about.alias_info.is_write]
        copies = {id(x): x.clone() for x in tree_leaves(written) if isinstance(x, Tensor)}
        originals = {id(copies[id(x)]): x for x in tree_leaves(written) if isinstance(x, Tensor)}
        harmless = tree_map_only(Tensor, lambda x: copies.get(id(x), x), (args, kwargs))
        result = operation(*harmless[0], **harmless[1])
        result = tree_map_only(Tensor, lambda x: originals.get(id(x), x), result)
        self.calls.append((operation, args, kwargs, result))
        return result

    def replay(self) -> None:
        for operation, args, kwargs, result in self.calls:
            anew = operation(*args, **kwargs)
            if all(about.alias_info is None for about in operation._schema.returns):
                for kept, x in zip(tree_leaves(result), tree_leaves(anew), strict=True):
                    if isinstance(kept, Tensor):
                        kept.copy_(x)


class Stream:
    """A queue of work on the device, which is done at once."""

    def wait_stream(self, other: "Stream") -> None:
        pass


class Names(TorchFunctionMode):
    """Calls the device `cuda` wherever Python sees it."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if args and is_on_device(args[0]):
            if function == Tensor.is_cuda.__get__:
                return True
            if function is Tensor.tolist:
                return args[0].cpu().tolist()
            if function is torch.lstm:  # whose kernel is written for each device
                return lstm_impl(*args, **(kwargs or {}))
        args, kwargs = tree_map(to_inside, (args, kwargs or {}))
        result = function(*args, **kwargs)
        return OUTSIDE if isinstance(result, torch.device) and result.type == INSIDE.type else result


def is_on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and Tensor.device.__get__(x).type == INSIDE.type


def to_inside(x: Any) -> Any:
    """The device that C++ knows, for one that Python calls cuda; anything else as it is."""
    return INSIDE if isinstance(x, str | torch.device) and str(x).partition(":")[0] == "cuda" else x


@cache
def registered() -> None:
    """Make the device known to torch, which cannot take it back: other tests must not share the process."""
    _setup_privateuseone_for_python_backend("pretend")


class Event:
    """A point in the device's time."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.milliseconds = 1000 * time.perf_counter()

    def elapsed_time(self, later: "Event") -> float:
        return later.milliseconds - self.milliseconds


@contextmanager
def pretending() -> Iterator[Counts]:
    """torch sees one CUDA device; yields what its use costs."""
    registered()
    counts = Counts()

    def synchronize(*_: object) -> None:
        counts.waits["synchronize"] += 1

    @contextmanager
    def recording(graph: Graph, **_: object) -> Iterator[None]:
        counts.recording = graph
        try:
            yield
        finally:
            counts.recording = None

    graphs = {"CUDAGraph": Graph, "graph": recording, "Stream": Stream, "stream": lambda _: nullcontext()}
    graphs |= {"current_stream": Stream, "graph_pool_handle": object}
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "pretended"}
    answers |= {"is_bf16_supported": True, "set_device": None, "_lazy_init": None}
    answers |= {"mem_get_info": (1 << 33, 1 << 33)}
    functions = {name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is then a copy that we see
    try:
        with (
            mock.patch.multiple(torch.cuda, synchronize=synchronize, Event=Event, **functions, **graphs),
            mock.patch.object(torch.backends.cudnn, "is_acceptable", lambda _: False),
            mock.patch.object(torch.__future__, "_overwrite_module_params_on_conversion", True),
            torch.autograd.set_multithreading_enabled(False),
            Device(counts),
            Names(),
        ):
            yield counts
    finally:
        torch._C._set_only_lift_cpu_tensors(before)

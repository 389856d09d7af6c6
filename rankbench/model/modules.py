"""A torch module from outside rankbench, and the inputs on which it is measured.

    module, example = build("mine.py:build")
    example = read_inputs("texts.safetensors")

The function returns a module, (module, inputs) or (module, inputs, targets). `build` runs the file that the user names.
Nothing else here executes code: inputs are read as data.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rankbench.config import plugins
from rankbench.config.keys import ConfigError, closest
from rankbench.model.kinds import NO_KINDS, Kinds
from rankbench.tape.calls import as_python

TARGETS = "targets"  # name of the tensor, in a file of inputs, against which the output is scored
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
PRESENT = "attention_mask"  # keyword argument: 1 or True for the present tokens of a padded batch


@dataclass(frozen=True, eq=False)
class Example:
    """Arguments of a module. The first axis of the first tensor counts sequences, and so does the first axis of every
    other tensor if it has the same length; unless batch_axes gives the axis of each tensor, None if it has none.

    targets: what the output is scored against, as in tasks.Batch: classes (B, N), with -1 for unscored tokens, or
    numbers of the output's shape. lengths_B: number of tokens of each sequence in a padded batch, where absent tokens
    come last; None if all are present. special_BN: tokens that count in no measurement, such as those that mark a
    text's beginning and end. padding: the same lengths by number of the input, with the number of tokens out of which
    they count; main_input: the input whose tokens are measured.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: Tensor | None = None
    lengths_B: Tensor | None = None
    special_BN: Tensor | None = None
    batch_axes: tuple[int | None, ...] | None = None
    padding: Mapping[int | None, tuple[Tensor, int]] = field(default_factory=dict)
    main_input: int | None = None
    kinds: Kinds = NO_KINDS  # of tokens; those that are left out count no more than special ones

    def __post_init__(self) -> None:
        if not isinstance(self.targets, Tensor | None):
            raise ConfigError(f"targets: a {type(self.targets).__name__}; give a tensor of classes or of numbers")

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def axis(self, number: int) -> int | None:
        """The axis of a tensor that counts sequences; None if it has none."""
        if self.batch_axes is not None:
            return self.batch_axes[number]
        tensors = self.tensors
        return 0 if tensors[number].dim() and len(tensors[number]) == len(tensors[0]) else None

    @property
    def num_sequences(self) -> int:
        return next(x.shape[axis] for x, axis in self._with_axes() if axis is not None)

    def _with_axes(self) -> list[tuple[Tensor, int | None]]:
        return [(x, self.axis(number)) for number, x in enumerate(self.tensors)]

    def along(self, axes: Sequence[int | None]) -> "Example":
        """The example whose tensors have their sequences along these axes; None: wherever an axis is as long."""
        known = [(x, axis) for x, axis in zip(self.tensors, axes, strict=True) if axis is not None]
        if all(axis == 0 for _, axis in known):
            return self
        count = known[0][0].shape[known[0][1]]
        chosen = [
            next((other for other in range(min(2, x.dim())) if x.shape[other] == count), None) if axis is None else axis
            for x, axis in zip(self.tensors, axes, strict=True)
        ]
        return replace(self, batch_axes=tuple(chosen))

    def present(self, num_tokens: int, number: int | None = None) -> Tensor | None:
        """Mask of the tokens that are present, out of this many, (B, N) bool; None if all are. number: of the input
        whose tokens these are; None: the one that is measured. ConfigError if they are joined to fewer."""
        number = self.main_input if number is None else number
        lengths_B, width = self.padding.get(number, (None, 0))
        if self.lengths_B is not None and number == self.main_input:
            lengths_B, width = self.lengths_B, self.tensors[0].movedim(self.axis(0) or 0, 0).shape[1]
        if lengths_B is None or num_tokens == 1 < width:  # one token that is made of all
            return None
        if num_tokens < width:
            raise ConfigError(
                f"padding: {width} tokens are joined to {num_tokens}, and nothing shows which of these are present; "
                "give sequences of one length, without padding"
            )
        # tokens that a network adds, such as one for the class, come first
        return torch.arange(num_tokens, device=lengths_B.device) < lengths_B[:, None] + (num_tokens - width)

    def counted(self, num_tokens: int, without: str | None = None) -> Tensor | None:
        """Mask of the tokens that count in measurements, out of this many, (B, N) bool; None if all do. without: one
        more kind of tokens that does not."""
        counted_BN = self.present(num_tokens)
        if self.special_BN is not None and (added := num_tokens - self.special_BN.shape[1]) >= 0:
            special_BN = nn.functional.pad(self.special_BN, (added, 0))
            counted_BN = ~special_BN if counted_BN is None else counted_BN & ~special_BN
        inputs = self.tensors[0].movedim(self.axis(0) or 0, 0)
        return self.kinds.counted(counted_BN, inputs, num_tokens, without)

    def split(self, size: int) -> Iterator["Example"]:
        """Yield the sequences in batches of `size`."""
        for start in range(0, self.num_sequences, size):
            yield self[start : start + size]

    def __getitem__(self, index: slice) -> "Example":
        """The example with these sequences only."""
        numbers = range(*index.indices(self.num_sequences))
        return self if len(numbers) == self.num_sequences else self.at(list(numbers))

    def at(self, numbers: Sequence[int]) -> "Example":
        """The example with the sequences of these numbers."""
        count = self.num_sequences
        for x, axis in self._with_axes()[1:]:
            if axis is not None and x.dim() == 2 and x.shape == (count, count):
                raise ConfigError(
                    f"inputs: a tensor of shape {tuple(x.shape)} with {count} sequences may be a mask or one row per "
                    "sequence; give another number of sequences"
                )
        return self._chosen(torch.as_tensor(numbers, device=self.tensors[0].device))

    def repeated(self) -> "Example":
        """The example with each sequence twice."""
        return self._chosen(torch.arange(self.num_sequences, device=self.tensors[0].device).repeat(2))

    def _chosen(self, numbers: Tensor) -> "Example":
        axes = iter([axis for _, axis in self._with_axes()])

        def part(x: Tensor) -> Tensor:
            axis = next(axes)
            return x if axis is None else x.index_select(axis, numbers)

        return self._mapped(part, lambda x: x[numbers])

    def _mapped(self, of_arguments: Callable[[Tensor], Tensor], of_sequences: Callable[[Tensor], Tensor]) -> "Example":
        """The example with every tensor among its arguments mapped, and those beside them with one row a sequence."""
        args, kwargs = tree_map_only(Tensor, of_arguments, (self.args, dict(self.kwargs)))
        beside = {name: getattr(self, name) for name in ("targets", "lengths_B", "special_BN")}
        beside = {name: None if x is None else of_sequences(x) for name, x in beside.items()}
        padding = {number: (of_sequences(lengths_B), width) for number, (lengths_B, width) in self.padding.items()}
        return replace(self, args=args, kwargs=kwargs, padding=padding, **beside)

    def run(self, module: Callable) -> Any:
        """What a module returns for copies of the arguments, which it may change."""
        args, kwargs = tree_map_only(Tensor, Tensor.clone, (self.args, dict(self.kwargs)))
        with as_python():
            return module(*args, **kwargs)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Example":
        """Move to `device`, and floating-point tensors to `dtype`; tokens, classes and masks keep their dtype.
        ConfigError for a number that `dtype` does not reach."""

        def moved(x: Tensor) -> Tensor:
            if x.is_floating_point() and (x.isfinite() & x.to(dtype).isinf()).any():
                raise ConfigError(
                    f"inputs of shape {tuple(x.shape)} hold numbers as large as {x[x.isfinite()].abs().max():.3g}, "
                    f"infinite in {str(dtype).removeprefix('torch.')}; scale them, or try precision=fp64"
                )
            return x.to(device, dtype if x.is_floating_point() else None)

        return self._mapped(moved, moved)


def build(spec: str) -> tuple[nn.Module, Example | None]:
    """Call the function `spec`; return its module, and its example of inputs or None.

    spec: <file>.py:<function> or <package.module>:<function>. Runs that code. ConfigError if there is no such function.
    """
    source, _, name = spec.rpartition(":")
    code = _import(source, spec)
    function = getattr(code, name, None)
    if not callable(function):
        functions = [other for other, value in vars(code).items() if callable(value) and not other.startswith("_")]
        raise ConfigError(
            f"model={spec}: {source} has no function {name}{closest(name, functions)}; "
            f"it has {', '.join(functions) or 'none'}"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"model={spec}: is called without arguments ({error}); write a function that returns it, and name that"
        ) from None
    return unpacked(function(), f"model={spec}")


def unpacked(built: Any, name: str) -> tuple[nn.Module, Example | None]:
    """Split a module, (module, inputs) or (module, inputs, targets) into the module and its example or None."""
    parts = built if isinstance(built, tuple) else (built,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ConfigError(
            f"{name}: gave ({kinds}); allowed are an nn.Module, (module, inputs), (module, inputs, targets)"
        )
    if isinstance(parts[0], torch.jit.ScriptModule):
        raise ConfigError(f"{name}: a module compiled by torch.jit cannot be read; give the one that it was made of")
    module = parts[0].eval().requires_grad_(False)
    if len(parts) == 1:
        return module, None
    example = as_example(parts[1], name)
    return module, example if len(parts) == 2 else replace(example, targets=parts[2])


def as_example(inputs: Any, name: str) -> Example:
    """Make an Example of what a user gives: a tensor, a tuple of arguments, or a mapping of keyword arguments."""
    if isinstance(inputs, Example):
        return inputs
    if isinstance(inputs, Mapping):
        keywords = dict(inputs)
        example = Example((), keywords, keywords.pop(TARGETS, None))
    else:
        example = Example(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))
    if not example.tensors or not example.tensors[0].dim():
        raise ConfigError(
            f"{name}: inputs hold no tensor; give a tensor, a tuple of arguments, or a dict of them by name"
        )
    if not example.tensors[0].numel():
        raise ConfigError(f"{name}: inputs of shape {tuple(example.tensors[0].shape)}; give a sequence or more")
    for x in example.tensors:
        if x.is_nested:
            raise ConfigError(f"{name}: inputs are nested; give x.to_padded_tensor(0), and {PRESENT} for what is there")
        if x.layout != torch.strided:
            raise ConfigError(f"{name}: inputs of layout {x.layout}; give dense ones, as x.to_dense()")
        if x.is_floating_point() and (x.isnan().any() or (x == torch.inf).any()):
            raise ConfigError(f"{name}: inputs of shape {tuple(x.shape)} hold nan or infinity; give finite numbers")
    return example


def _import(source: str, spec: str) -> ModuleType:
    if not source.endswith(".py"):
        if not all(name.isidentifier() for name in source.split(".")):
            raise ConfigError(f"model={spec}: not a module; give <file>.py:<function> or <package.module>:<function>")
        sys.path.insert(0, os.getcwd())
        try:
            if (found := PathFinder.find_spec(source.partition(".")[0])) is not None and found.origin is not None:
                plugins.name_file(Path(found.origin))
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if f"{source}.".startswith(f"{error.name}."):  # not one that the module imports
                raise ConfigError(
                    f"model={spec}: no module {error.name} to import; give <file>.py:<function> or <module>:<function>"
                ) from None
            raise
        finally:
            sys.path.remove(os.getcwd())
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"model={spec}: no file {path}; give <file>.py:<function> or <package.module>:<function>")
    code = ModuleType(path.name)  # which no module that is imported can have
    code.__file__ = str(path.resolve())
    plugins.name_file(path)
    sys.path.insert(0, str(path.resolve().parent))  # as `python mine.py` finds the modules next to it
    sys.modules[path.name] = code
    try:
        # not by an import, whose cache misses a change made within one second of the last
        exec(compile(path.read_bytes(), path, "exec"), code.__dict__)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return code


def read_inputs(path: str, tokenize: Callable[[list[str]], Mapping[str, Tensor]] | None = None) -> Example:
    """Read inputs from a file.

    .npy: the only argument. .safetensors: keyword arguments by name, except `inputs`, the only positional argument, and
    `targets`, the targets. .txt: one sequence per line, read by `tokenize`; without it, ConfigError.
    """
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"inputs={path}: a folder; only model=pretrained reads one, of images; others read a file")
    if not file.is_file():
        raise ConfigError(f"inputs={path}: no such file; allowed are files .npy, .safetensors and .txt")
    if file.suffix == ".npy":
        try:
            with file.open("rb") as opened:
                array = np.load(opened, allow_pickle=False)
            if array.dtype.kind in "iu" and array.ndim < 3:  # tokens, which embeddings take as int64; pixels stay
                array = array.astype(np.int64)
            return as_example(torch.from_numpy(array), f"inputs={path}")
        except MemoryError as error:
            raise MemoryError(f"inputs={path}: {error}") from None
        except (OSError, ConfigError):
            raise
        except Exception as error:  # a foreign file can make the library fail in any way
            raise ConfigError(f"inputs={path}: not an array of numbers ({error}); write it with numpy.save") from None
    if file.suffix == ".safetensors":
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise ConfigError(f"inputs={path}: not readable ({error}); write it with safetensors") from None
        targets = tensors.pop(TARGETS, None)
        positional = (tensors.pop("inputs"),) if "inputs" in tensors else ()
        example = as_example(positional or tensors, f"inputs={path}")
        return replace(example, kwargs=tensors, targets=targets)
    if file.suffix == ".txt":
        if tokenize is None:
            raise ConfigError(
                f"inputs={path}: a text needs a tokenizer; give tokenizer=<hub id or folder>, or token ids in a .npy"
            )
        try:
            lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise ConfigError(f"inputs={path}: not a text in UTF-8 ({error}); give one sequence per line") from None
        if not lines:
            raise ConfigError(f"inputs={path}: has no text; give one sequence per line")
        return as_example(tokenize(lines), f"inputs={path}")
    raise ConfigError(f"inputs={path}: unknown kind {file.suffix or 'of file'}; allowed are .npy, .safetensors, .txt")


def read_images(folder: str) -> list[Image.Image]:
    """The images of a folder, in order of name, in RGB. ConfigError if it has none, or if one cannot be read."""
    files = sorted(file for file in Path(folder).iterdir() if file.suffix.lower() in IMAGES)
    if not files:
        raise ConfigError(f"inputs={folder}: has no image; allowed are files {', '.join(IMAGES)}")
    images = []
    for file in files:
        try:
            with Image.open(file) as image:
                images.append(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ConfigError(f"inputs={file}: not readable as an image ({error}); repair or remove it") from None
    return images

"""A torch module from outside rankbench, and the inputs on which it is measured.

    module, example = build("mine.py:build")
    example = read_inputs("texts.safetensors")

The function returns a module, (module, inputs) or (module, inputs, targets). `build` runs the file that the user names.
Nothing else here executes code: inputs are read as data.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
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
from torch.utils._pytree import tree_flatten, tree_map

from rankbench import plugins
from rankbench.keys import ConfigError, closest

TARGETS = "targets"  # name of the tensor, in a file of inputs, against which the output is scored
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
PRESENT = "attention_mask"  # keyword argument: 1 or True for the present tokens of a padded batch


@dataclass(frozen=True)
class Example:
    """Arguments of a module. The first axis of the first tensor counts sequences, and so does the first axis of every
    other tensor if it has the same length.

    targets: what the output is scored against, as in tasks.Batch: classes (B, N), with -1 for unscored tokens, or
    numbers of the output's shape. lengths_B: number of tokens of each sequence in a padded batch, where absent tokens
    come last; None if all are present. special_BN: tokens that count in no measurement, such as those that mark a
    text's beginning and end.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: Tensor | None = None
    lengths_B: Tensor | None = None
    special_BN: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [leaf for leaf in tree_flatten((self.args, dict(self.kwargs)))[0] if isinstance(leaf, Tensor)]

    @property
    def num_sequences(self) -> int:
        return len(self.tensors[0])

    def present(self, num_tokens: int) -> Tensor | None:
        """Mask of the tokens that are present, out of this many, (B, N) bool; None if all are."""
        if self.lengths_B is None:
            return None
        return torch.arange(num_tokens, device=self.lengths_B.device) < self.lengths_B[:, None]

    def counted(self, num_tokens: int) -> Tensor | None:
        """Mask of the tokens that count in measurements, out of this many, (B, N) bool; None if all do."""
        present_BN = self.present(num_tokens)
        if self.special_BN is None:
            return present_BN
        return ~self.special_BN if present_BN is None else present_BN & ~self.special_BN

    def split(self, size: int) -> Iterator["Example"]:
        """Yield the sequences in batches of `size`."""
        for start in range(0, self.num_sequences, size):
            yield self[start : start + size]

    def __getitem__(self, index: slice) -> "Example":
        """The example with these sequences only."""
        count = self.num_sequences

        def part(x: Any) -> Any:
            return x[index] if isinstance(x, Tensor) and x.dim() and len(x) == count else x

        if len(range(*index.indices(count))) == count:
            return self
        for x in self.tensors[1:]:
            if x.dim() == 2 and x.shape == (count, count):
                raise ConfigError(
                    f"inputs: a tensor of shape {tuple(x.shape)} with {count} sequences may be a mask or one row per "
                    "sequence; give another number of sequences"
                )
        rest = (None if x is None else x[index] for x in (self.targets, self.lengths_B, self.special_BN))
        return Example(*tree_map(part, (self.args, dict(self.kwargs))), *rest)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Example":
        """Move to `device`, and floating-point tensors to `dtype`; tokens, classes and masks keep their dtype."""

        def moved(x: Any) -> Any:
            return x.to(device, dtype if x.is_floating_point() else None) if isinstance(x, Tensor) else x

        rest = (moved(self.targets), moved(self.lengths_B), moved(self.special_BN))
        return Example(*tree_map(moved, (self.args, dict(self.kwargs))), *rest)


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
    return unpacked(function(), f"model={spec}")


def unpacked(built: Any, name: str) -> tuple[nn.Module, Example | None]:
    """Split a module, (module, inputs) or (module, inputs, targets) into the module and its example or None."""
    parts = built if isinstance(built, tuple) else (built,)
    if not isinstance(parts[0], nn.Module) or len(parts) > 3:
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ConfigError(
            f"{name}: gave ({kinds}); allowed are an nn.Module, (module, inputs), (module, inputs, targets)"
        )
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
    return replace(example, lengths_B=_lengths(example.kwargs.get(PRESENT)))


def _lengths(mask: Any) -> Tensor | None:
    """Number of tokens that a mask (B, N) keeps of each sequence; None if it keeps all, or if this is not a mask."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.bool().all()):
        return None
    present_BN = mask.bool()
    if (present_BN[:, 1:] & ~present_BN[:, :-1]).any():
        raise ConfigError(f"{PRESENT}: padding comes before a token; pad sequences at their end")
    return present_BN.sum(-1)


def _import(source: str, spec: str) -> ModuleType:
    if not source.endswith(".py"):
        if not all(name.isidentifier() for name in source.split(".")):
            raise ConfigError(f"model={spec}: not a module; give <file>.py:<function> or <package.module>:<function>")
        sys.path.insert(0, os.getcwd())
        try:
            if (found := PathFinder.find_spec(source.partition(".")[0])) is not None and found.origin is not None:
                plugins.name(Path(found.origin))
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is not None and source.startswith(error.name):
                raise ConfigError(
                    f"model={spec}: no module {error.name} to import; give <file>.py:<function> or <module>:<function>"
                ) from None
            raise
        finally:
            sys.path.remove(os.getcwd())
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"model={spec}: no file {path}; give <file>.py:<function> or <package.module>:<function>")
    code = ModuleType(path.stem)
    code.__file__ = str(path.resolve())
    plugins.name(path)
    sys.path.insert(0, str(path.resolve().parent))  # as `python mine.py` finds the modules next to it
    sys.modules[path.stem] = code
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
                return as_example(torch.from_numpy(np.load(opened, allow_pickle=False)), f"inputs={path}")
        except (MemoryError, OSError):
            raise
        except ConfigError:
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
        return replace(example, kwargs=tensors, targets=targets, lengths_B=_lengths(tensors.get(PRESENT)))
    if file.suffix == ".txt":
        if tokenize is None:
            raise ConfigError(
                f"inputs={path}: a text needs a tokenizer; give tokenizer=<hub id or folder>, or token ids in a .npy"
            )
        try:
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
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

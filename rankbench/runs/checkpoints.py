"""Tensors on disk: the weights of a run, and the state from which its training resumes. Loading executes no code."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rankbench.config.keys import ConfigError, in_one_line
from rankbench.runs.files import regular, replacing


def weights(path: Path) -> dict[str, Tensor]:
    """Load what `Run.save_weights` saved; ConfigError if there is nothing, or anything but floating-point numbers."""
    loaded = _load(path)[0]
    for name, weight in loaded.items():
        if not weight.is_floating_point():
            raise ConfigError(f"{path}: {name} is of {weight.dtype}, and weights are of floating point; train it again")
    return loaded


def save_state(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Save all that training needs to resume: tensors, and plain facts as JSON in the file's header."""
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    header = {"facts": json.dumps(facts)}
    header["sha256"] = _digest(tensors, header["facts"])
    save(path, tensors, header)


def state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Load what `save_state` saved last, or None; ConfigError if the file is not a training state or has changed."""
    if not path.exists():
        return None
    tensors, header = _load(path)
    again = "remove it to train the run from the beginning"
    if "sha256" in header and header["sha256"] != _digest(tensors, header.get("facts", "")):
        raise ConfigError(f"{path}: changed since it was written; {again}")
    try:
        return tensors, json.loads(header["facts"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a training state ({in_one_line(error)}); {again}") from None


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    """Digest of a training state's whole content."""
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Save tensors, and texts in the file's header, atomically."""
    with replacing(path) as part:
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, header)
        except SafetensorError as error:
            raise OSError(str(error).removeprefix("Error while serializing: I/O error: ")) from None


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(regular(path), framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; the run there has not reached its first checkpoint") from None
    except RuntimeError as error:
        if "unable to" not in str(error):
            raise
        raise ConfigError(f"{path}: cannot be opened ({' '.join(str(error).split())})") from None
    except SafetensorError as error:
        raise ConfigError(f"{path}: not a whole safetensors file ({error}); train the run again") from None

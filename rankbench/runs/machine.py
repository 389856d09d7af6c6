"""The machine that a command runs on: device, number type, threads, and the record of them all."""

import hashlib
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from rankbench.config import plugins
from rankbench.config.keys import ConfigError
from rankbench.config.schema import BaseConfig

log = logging.getLogger(__name__)

PACKAGES = ("rankbench", "torch", "numpy", "pandas", "scipy", "hydra-core", "omegaconf", "safetensors", "matplotlib")

# Found in the messages of torch's allocation errors
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


@dataclass(frozen=True)
class Machine:
    """Device and number type of the tensors; bf16 keeps weights in float32 and computes in bfloat16. threads: those
    that compute, at most one for each processor."""

    device: torch.device
    dtype: torch.dtype
    precision: str
    threads: int

    @classmethod
    def prepare(cls, cfg: BaseConfig) -> "Machine":
        """Set torch's threads and choose the device; ConfigError if CUDA is requested and absent."""
        available = torch.cuda.is_available()
        if cfg.device == "cuda" and not available:
            raise ConfigError("device=cuda: torch sees no CUDA device here; use device=cpu or device=auto")
        threads = min(cfg.threads, processors())
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = False  # so that an LSTM's fp32 is fp32, as in torch's own matrix products
        device = torch.device("cuda" if available and cfg.device != "cpu" else "cpu")
        dtype = torch.float64 if cfg.precision == "fp64" else torch.float32
        return cls(device, dtype, cfg.precision, threads)

    def log_threads(self, requested: int) -> None:
        """Log that fewer threads compute than the config requests, if so."""
        if self.threads < requested:
            log.info("threads=%d: one for each processor computes, %d", requested, self.threads)

    def memory(self) -> int:
        """Bytes of the device's memory."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return physical_memory()

    def autocast(self) -> AbstractContextManager:
        """bfloat16 arithmetic under precision=bf16, nothing otherwise."""
        if self.precision == "bf16":
            # no cache of cast weights: torch.func's transforms must not see another transform's copies
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def finish(self) -> None:
        """Wait until the device has done its work, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def record(self, command: list[str] | None = None) -> dict:
        """Contents of environment.json: versions, source state, device, command line. command: the equivalent command
        line; None for that of this process."""
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        return {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv if command is None else command,
            "python": platform.python_version(),
            "packages": packages(),
            "git": git_state(),
            "source": source_digest(),
            "plugins": plugins.digest(),
            "platform": platform.platform(),
            "device": str(self.device),
            "gpu": gpu,
            "gpu_index": torch.cuda.current_device() if gpu else None,
            "precision": self.precision,
            "threads": self.threads,
        }


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the work computes: CPU time of this process, which does not count while another process has the
    processor, or on a GPU the time between two events of the device."""
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize(device)
        return began.elapsed_time(ended) / 1000
    before = time.process_time()
    work()
    return time.process_time() - before


def processors() -> int:
    """Number of processors that this process may use. More threads than that only wait for each other, and where the
    system grants no more threads, torch's library ends the process without a message of ours."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def explaining_memory(machine: Machine) -> Iterator[None]:
    """Turn an allocation error into a ConfigError of one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (reason := refused_allocation(error)) is None:
            raise
        raise ConfigError(
            f"out of memory: {machine.device} has {gib(machine.memory())} ({reason}); give smaller sizes, such "
            "as trainer.batch_size, replicas or the task's, or take a batch in parts with trainer.accumulate"
        ) from None


def refused_allocation(error: MemoryError | RuntimeError) -> str | None:
    """What the error says of the memory that was not granted; None if it is about something else."""
    reason = " ".join(str(error).split()) or type(error).__name__
    is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(x in reason for x in OUT_OF_MEMORY)
    return reason[:200] if is_of_memory else None


def physical_memory() -> int:
    """Bytes of this machine's memory, without its devices'."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gib(num_bytes: int) -> str:
    """A number of bytes in words, in units of 2^30 bytes."""
    return f"{num_bytes / 2**30:,.1f} GiB"


def share_gpus(job: int) -> None:
    """Spread the jobs of a sweep over the visible GPUs: job k computes on GPU k modulo their number.

    This sets torch's current device, not CUDA_VISIBLE_DEVICES: joblib's workers run several jobs in one process, and
    CUDA reads that variable only once.
    """
    if (count := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(job % count)


@cache
def source_digest() -> str:
    """Digest of the package's Python and C++ files, including files that git does not track."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for ending in ("py", "cpp", "h") for path in package.rglob(f"*.{ending}")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


@cache
def packages() -> dict[str, str | None]:
    """The versions of the packages that compute and draw, as they were when first asked for."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ModuleNotFoundError:  # a plain checkout is not installed
        return None


@cache
def git_state() -> dict | None:
    """Commit of the checkout with this code, and whether the code or the configs have changes or untracked files, as it
    was when first asked for; None outside a checkout."""
    package = Path(__file__).resolve().parent

    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", "-C", package, *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    tracked = ask("ls-files", "--error-unmatch", __file__)
    if tracked is None:  # installed inside somebody else's repository
        return None
    changes = ask("status", "--porcelain", "--", ":/rankbench", ":/conf")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(changes)}

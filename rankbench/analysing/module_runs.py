"""Whether a network that is not ours runs on all of its sequences, before anything is measured or written."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rankbench.analyses.analysis import Subject
from rankbench.config.keys import ConfigError, in_one_line
from rankbench.measures.module_padding import SEQUENCES_AT_A_TIME
from rankbench.measures.module_paths import has_channels
from rankbench.measures.module_reading import ReadModule
from rankbench.tasks.task import ABSENT, check_shape


@torch.no_grad()
def check_runs(subject: Subject) -> None:
    """ConfigError if a module does not run on all of its inputs, has no attention, or does not fit the targets."""
    with told(subject.run, f"does not run on inputs={subject.who['task']}"):
        reads = subject.reads
    for read in reads.values():
        check_targets(read, subject.run)
        begin = 0
        for chunk in read.example.split(SEQUENCES_AT_A_TIME):
            end = begin + chunk.num_sequences
            with told(subject.run, f"does not run on sequences {begin + 1} to {end} of inputs={subject.who['task']}"):
                chunk.run(read.module)
            begin = end


def check_targets(read: ReadModule, model: str) -> None:
    """ConfigError if the targets do not fit the module's output, whose sequences come first and tokens next."""
    targets = read.example.targets
    if targets is None or read.upto is not None:
        return
    of_few = read.arranged(torch.empty(read.target.shape, device="meta"))
    shape = (read.example.num_sequences, *of_few.shape[1:])
    check_shape(targets, shape, has_channels(read), f"model={model}: ")
    if not targets.is_floating_point() and not ((targets.long() >= ABSENT) & (targets.long() < shape[-1])).all():
        raise ConfigError(
            f"model={model}: targets from {targets.min()} to {targets.max()}; allowed are classes from 0 to "
            f"{shape[-1] - 1}, and {ABSENT} for tokens that are not scored; give that in place of torch's -100"
        )


@contextmanager
def told(model: str, what: str) -> Iterator[None]:
    """Turn whatever a module raises into one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = in_one_line(error)
        hint = "HYDRA_FULL_ERROR=1 shows where"
        if "_grouped_mm" in reason or "grouped_gemm" in reason or "mat_a" in reason:
            hint = "experts of this kind need precision=fp32, or the library's eager experts"
        raise ConfigError(f"model={model}: {what} ({reason[:300]}); {hint}") from error

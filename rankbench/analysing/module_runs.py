"""Whether a network that is not ours runs on all of its sequences, before anything is measured or written."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rankbench.analyses.analysis import Subject
from rankbench.config.keys import ConfigError, in_one_line
from rankbench.measures.module_padding import SEQUENCES_AT_A_TIME
from rankbench.measures.module_paths import check_targets


@torch.no_grad()
def check_runs(subject: Subject) -> None:
    """ConfigError if a module does not run on all of its inputs, has no attention, or does not fit the targets."""
    with told(subject.run, f"does not run on inputs={subject.who['task']}"):
        reads = subject.reads
    for read in reads.values():
        if read.upto is None:  # of a submodule's result only the analyses that score it ask
            check_targets(read)
        begin = 0
        for chunk in read.example.split(SEQUENCES_AT_A_TIME):
            end = begin + chunk.num_sequences
            with told(subject.run, f"does not run on sequences {begin + 1} to {end} of inputs={subject.who['task']}"):
                chunk.run(read.module)
            begin = end


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

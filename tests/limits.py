"""Limits on what this process may take, as a full disk or a small memory would set them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(kind: int, num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse more than this. kind: RLIMIT_FSIZE, the size of a file; RLIMIT_AS, the address space."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)

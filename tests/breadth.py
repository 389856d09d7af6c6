"""Parameters of a test whose cases differ little: some are always run, all of them by `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """Cases for `parametrize`; all but those whose number `every` divides are marked `slow`. A tuple is several
    arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if number % every else ())
        for number, case in enumerate(cases)
    ]

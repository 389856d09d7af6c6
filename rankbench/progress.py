"""What a user sees while rankbench works: progress bars, and the log on the terminal and in a file."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib.logging import _TqdmLoggingHandler as TerminalHandler


def bar(*args: Any, **kwargs: Any) -> tqdm:
    """tqdm's bar on a terminal and in a notebook; a disabled one elsewhere, where log lines replace it."""
    return tqdm(*args, **kwargs, disable=not (sys.stderr.isatty() or _is_notebook(sys.stderr)))


def _is_notebook(stream: Any) -> bool:
    """Whether the stream is shown in a notebook's cell."""
    return type(stream).__module__ == "ipykernel.iostream"


@contextmanager
def logging_to(path: Path | None, to_terminal: bool = True) -> Iterator[None]:
    """Write rankbench's log to a file, if one is given, and to the terminal, without time stamps and around the bar."""
    log = logging.getLogger("rankbench")
    level, handlers = log.level, list[logging.Handler]()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
        handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if to_terminal:
        handlers.append(TerminalHandler())
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()

"""What a user sees while rankbench works: progress bars, and the log on the terminal and in a file."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib.logging import _TqdmLoggingHandler as TerminalHandler

from rankbench.keys import ConfigError

log = logging.getLogger(__name__)


def bar(*args: Any, **kwargs: Any) -> tqdm:
    """tqdm's bar on a terminal and in a notebook; a disabled one elsewhere, where log lines replace it."""
    in_notebook = type(sys.stderr).__module__ == "ipykernel.iostream"
    return tqdm(*args, **kwargs, disable=not (sys.stderr.isatty() or in_notebook))


class LogFile(logging.FileHandler):
    """A log file that ends, with one line on the terminal, when the disk refuses to take more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Close the file at an error of the disk."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        self.setLevel(logging.CRITICAL + 1)  # removed from the logger here, it would make it skip the next handler
        self.close()
        log.warning("%s: the log ends here (%s)", self.baseFilename, error.strerror)

    def close(self) -> None:
        """Close the file; a line that the disk did not take is lost."""
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(path: Path | None, to_terminal: bool = True) -> Iterator[None]:
    """Write rankbench's log to a file, if one is given, and to the terminal, without time stamps and around the bar."""
    log = logging.getLogger("rankbench")
    level, handlers = log.level, list[logging.Handler]()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # the opening of a pipe would wait for its reader
            raise ConfigError(f"{path}: not a regular file; remove it")
        handlers.append(LogFile(path, encoding="utf-8"))
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

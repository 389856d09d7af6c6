"""What a user sees while rankbench works: progress bars, times left, and the log on the terminal and in a file."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rankbench.keys import ConfigError

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger(__name__)

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}  # of times, in seconds
PAUSE = 60.0  # seconds between two lines about the same work

Item = TypeVar("Item")


def bar(*args: Any, **kwargs: Any) -> "tqdm":
    """tqdm's bar on a terminal and in a notebook; a disabled one elsewhere, where log lines replace it."""
    from tqdm.auto import tqdm  # help and --cfg need the module's words, and not a bar

    in_notebook = type(sys.stderr).__module__ == "ipykernel.iostream"
    return tqdm(*args, **kwargs, disable=not (sys.stderr.isatty() or in_notebook))


def counted(
    items: Iterable[Item], total: int, what: str, size: Callable[[Item], int] = lambda item: 1
) -> Iterator[Item]:
    """The items, with a bar below those that are there; where there is none, a line with the time left each minute.

    total: of all items' sizes. what: the work and its unit, as in `paths: sequences`.
    """
    done, began, told = 0, time.monotonic(), time.monotonic()
    with bar(total=total, desc=what, leave=False) as progress:
        for item in items:
            yield item
            done += size(item)
            progress.update(size(item))
            now = time.monotonic()
            if progress.disable and now - told > PAUSE and done < total:
                left = duration((now - began) * (total - done) / done)
                log.info("%s: %d of %d, about %s left", what, done, total, left)
                told = now


def duration(seconds: float) -> str:
    """A time in the largest unit that it has one of."""
    unit = next((unit for unit in ("d", "h", "min") if seconds >= UNITS[unit]), "s")
    return f"{seconds / UNITS[unit]:.3g} {unit}"


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
        from tqdm.contrib.logging import _TqdmLoggingHandler as TerminalHandler

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

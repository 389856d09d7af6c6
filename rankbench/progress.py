"""What a user sees while rankbench works: progress bars, times left, and the log on the terminal and in a file."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rankbench.config.keys import ConfigError

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger(__name__)

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}  # of times, in seconds
PAUSE = 60.0  # seconds between two lines about the same work

Item = TypeVar("Item")


def bar(*args: Any, **kwargs: Any) -> "tqdm":
    """tqdm's bar on a terminal and in a notebook; a disabled one elsewhere, where log lines replace it."""
    from tqdm.auto import tqdm  # here, because help and --cfg import this module but draw no bar

    in_notebook = type(sys.stderr).__module__ == "ipykernel.iostream"
    return tqdm(*args, **kwargs, disable=not (sys.stderr.isatty() or in_notebook))


def counted(
    items: Iterable[Item], total: int, what: str, size: Callable[[Item], int] = lambda item: 1
) -> Iterator[Item]:
    """Yield the items with a progress bar below any other bars; without bars, log the time left each minute.

    total: the sum of all items' sizes. what: the work and its unit, as in `paths: sequences`.
    """
    done, began, last_logged = 0, time.monotonic(), time.monotonic()
    with bar(total=total, desc=what, leave=False) as progress:
        for item in items:
            yield item
            done += size(item)
            progress.update(size(item))
            now = time.monotonic()
            if progress.disable and now - last_logged > PAUSE and done < total:
                left = duration((now - began) * (total - done) / done)
                log.info("%s: %d of %d, about %s left", what, done, total, left)
                last_logged = now


def duration(seconds: float) -> str:
    """A time in words, in the largest unit of which it has at least one."""
    unit = next((unit for unit in ("d", "h", "min") if seconds >= UNITS[unit]), "s")
    return f"{seconds / UNITS[unit]:.3g} {unit}"


class LogFile(logging.FileHandler):
    """A log file that ends, with one line on the terminal, when the disk refuses to take more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Close the file after a disk error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        self.setLevel(logging.CRITICAL + 1)  # removing the handler now would make the logger skip the next one
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
        if path.exists() and not path.is_file():  # opening a pipe would wait for its reader
            raise ConfigError(f"{path}: not a regular file; remove it")
        handlers.append(LogFile(path, encoding="utf-8", errors="backslashreplace"))
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

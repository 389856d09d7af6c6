"""The processes that joblib starts for a sweep: they end when the sweep's own process does."""

import os
import signal
import threading
import time
from functools import cache

SECONDS_BETWEEN_LOOKS = 1
SECONDS_TO_SAVE = 10  # for a training to finish its step and save a checkpoint


@cache  # each of a worker's jobs asks for it
def end_with(sweep: int) -> None:
    """End this process soon after the process `sweep`, its parent, has ended in any way, even killed."""
    threading.Thread(target=_watch, args=(sweep,), name="end with the sweep", daemon=True).start()


def _watch(sweep: int) -> None:
    while os.getppid() == sweep:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)
    # after its training the worker would wait for another job forever
    time.sleep(SECONDS_TO_SAVE)
    os.kill(os.getpid(), signal.SIGKILL)

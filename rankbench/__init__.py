"""rankbench: what do heads, depth, skips, MLPs and norms do to the rank and the smoothness of a transformer?

import rankbench as rb

run = rb.train("experiment=demo", "replicas=3")
tables = rb.analyze(run, "residual", "paths", sequences=64)
rb.plot(tables["paths"])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankbench.api import analyze, by_layer, load, load_sweep, plot, train
    from rankbench.config.keys import ConfigError
    from rankbench.observing.observer import observe
    from rankbench.observing.triage import Stopped
    from rankbench.report.joined_tables import Runs
    from rankbench.runs.run import Run

__version__ = "0.1.0"
__all__ = ["ConfigError", "Run", "Runs", "Stopped", "analyze", "by_layer", "load", "load_sweep", "observe", "plot"]
__all__ += ["train"]
_ROOMS = {"ConfigError": "rankbench.config.keys", "observe": "rankbench.observing.observer"}
_ROOMS |= {"Stopped": "rankbench.observing.triage"}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: `import rankbench` alone loads no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'rankbench' has no attribute '{name}'")
    return getattr(import_module(_ROOMS.get(name, "rankbench.api")), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

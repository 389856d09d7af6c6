"""The tasks by name. A new task needs a file here, a YAML file in conf/task and a line in TASKS."""

from typing import Any

from rankbench.config.keys import check_known, typed
from rankbench.tasks.backcopy import Backcopy
from rankbench.tasks.char_lm import CharLm
from rankbench.tasks.circle_arcs import CircleArcs
from rankbench.tasks.convex_hull import ConvexHull
from rankbench.tasks.linear_regression import LinearRegression
from rankbench.tasks.memorization import Memorization
from rankbench.tasks.nearest_neighbor import NearestNeighbor
from rankbench.tasks.retrieval import Retrieval
from rankbench.tasks.sorting import Sorting
from rankbench.tasks.task import Batch, Corpus, Finite, Task, check_sample

__all__ = ["TASKS", "Batch", "Corpus", "Finite", "Task", "build_task", "check_sample"]

TASKS: dict[str, Any] = {
    "sorting": Sorting,
    "memorization": Memorization,
    "convex_hull": ConvexHull,
    "circle_arcs": CircleArcs,
    "char_lm": CharLm,
    "nearest_neighbor": NearestNeighbor,
    "linear_regression": LinearRegression,
    "backcopy": Backcopy,
    "retrieval": Retrieval,
}


def build_task(options: dict[str, Any]) -> Task:
    """Build the task of the config's `task` group; ConfigError for an unknown task or wrong options."""
    name = options.get("name")
    check_known("task.name", [name], TASKS)
    return typed(TASKS[str(name)], options, "task")

"""The tasks by name. A new one is a file here, a YAML in conf/task and a line in TASKS."""

from typing import Any

from rankbench.config import ConfigError, typed, unknown
from rankbench.tasks.circle_arcs import CircleArcs
from rankbench.tasks.convex_hull import ConvexHull
from rankbench.tasks.memorization import Memorization
from rankbench.tasks.sorting import Sorting
from rankbench.tasks.task import Batch, Task

__all__ = ["TASKS", "Batch", "Task", "build_task"]

TASKS: dict[str, type[Task]] = {
    "sorting": Sorting,
    "memorization": Memorization,
    "convex_hull": ConvexHull,
    "circle_arcs": CircleArcs,
}


def build_task(options: dict[str, Any]) -> Task:
    """The task that the config's `task` group describes; ConfigError for an unknown one or wrong options."""
    name = options.get("name")
    if not isinstance(name, str) or name not in TASKS:
        raise ConfigError(unknown("task.name", name, TASKS))
    return typed(TASKS[name], options, "task")

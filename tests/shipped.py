"""Tasks and options of analyses as conf/ ships them, with some of their keys changed."""

import copy
import functools
from typing import Any

from omegaconf import OmegaConf

from rankbench.analyses import ANALYSES
from rankbench.config.keys import typed
from rankbench.config.schema import conf_dir
from rankbench.tasks import Task, build_task


def shipped(file: str) -> dict[str, Any]:
    """The values of conf/<file>.yaml."""
    return copy.deepcopy(_loaded(file))


@functools.cache
def _loaded(file: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{file}.yaml"), resolve=True)


def task_of(name: str, /, **changes: Any) -> Task:
    """conf/task/<name>.yaml with these keys changed."""
    return build_task({**shipped(f"task/{name}"), **changes})


def options_of(name: str, /, **changes: Any) -> Any:
    """conf/analysis/<name>.yaml with these keys changed, as the dataclass of the analysis."""
    return typed(ANALYSES[name].options, {**shipped(f"analysis/{name}"), **changes}, f"analysis.{name}")

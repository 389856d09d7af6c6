"""What several test files build: a model's config and a task, from the values of the shipped YAML files."""

from collections.abc import Callable

import pytest
from omegaconf import OmegaConf

from rankbench.config import ModelConfig, conf_dir
from rankbench.tasks import Task, build_task


# The factories keep no state, so one for the whole session is safe, and hypothesis accepts them.
@pytest.fixture(scope="session")
def model_config() -> Callable[..., ModelConfig]:
    """model_config(**changes): conf/model/transformer.yaml with these keys changed."""
    shipped = OmegaConf.load(conf_dir() / "model" / "transformer.yaml")

    def make(**changes: object) -> ModelConfig:
        return ModelConfig(
            **OmegaConf.to_container(OmegaConf.create({"model": {**_raw(shipped), **changes}}), resolve=True)["model"]
        )

    return make


@pytest.fixture(scope="session")
def sorting_task() -> Callable[..., Task]:
    """sorting_task(**changes): conf/task/sorting.yaml with these keys changed."""
    shipped = _raw(OmegaConf.load(conf_dir() / "task" / "sorting.yaml"))
    return lambda **changes: build_task({**shipped, **changes})


def _raw(config) -> dict:
    return OmegaConf.to_container(config, resolve=False)

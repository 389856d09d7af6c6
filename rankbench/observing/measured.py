"""What a watch measures: rank and residual of states, attention of each head, spectral norms of weights."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rankbench.analyses import Foreign, Subject, attention, residual
from rankbench.config.keys import ConfigError, in_one_line
from rankbench.measures.module_reading import read_module
from rankbench.measures.module_states import layers_of
from rankbench.measures.network_table import in_words
from rankbench.measures.norms import at_least_float32, spectral_norm
from rankbench.measures.token_views import DEFAULT_VIEWS, View
from rankbench.model.modules import Example, as_example
from rankbench.runs.run import OBSERVED
from rankbench.seeds import generator_for

log = logging.getLogger(__name__)

STATES, ATTENTION, WEIGHTS = OBSERVED[:3]
MEASURES = ("states", "attention", "weights")


def subject_of(model: nn.Module, inputs: Any, sequences: int, run: str, seed: int, name: str, task: str) -> Subject:
    """The model with a copy of the first inputs on its device: the caller may reuse the tensors for other inputs."""
    example = as_example(inputs, "observe")[:sequences]
    weight = next((x for x in model.parameters() if x.is_floating_point()), None)
    if weight is None:
        raise ConfigError(f"observe: {type(model).__name__} has no parameters; give the model that you train")
    example = example.to(weight.device, weight.dtype)
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (example.args, dict(example.kwargs)))
    example = replace(example, args=args, kwargs=kwargs)
    return Subject(run, seed, foreign=Foreign(name, task, {"given": model}, example))


def rows_by_table(
    model: nn.Module, example: Example, measures: tuple[str, ...], seed: int
) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """For each table, the function that makes its rows. A table that cannot be measured is left out, and logged."""
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {}
    read_once = cache(partial(read_module, model, example))
    if "states" in measures:
        with _left_out(STATES):
            layers, views = layers_of(read := read_once()), [View(name) for name in DEFAULT_VIEWS]
            rows_of = partial(residual.rows_by_layer, read, layers, read.example, views=views)
            parts[STATES] = lambda: rows_of(generator=generator_for(seed, "rounding"))
    if "attention" in measures:
        with _left_out(ATTENTION):
            of_heads = read_once()
            log.info(in_words(of_heads, ""))
            parts[ATTENTION] = lambda: attention.rows_by_head(of_heads, of_heads.example)
    if "weights" in measures:
        parts[WEIGHTS] = lambda: rows_by_parameter(model)
    return parts


@contextmanager
def _left_out(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what a model returns can make its reading fail in any way; its training goes on
        reason = error if isinstance(error, ConfigError) else in_one_line(error)[:300]
        log.warning("%s is left out: %s", name, reason)


def rows_by_parameter(model: nn.Module) -> Iterator[dict[str, Any]]:
    """A row for each parameter with two axes: its name, its sizes, and its spectral norm by an exact SVD."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and weight.is_floating_point():
            rows, columns = weight.shape
            norm = spectral_norm(at_least_float32(weight.detach())).item() if weight.isfinite().all() else float("nan")
            yield {"parameter": name, "rows": rows, "columns": columns, "spectral_norm": norm}

"""What several test files build: a model's config, from the keys' defaults, and a task, from its shipped file."""

import contextlib
import dataclasses
import functools
import gc
import html
import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import torch
from drawn import generator, randomised, transformer
from jinja2.bccache import Bucket
from matplotlib.figure import Figure
from matplotlib.text import Text
from shipped import task_of

from rankbench.analyses import ANALYSES, Subject
from rankbench.config.model import ModelConfig
from rankbench.measures import rounding
from rankbench.model import initial_model
from rankbench.model.network import run
from rankbench.model.transformer import Transformer
from rankbench.plots.figure import Layout
from rankbench.report import page
from rankbench.tasks import Batch, Task

ALWAYS = 2  # cases of a test that always run
APART = {"slow", "smoke", "slurm", "gpu"}  # marks of tests that `make test` does not run


def pytest_configure(config: pytest.Config) -> None:
    """Hide every GPU, also from the commands that tests start, unless the tests of one are asked for: `-m gpu`.

    Everything else tests the numbers of the CPU, which device=auto would not give on a machine with a GPU.
    """
    words = config.getoption("markexpr").split()
    if "gpu" not in words or "not" in words:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # until all is imported
    os.fsync = lambda _: None  # no folder of a test has to outlive a power cut; tests/power_cuts.py watches the calls


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test beyond ALWAYS, spread evenly, as `further`, which `make test` leaves out."""
    functions = defaultdict(list)
    for item in items:
        if not APART & {mark.name for mark in item.iter_markers()}:
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        always = {number * (len(cases) - 1) // (ALWAYS - 1) for number in range(ALWAYS)}
        for number, case in enumerate(cases):
            if len(cases) > ALWAYS and number not in always:
                case.add_marker("further")


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and never in what has been imported: a tenth of the suite's time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 50, 100)


class _CompiledTemplates(jinja2.BytecodeCache):
    """Jinja's templates as compiled earlier in this process."""

    def __init__(self) -> None:
        self.codes: dict[tuple[str, str], Any] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self.codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.codes[bucket.key, bucket.checksum] = bucket.code


@pytest.fixture(scope="session", autouse=True)
def templates_compiled_once() -> Iterator[None]:
    """Compile the templates of pages once, not for each page: a third of a scoreboard's time."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.partial(page.Environment, bytecode_cache=_CompiledTemplates())
        patch.setattr(page, "Environment", once)
        yield


# The factories keep no state, so one for the whole session is safe, and hypothesis accepts them.
@pytest.fixture(scope="session")
def model_config() -> Callable[..., ModelConfig]:
    """model_config(**changes): the default model with these keys changed."""
    return ModelConfig


@pytest.fixture(scope="session")
def sorting_task() -> Callable[..., Task]:
    """sorting_task(**changes): conf/task/sorting.yaml with these keys changed."""
    return functools.partial(task_of, "sorting")


@pytest.fixture(scope="session")
def random_network() -> Callable[..., tuple[Transformer, Batch]]:
    """random_network(num_sequences, seed, padded=False, **model keys): a small float64 network with random parameters,
    and so many sequences of 4 of 5 letters, with random classes of 3; padded ones have from 2 tokens on."""

    def make(num_sequences: int, seed: int, padded: bool = False, **changes: object) -> tuple[Transformer, Batch]:
        sizes, draws = {"num_inputs": 5, "num_outputs": 3, "length": 4, "padded": padded}, generator(seed)
        model = transformer(**sizes, **{"name": "small", "width": 4, **changes})
        randomised(model, draws, 0.6).requires_grad_(False)
        inputs = torch.randint(5, (num_sequences, 4), generator=draws)
        targets = torch.randint(3, (num_sequences, 4), generator=draws)
        if padded:
            behind = torch.arange(4) >= torch.randint(2, 5, (num_sequences, 1), generator=draws)
            inputs, targets = inputs.masked_fill(behind, -1), targets.masked_fill(behind, -1)
        return model, Batch(inputs, targets)

    return make


@pytest.fixture(scope="session")
def random_subject(random_network) -> Callable[..., Subject]:
    """random_subject(seed=3, train=9, test=12, kinds=("trained", "initialised"), **keys of random_network): so many
    sequences, and a network with random parameters for each kind of weights."""

    def make(seed=3, train=9, test=12, kinds=("trained", "initialised"), **changes) -> Subject:
        draws = [random_network(train + test, 10 * seed + number, **changes) for number in range(len(kinds))]
        models, (_, batch) = {kind: model for kind, (model, _) in zip(kinds, draws, strict=True)}, draws[0]
        task = SimpleNamespace(name="sorting", num_outputs=3)
        return Subject("a run", seed, task, batch[:train], batch[train:], models)

    return make


@pytest.fixture(scope="session")
def fresh_subject(model_config, sorting_task) -> Callable[..., Subject]:
    """fresh_subject(seed=0, sequences=4, length=8, kinds=("initialised",), **model keys): so many sequences to sort,
    and a fresh network in float64 for each kind of weights, each with a seed of its own."""

    def make(seed=0, sequences=4, length=8, kinds=("initialised",), **changes) -> Subject:
        task, cfg = sorting_task(length=length, test_size=sequences), model_config(**changes)
        networks = [initial_model(cfg, task, seed + n).double().requires_grad_(False) for n in range(len(kinds))]
        batch = task.sample(sequences, torch.Generator().manual_seed(seed))
        return Subject("fresh", seed, task, batch, batch, dict(zip(kinds, networks, strict=True)))

    return make


def _nothing_painted() -> Iterator[None]:
    """Save each figure of the module's tests as an empty page, SVG with its words: arranging and painting takes
    most of a small run's time. tests/plots/test_plots.py and the presets' smoke runs paint."""
    paint = Figure.savefig

    @functools.cache
    def empty_page(kind: str) -> bytes:
        image = io.BytesIO()
        paint(Figure(figsize=(1, 1)), image, format=kind)
        return image.getvalue()

    def save(figure: Figure, image: io.BytesIO, *, format: str, **_: object) -> None:
        page = empty_page(format)
        if format == "svg":
            words = "".join(f"<text>{html.escape(text.get_text())}</text>" for text in figure.findobj(Text))
            page = page.replace(b"</svg>", f"{words}</svg>".encode())
        image.write(page)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        patch.setattr(Layout, "execute", lambda *_: None)
        yield


def _nothing_drawn() -> Iterator[None]:
    """Save an empty page for each figure of the module's tests, which are about everything else that a command leaves:
    drawing takes two fifths of a small sweep's time."""
    from rankbench.report import figures

    def empty(draw: Callable[..., Figure]) -> Callable[..., Figure]:
        return functools.wraps(draw)(lambda *_, **__: Figure())  # its docstring is the figure's caption

    with contextlib.contextmanager(_nothing_painted)(), pytest.MonkeyPatch.context() as patch:
        for name, analysis in dict(ANALYSES).items():
            if analysis.figure is not None:
                patch.setitem(ANALYSES, name, dataclasses.replace(analysis, figure=empty(analysis.figure)))
        patch.setattr(figures, "FIGURES", {name: empty(draw) for name, draw in figures.FIGURES.items()})
        for name in ("draw_sweep", "draw_scatter", "draw_differences"):
            patch.setattr(figures, name, empty(getattr(figures, name)))
        yield


def _floors_rounded_once() -> Iterator[None]:
    """Measure floors by one pass with random rounding, not by eight: the module's tests ask for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "MOST_PASSES", 1)
        yield


unpainted, undrawn, rounded_once = map(
    pytest.fixture(scope="module"), (_nothing_painted, _nothing_drawn, _floors_rounded_once)
)
# the same for one test
unpainted_here, undrawn_here, rounded_once_here = map(
    pytest.fixture, (_nothing_painted, _nothing_drawn, _floors_rounded_once)
)


@pytest.fixture
def graphs(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs that torch.compile traces from now on. They are run as they are, without a compiler's minutes.

    Tests that take it ignore DeprecationWarning: torch's compiler imports deprecated parts of torch.
    """
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    return traced


@pytest.fixture(scope="session")
def states_by_layer() -> Callable[..., list[torch.Tensor]]:
    """states_by_layer(network, inputs): the embedding and the state behind each layer, L + 1 in all."""

    def states(network, inputs):
        by_layer = {}
        for step in run(network, inputs):
            by_layer.setdefault(step.sublayer.layer - 1, step.input_BND)
            by_layer[step.sublayer.layer] = step.output_BND
        return list(by_layer.values())

    return states

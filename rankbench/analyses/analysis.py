"""Analysis, and the subjects that it measures, a few sequences at a time."""

import copy
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError, check_fields
from rankbench.config.schema import TrainConfig
from rankbench.measures.module_reading import NOTHING_ASKED, Asked, ReadModule, read_module
from rankbench.model.lstm import Lstm
from rankbench.model.modules import Example
from rankbench.model.pretrained import FAMILIES
from rankbench.plots.figure import Figure
from rankbench.plots.pages import MOST_PANELS
from rankbench.progress import counted
from rankbench.runs.tables import fall_in_last_quarter
from rankbench.tasks import Batch
from rankbench.tasks.task import Score, score

SEQUENCES_AT_A_TIME = 1000  # in a forward pass of the whole network
NO_SEQUENCES = Batch(torch.empty(0, 0), torch.empty(0, 0))

# What an analysis can need of a subject besides modules with an example of their inputs; in words.
NEEDS = {
    "attention": "attention heads",
    "sublayers": f"the sub-layers of a network of ours or of {', '.join(FAMILIES)}",
    "task": "a network of ours with its task",
    "history": "a training of ours",
}


@dataclass(frozen=True)
class Foreign:
    """Modules that are not ours, as their author or their library made them, with the arguments that they are given.

    modules: by weights (given; of a checkpoint trained, initialised). asked: how the user wants them to be read. half:
    which part of a checkpoint they are, in words. unknown: share of the tokens that its tokenizer does not know.
    """

    name: str
    inputs: str  # name of the inputs
    modules: Mapping[str, nn.Module]
    example: Example
    asked: Asked = NOTHING_ASKED
    half: str = ""
    unknown: float | None = None


@dataclass(frozen=True)
class Subject:
    """One seed of what a command measures: of a run, of fresh networks, or of a network that is not ours.

    Each has modules with an example of their inputs, and can be read as any torch module can. What only some have is in
    NEEDS. Checks get a run's subject before there are weights: its task, its training, a network on the meta device.
    """

    run: str  # name of the run's folder, `fresh`, or the network as the user named it
    seed: int
    task: Any = None  # a Task, or the texts of a checkpoint
    train: Batch = NO_SEQUENCES  # sequences that this seed was trained on; only some of an endless stream or a corpus
    test: Batch = NO_SEQUENCES
    networks: Mapping[str, Any] = field(default_factory=dict)  # by weights (trained, initialised), as in `network`
    history: pd.DataFrame | None = None  # this seed's rows of layers.csv, if training wrote one
    curve: pd.DataFrame | None = None  # this seed's rows of metrics.csv, if it was trained
    training: TrainConfig | None = None  # config that trains or has trained the networks; None: they stay fresh
    foreign: Foreign | None = None

    @property
    def has(self) -> Set[str]:
        """Which of NEEDS it has."""
        has_sublayers = bool(self.networks) and not isinstance(self.network, Lstm)
        has = {
            "attention": has_sublayers or self.foreign is not None,
            "sublayers": has_sublayers,
            "task": self.foreign is None,
            "history": self.training is not None,
        }
        return {name for name in NEEDS if has[name]}

    @property
    def network(self) -> Any:
        """The Transformer, Lstm or PretrainedNetwork: the trained one if there is one, else the initialised one.

        ConfigError if there are modules alone: an analysis that takes a network needs `task` or `sublayers`.
        """
        if not self.networks:
            raise ConfigError(f"model={self.run}: has modules alone; an analysis of its networks needs sublayers")
        return self.networks["trained" if "trained" in self.networks else "initialised"]

    def networks_in_float64(self) -> Iterator[tuple[str, Any]]:
        """Weights and a copy in float64 of each network, one at a time."""
        for weights, network in self.networks.items():
            yield weights, copy.deepcopy(network).double()

    def inputs_in_float64(self, sequences: int | None) -> Tensor:
        """The first test inputs, as `networks_in_float64` read them."""
        inputs = self.test.inputs[:sequences]
        return inputs.double() if inputs.is_floating_point() else inputs

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The networks as plain modules, by weights."""
        return self.networks if self.foreign is None else self.foreign.modules

    @cached_property
    def example(self) -> Example:
        """The arguments of `modules`: of networks of ours the test set.

        They run with the table of weights, on every device and for every number of tokens: the fused kernel would show
        the softmax alone, without the gains of the values that contractive L2 and cosine attention have.
        """
        if self.foreign is not None:
            return self.foreign.example
        inputs, network = self.test.inputs, self.network
        how = {} if isinstance(network, Lstm) else {"kernel": "table"}
        return Example((inputs,), how, self.test.targets, network.lengths(inputs), kinds=network.kinds)

    @cached_property
    def reads(self) -> dict[str, ReadModule]:
        """What was read of each module, by weights."""
        asked = NOTHING_ASKED if self.foreign is None else self.foreign.asked
        return {weights: read_module(module, self.example, asked) for weights, module in self.modules.items()}

    def score(self, sequences: Batch) -> Score:
        """The score of the whole network, the trained one if there is one."""
        outputs = torch.cat([self.network(inputs) for inputs in sequences.inputs.split(SEQUENCES_AT_A_TIME)])
        return score(outputs, sequences.targets)

    @property
    def device(self) -> torch.device:
        """Device of its networks and sequences, and so of whatever an analysis draws."""
        return self.test.inputs.device

    @property
    def how_trained(self) -> dict[str, float]:
        """The column loss_fall (rankbench.analyses.columns). A fresh model has none."""
        if self.curve is None:
            return {}
        test = self.curve[self.curve.split == "test"]
        return {"loss_fall": fall_in_last_quarter(test.set_index("step").loss)}

    @property
    def what_counts(self) -> dict[str, str]:
        """The column special_tokens (rankbench.analyses.columns); none if all tokens of a network of ours count."""
        if self.foreign is None and not self.network.kinds.left_out:
            return {}
        parts = ["in" if self.example.special_BN is None else "out", *self.example.kinds.left_out]
        return {"special_tokens": "+".join(parts)}

    @property
    def who(self) -> dict[str, str | int]:
        """The columns that every table begins with."""
        if self.foreign is None:
            return {"run": self.run, "task": self.task.name, "model": self.network.name, "seed": self.seed}
        return {"run": self.run, "task": self.foreign.inputs, "model": self.foreign.name, "seed": self.seed}


def chunks(sequences: Batch, at_a_time: int, what: str) -> Iterator[Batch]:
    """Yield this many sequences at a time, with a progress bar. what: the work, as in `paths: sequences`."""
    num_sequences = len(sequences.inputs)
    batches = (sequences[begin : begin + at_a_time] for begin in range(0, num_sequences, at_a_time))
    return counted(batches, num_sequences, what, lambda batch: len(batch.inputs))


def each_sequence(x: Tensor, lengths_B: Tensor | None) -> Iterator[Tensor]:
    """Yield each sequence of inputs or states, (N, ...), without its absent tokens."""
    return (x_N if lengths_B is None else x_N[: lengths_B[number]] for number, x_N in enumerate(x))


@dataclass(frozen=True)
class Analysis:
    """One analysis: its options, table, figure and digest, and what it needs of a subject.

    options: a dataclass with a field for each key of conf/analysis/<name>.yaml. table: one subject's rows, without
    Subject.who. figure: the function of rankbench.plots that draws the table of all subjects, given published numbers
    and the column whose values are panels (each may be None); None if there is nothing to draw. digest: the table in a
    few lines of text. columns: what each column of the table means, with its unit; columns of a kind once, as sigma_<k>
    (rankbench.runs.tables.family). recognised_by: columns that only this table has.

    needs: a few of NEEDS; a subject that lacks one is refused. Without any, every torch module can be measured. check:
    raises ConfigError, before anything is written, for a subject that lacks more than that. trained_alone: whether of
    several networks only the trained one is measured.

    A sweep's figure: lines, the column whose values are its lines, which a varied key can join; most_panels, the limit
    of one file; drawn_apart, for a figure without facets, the columns that distinguish runs.
    """

    options: type
    table: Callable[[Subject, Any], pd.DataFrame]
    figure: Callable[[pd.DataFrame, pd.DataFrame | None, str | None], Figure] | None
    digest: Callable[[pd.DataFrame], str]
    columns: Mapping[str, str]
    recognised_by: tuple[str, ...]
    needs: Set[str] = frozenset()
    check: Callable[[Subject, Any], None] | None = None
    trained_alone: bool = False
    lines: str | None = None
    most_panels: int = MOST_PANELS
    drawn_apart: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self.options, "options")
        for name in ("table", "digest", *(name for name in ("figure", "check") if getattr(self, name) is not None)):
            if not callable(value := getattr(self, name)):
                raise ConfigError(f"{name} is of type {type(value).__name__}; give a function")
        if not isinstance(self.columns, Mapping):
            raise ConfigError(f"columns is of type {type(self.columns).__name__}; give a dict of names and meanings")
        if isinstance(self.recognised_by, str) or (unknown := set(self.recognised_by) - set(self.columns)):
            wrong = self.recognised_by if isinstance(self.recognised_by, str) else min(unknown)
            raise ConfigError(f"recognised_by={wrong!r}: give a tuple of columns; they are {', '.join(self.columns)}")
        if unknown := self.needs - NEEDS.keys():
            raise ConfigError(f"needs={min(unknown)}: unknown; allowed are {', '.join(NEEDS)}")

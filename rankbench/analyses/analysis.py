"""Analysis, and the subjects that it measures, a few sequences at a time."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn

from rankbench.config import TrainConfig
from rankbench.measures.module_reading import NOTHING_ASKED, Asked, ReadModule, read_module
from rankbench.model.modules import Example
from rankbench.plots.figure import Figure
from rankbench.plots.pages import MOST_PANELS
from rankbench.progress import counted
from rankbench.runs.tables import fall_in_last_quarter
from rankbench.tasks import Batch, Task
from rankbench.tasks.task import Score, score

SEQUENCES_AT_A_TIME = 1000  # in a forward pass of the whole network


@dataclass(frozen=True)
class Subject:
    """One seed of a run, or one fresh model, with its data."""

    run: str  # name of the run's folder, or `fresh`
    seed: int
    task: Any  # a Task, or the texts of a checkpoint
    train: Batch  # sequences that this seed was trained on; only some of an endless stream or a corpus
    test: Batch
    models: Mapping[str, Any]  # Transformers, Lstms or PretrainedNetworks by weights: trained, initialised, or both
    history: pd.DataFrame | None = None  # this seed's rows of layers.csv, if training wrote one
    curve: pd.DataFrame | None = None  # this seed's rows of metrics.csv, if it was trained
    modules: dict[str, nn.Module] | None = None  # of a checkpoint, by weights: the library's own modules
    example: Example | None = None  # and their arguments
    asked: Asked = NOTHING_ASKED  # how they are to be read
    half: str = ""  # as in ModuleSubject

    @property
    def model(self) -> Any:
        """The trained model if there is one, else the initialised one."""
        return self.models["trained" if "trained" in self.models else "initialised"]

    def models_in_float64(self) -> Iterator[tuple[str, Any]]:
        """Weights and a copy in float64 of each network, one at a time."""
        for weights, model in self.models.items():
            yield weights, copy.deepcopy(model).double()

    def score(self, sequences: Batch) -> Score:
        """The score of the whole network, the trained one if there is one."""
        outputs = torch.cat([self.model(inputs) for inputs in sequences.inputs.split(SEQUENCES_AT_A_TIME)])
        return score(outputs, sequences.targets)

    @property
    def device(self) -> torch.device:
        """Device of its networks and sequences, and so of whatever an analysis draws."""
        return self.test.inputs.device

    @property
    def how_trained(self) -> dict[str, float]:
        """Column that shows whether training had converged: loss_fall, the fall of the test loss (per token) over the
        last quarter of the steps. A fresh model has no such column."""
        if self.curve is None:
            return {}
        test = self.curve[self.curve.split == "test"]
        return {"loss_fall": fall_in_last_quarter(test.set_index("step").loss)}

    @property
    def what_counts(self) -> dict[str, str]:
        """The column of `ModuleSubject.what_counts`; none for networks of ours in which all tokens count."""
        return {} if self.example is None and not self.model.kinds.left_out else self.as_modules.what_counts

    @property
    def who(self) -> dict[str, str | int]:
        """The columns that every table begins with."""
        return {"run": self.run, "task": self.task.name, "model": self.model.name, "seed": self.seed}

    @cached_property
    def as_modules(self) -> "ModuleSubject":
        """The subject's networks as plain modules with the test set, for measurements that work on any module.

        Networks of ours run with the table of weights, on every device and for every number of tokens: the fused kernel
        would show the softmax alone, without the gains of the values that contractive L2 and cosine attention have.
        """
        modules, example = self.modules, self.example
        if modules is None or example is None:
            inputs, targets, how = self.test.inputs, self.test.targets, {"kernel": "table"}
            modules, example = {**self.models}, Example((inputs,), how, targets, self.model.lengths(inputs))
            example = replace(example, kinds=self.model.kinds)
        who = (self.run, self.task.name, self.model.name, self.seed)
        return ModuleSubject(*who, modules, example, self.asked, self.half)


@dataclass(frozen=True)
class ModuleSubject:
    """Any torch modules with inputs: a network that is not ours, or one of ours as a plain module."""

    name: str  # as the user named it
    inputs: str  # name of the inputs
    model: str
    seed: int
    modules: dict[str, nn.Module]  # by weights: given, trained, initialised
    example: Example
    asked: Asked = NOTHING_ASKED
    half: str = ""  # which part of a checkpoint these modules are, in words; empty for all of it

    @cached_property
    def reads(self) -> dict[str, ReadModule]:
        """What was read of each module, by weights."""
        return {weights: read_module(module, self.example, self.asked) for weights, module in self.modules.items()}

    @property
    def what_counts(self) -> dict[str, str]:
        """Column that says whether special tokens count in residuals and sizes of sums: special_tokens, in or out; with
        the names of other kinds that are left out, as in out+first."""
        parts = ["in" if self.example.special_BN is None else "out", *self.example.kinds.left_out]
        return {"special_tokens": "+".join(parts)}

    @property
    def who(self) -> dict[str, str | int]:
        """The columns that every table begins with."""
        return {"run": self.name, "task": self.inputs, "model": self.model, "seed": self.seed}


def chunks(sequences: Batch, at_a_time: int, what: str) -> Iterator[Batch]:
    """Yield this many sequences at a time, with a progress bar. what: the work, as in `paths: sequences`."""
    num_sequences = len(sequences.inputs)
    batches = (sequences[begin : begin + at_a_time] for begin in range(0, num_sequences, at_a_time))
    return counted(batches, num_sequences, what, lambda batch: len(batch.inputs))


class Plan(NamedTuple):
    """What a command is going to measure, before any weights exist."""

    task: Task
    model: Any  # a Transformer, or with any_model an Lstm; without values, on the meta device
    training: TrainConfig | None  # config that trains or has trained the model; None: it stays fresh
    texts: Batch | None = None  # inputs and targets of a checkpoint


@dataclass(frozen=True)
class Analysis:
    """One analysis: its options, table, figure and digest, and the networks that it can measure.

    options: a dataclass with a field for each key of conf/analysis/<name>.yaml. table: one subject's rows, without
    Subject.who. figure: the function of rankbench.plots that draws the table of all subjects, given published numbers
    and the column whose values are panels (each may be None); None if there is nothing to draw. digest: the table in a
    few lines of text. columns: columns that only this table has, by which it is recognised. check: raises ConfigError,
    before anything is written, for a plan that lacks what the analysis needs; None if it needs nothing.

    Networks other than our Transformer: any_model, whether our other models can be measured, too; any_network, whether
    the sub-layers of public checkpoints can; needs, what is needed instead of these, in words; trained_alone, whether
    only one network is measured, the trained one if there is one; of_module, the function for any torch module, None
    if there is none; check_module raises ConfigError for a module, as it was read, that cannot be measured.

    A sweep's figure: lines, the column whose values are its lines, which a varied key can join; most_panels, the limit
    of one file; drawn_apart, for a figure without facets, the columns that distinguish runs.
    """

    options: type
    table: Callable[[Subject, Any], pd.DataFrame]
    figure: Callable[[pd.DataFrame, pd.DataFrame | None, str | None], Figure] | None
    digest: Callable[[pd.DataFrame], str]
    columns: tuple[str, ...]
    any_model: bool = False
    any_network: bool = False
    needs: str | None = None
    trained_alone: bool = False
    lines: str | None = None
    most_panels: int = MOST_PANELS
    drawn_apart: tuple[str, ...] = ()
    check: Callable[[Plan, Any], None] | None = None
    of_module: Callable[[ModuleSubject, Any], pd.DataFrame] | None = None
    check_module: Callable[[ReadModule], Any] | None = None

"""`rankbench new plugin NAME`: the folder of a plug-in that works, to begin with."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rankbench.config.keys import ConfigError

HELP = """Usage: rankbench new plugin NAME

Writes the folder NAME: a plug-in with a task, an attention, an analysis and a preset, and its test. Change what you
need, and delete the rest; docs/EXTENDING.md explains the parts."""
CODE = '''"""A plug-in: `rankbench check plugins=NAME`, then `rankbench train plugins=NAME experiment=NAME`.

Shapes: B batch, N token, M key token, H head, K head width.
"""

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch

from rankbench.analyses import Analysis, Subject
from rankbench.config.keys import key
from rankbench.model.weightings import Softmax, Start
from rankbench.tasks import Batch


@dataclass(frozen=True)
class Reversal:
    """Letters to be given back in the reverse order. The values of its keys are in conf/task/NAME_reversal.yaml."""

    name: str = key("Name of the task.")
    length: int = key("Number of letters in a sequence.", at_least=2)
    alphabet: int = key("Number of letters in the alphabet.", at_least=2)
    train_size: int | None = key("Size of the training set. null: fresh sequences.", unit="sequences", at_least=1)
    test_size: int = key("Size of the test set.", unit="sequences", at_least=1)

    input_kind: ClassVar[str] = "tokens"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = False

    @property
    def num_inputs(self):
        return self.alphabet

    @property
    def num_outputs(self):
        return self.alphabet

    def sample(self, num_sequences, generator):
        letters_BN = torch.randint(self.alphabet, (num_sequences, self.length), generator=generator)
        return Batch(letters_BN, letters_BN.flip(-1))


@dataclass(frozen=True)
class Gated(Softmax):
    """Dot products whose heads can read nothing: a gate sigma(w q + 2) multiplies the output of each query."""

    def gate(self, q_BHNK, heads):
        return (q_BHNK @ heads.own["gate"] + 2).sigmoid()

    def parameters(self, heads):
        return {"gate": Start((heads.head_width,), lambda w, generator: w.normal_(0, 0.1, generator=generator))}


@dataclass(frozen=True)
class Options:
    """The keys of the analysis; their values are in conf/analysis/NAME_weights.yaml."""

    power: float = key("p of the norm of all entries of a weight.", at_least=1)


def table(subject: Subject, options: Options):
    """A row for each parameter."""
    return pd.DataFrame(
        {"weights": weights, "parameter": name, "weight_size": value.norm(options.power).item()}
        for weights, module in subject.modules.items()
        for name, value in module.named_parameters()
    )


def digest(rows):
    """The line that the command prints."""
    return f"NAME_weights: largest {rows.weight_size.max():.3g}"


COLUMNS = {
    "weights": "trained or initialised; of a user's module given.",
    "parameter": "Name of the parameter.",
    "weight_size": "Its norm.",
}
TASKS = {"NAME_reversal": Reversal}
ATTENTIONS = {"NAME_gated": Gated()}
ANALYSES = {"NAME_weights": Analysis(Options, table, None, digest, COLUMNS, ("weight_size",))}
'''
TEST = '''"""The plug-in NAME keeps its promises. Run pytest in the folder that holds the folder NAME."""

import rankbench as rb
from rankbench.commands.check import checked


def test_what_it_brings_keeps_its_promises():
    assert "model.attention=NAME_gated: " in checked(["plugins=NAME"])


def test_its_preset_trains_and_measures(tmp_path):
    run = rb.train("plugins=NAME", "experiment=NAME", "budget=smoke", out=tmp_path / "run")
    assert run.config.task["name"] == "NAME_reversal"
    assert (run.table("NAME_weights").weight_size > 0).any()
'''
FILES = {
    "__init__.py": CODE,
    "conf/task/NAME_reversal.yaml": "name: NAME_reversal\nlength: 6\nalphabet: 8\ntrain_size: null\ntest_size: 200\n",
    "conf/analysis/NAME_weights.yaml": "# @package analysis.NAME_weights\npower: 2.0\n",
    "conf/experiment/NAME.yaml": """# @package _global_
# rankbench train plugins=NAME experiment=NAME      one CPU core: 1 minute; budget=smoke: 2 seconds
# A gated attention that reverses letters.
defaults:
  - override /model: transformer
  - override /task: NAME_reversal
  - override /analysis: [NAME_weights, paths]

model: {layers: 2, attention: NAME_gated}
trainer: {steps: '${by_budget:{paper:1000,laptop:300,smoke:2}}', eval_every: 100}
""",
    "test_NAME.py": TEST,
}


def created(words: Sequence[str]) -> str:
    """Write the folder, and return what to do next. ConfigError for a name that is taken or cannot be a module's."""
    if len(words) != 2 or words[0] != "plugin":
        raise ConfigError(f"new {' '.join(words)}: unknown; use `rankbench new plugin NAME`")
    name = words[1]
    if not (name.isidentifier() and name.islower()):
        raise ConfigError(
            f"new plugin {name}: not the name of a module; use small letters, digits and _, as in my_plugin"
        )
    if (folder := Path(name)).exists():
        raise ConfigError(f"new plugin {name}: {folder.resolve()} exists already; give another name")
    if find_spec(name) is not None:
        raise ConfigError(f"new plugin {name}: a module of this name is installed; give another name")
    for file, text in FILES.items():
        path = folder / file.replace("NAME", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NAME", name), encoding="utf-8")
    return (
        f"-> {folder}/: __init__.py, conf/ and test_{name}.py\n"
        f"try it: rankbench check plugins={name}; rankbench train plugins={name} experiment={name}"
    )

"""The presets, including those of plug-ins that were found, as the comments in their files describe them."""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

from rankbench.config import plugins


class Preset(NamedTuple):
    """A preset: its command, the command's cost, and what it measures, from the comments in its file; empty where a
    plug-in's file says nothing."""

    command: str
    cost: str
    about: str

    @property
    def verb(self) -> str:
        """train or analyze; empty if the file does not say."""
        return self.command.split()[1] if self.command else ""

    @property
    def of_given_network(self) -> bool:
        """Whether the preset measures a network that the user gives, as a checkpoint, a module or a run."""
        return "model.path=" in self.command


def described() -> dict[str, Preset]:
    """The presets by name."""
    by_name = {}
    for name, path in plugins.choices("experiment").items():
        comments = plugins.comments_in(path)
        first = comments.pop(0) if re.match("rankbench (train|analyze) ", "".join(comments[:1])) else ""
        command, _, cost = first.partition("  ")
        about = " ".join(itertools.takewhile(lambda line: not line.startswith("rankbench "), comments))
        sentence = re.split(r"(?<!\bal)(?<!\bapp)(?<!\bsec)\. (?=[A-Z])", about)[0].rstrip(".")
        by_name[name] = Preset(command, cost.strip(), sentence)
    return by_name


def files_of(name: str) -> list[Path]:
    """The file of a preset, behind those that it builds on: other presets, or what several share."""
    paths = [folder / "experiment" / f"{name}.yaml" for folder in plugins.folders()]
    own = [path for path in paths if path.exists()][:1]
    below = [word for path in own for word in plugins.defaults_of(path) if isinstance(word, str)]
    return [path for word in below for path in files_of(word)] + own


def claims_of(name: str) -> list[str] | None:
    """The claims that a preset's file names; None if it names none, or refers to another preset's."""
    claims = plugins.content_of(plugins.choices("experiment")[name]).get("claims")
    return claims if isinstance(claims, list) else None


def all_claims_of(name: str) -> list[str]:
    """The claims that a preset judges: those of its own file, else those of the preset that it builds on."""
    stated = [plugins.content_of(path).get("claims") for path in files_of(name)]
    return next((claims for claims in reversed(stated) if isinstance(claims, list)), [])


def presets() -> dict[str, str]:
    """The command of each preset."""
    return {name: preset.command for name, preset in described().items()}

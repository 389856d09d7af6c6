"""`rankbench list`: the presets by the paper that they repeat, one line each; with words, those that speak of them."""

import re
import textwrap
from collections import Counter

from rankbench.commands.budgets import costs
from rankbench.commands.usage import terminal_width
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, closest
from rankbench.config.presets import Preset, all_claims_of, described
from rankbench.progress import duration
from rankbench.runs.files import OUTPUTS

HELP = """Usage: rankbench list [WORD ...] [plugins=[a]]

Lists the presets by the paper that each repeats, with the time that it takes on CPU cores at budget=laptop. A * marks
those with a complete run in outputs/. With words, lists the presets whose name, description, paper or claims have all
of them, in full: rankbench list entropy. plugins=[a] adds those of a plug-in."""
SOURCE = re.compile(r"(?:The )?(.{,30}?(?:\d{4}|Bruna|blog))(?=[,:'])")  # of a preset, at the start of its description
OTHERS = "Others"
NAME, TIME = 33, 9  # columns


def listing(words: list[str]) -> str:
    """The text of the command."""
    asked = [word.lower() for word in words if not word.startswith("plugins=")]
    if wrong := [word for word in asked if "=" in word or word.startswith("-")]:
        raise ConfigError(f"list {wrong[0]}: takes words to search for, and plugins=[<module>]; leave it out")
    plugins.find(plugins.named(words))
    presets = described()
    papers = _papers(presets)
    texts = {name: " ".join((name, x.about, papers[name], *all_claims_of(name))).lower() for name, x in presets.items()}
    chosen = [name for name, text in texts.items() if all(word in text for word in asked)]
    if not chosen:
        near = closest(asked[0], sorted(set(re.findall(r"\w+", " ".join(texts.values())))))
        raise ConfigError(f"list {' '.join(asked)}: no preset has this{near}; `rankbench list` lists all")
    done, entry, lines = _done(presets), _in_full if asked else _in_a_line, []
    in_order = dict.fromkeys(papers[name] for name in chosen)
    for paper in sorted(in_order, key=lambda paper: paper == OTHERS):
        lines += ["", paper, *(line for name in chosen if papers[name] == paper for line in entry(name, presets, done))]
    return "\n".join(lines[1:])


def _papers(presets: dict[str, Preset]) -> dict[str, str]:
    """The paper of each preset: the one that most descriptions begin with, of the presets whose names begin alike.

    The claims say the same and more, but reading them takes seconds.
    """
    begins = {name: match[1] if (match := SOURCE.match(preset.about)) else "" for name, preset in presets.items()}
    papers = {}
    for name in presets:
        alike = (begins[other] for other in presets if other.partition("_")[0] == name.partition("_")[0])
        papers[name] = next((paper for paper, _ in Counter(filter(None, alike)).most_common()), OTHERS)
    return papers


def _done(presets: dict[str, Preset]) -> dict[str, str]:
    """The folder and the scale of the run here that represents each preset, where one is complete."""
    if not any(OUTPUTS.glob("*/*")):  # the module that finds the runs is slow to load
        return {}
    from rankbench.report.preset_runs import best_runs

    return {name: f"{run.folder}, {run.budget}" for name, run in best_runs(presets, OUTPUTS).items() if run.complete}


def _in_a_line(name: str, presets: dict[str, Preset], done: dict[str, str]) -> list[str]:
    laptop = costs(presets[name].cost)[0]
    time = duration(laptop) if laptop < float("inf") else ""
    line = f"{'*' if name in done else ' '} {name:<{NAME}}{time:<{TIME}}"
    about = presets[name].about
    if (source := SOURCE.match(about)) and about[source.end()] in ",:":  # the heading says it
        about = about[source.end() + 1 :].lstrip()
    return [(line + textwrap.shorten(about, terminal_width() - len(line), placeholder=" ...")).rstrip()]


def _in_full(name: str, presets: dict[str, Preset], done: dict[str, str]) -> list[str]:
    preset = presets[name]
    texts = (f"rankbench {preset.verb}; {preset.cost.rstrip(';')}" if preset.verb else "", preset.about)
    run = f" [{done[name]}]" if name in done else ""
    filled = (textwrap.fill(text, terminal_width() - 6) for text in texts if text)
    return [f"  {name}{run}", *(textwrap.indent(text, " " * 6) for text in filled)]

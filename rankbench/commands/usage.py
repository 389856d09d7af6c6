"""`rankbench COMMAND --help`: the groups, then each key with its value, its meaning and what is allowed."""

import shutil
import textwrap
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from rankbench import plugins
from rankbench.commands.compose import load_plugins
from rankbench.commands.composition import composed
from rankbench.commands.reference import Row, in_words, rows_of, stated, written
from rankbench.config import SCHEMAS
from rankbench.keys import ConfigError, closest

COLUMN = 34  # column in which meanings begin
HEAD = """Usage: rankbench {command} [key=value ...] [-m] [--cfg job]
       rankbench {command} --help GROUP    only its keys: --help model, --help analysis.paths

Groups (group=choice):
{groups}

Keys (key=value), with the values of this command line:
"""
FOOT = """
-m runs every combination of comma-separated values. --cfg job prints the config and runs nothing."""


def usage(command: str, words: list[str]) -> str:
    """The help for a command line. A word without `=` restricts it to the keys below: `model`, `analysis.paths`."""
    asked = [word for word in words if "=" not in word]
    cfg = composed(command, *(word for word in words if "=" in word))
    sections: dict[str, list[Row]] = {}
    for heading, item in _rows(command, cfg, every_analysis=bool(asked)):
        if not asked or any(item.name == word or item.name.startswith(f"{word}.") for word in asked):
            sections.setdefault(heading, []).append(item)
    if not sections:
        groups = sorted({item.name.partition(".")[0] for _, item in _rows(command, cfg, True) if "." in item.name})
        raise ConfigError(
            f"--help {asked[0]}: no keys there{closest(asked[0], groups)}; groups are {', '.join(groups)}"
        )
    text = "\n\n".join("\n".join([head, *(_lines(item) for item in rows)]) for head, rows in sections.items())
    return text if asked else f"{HEAD.format(command=command, groups=_groups(command))}\n{text}\n{FOOT}"


def explained(words: list[str]) -> str:
    """Explain each of these keys: its meaning, what is allowed, its value, and which presets set it. A word plugins=[a]
    adds those of plug-ins."""
    plugins.find(plugins.named(words))
    words = [word for word in words if not word.startswith("plugins=")]
    if not words or any("=" in word or word.startswith("-") for word in words):
        raise ConfigError("explain: which key? as in `rankbench explain model.norm`")
    rows: dict[str, tuple[str, Row]] = {}
    commands: dict[str, list[str]] = {}
    for command in SCHEMAS:
        for heading, item in _rows(command, composed(command), every_analysis=True):
            rows.setdefault(item.name, (heading, item))
            commands.setdefault(item.name, []).append(command)
    for choice, (heading, items) in (stated() if plugins.FOUND else written()).items():
        for item in items:
            rows.setdefault(item.name, (heading, item))
            commands.setdefault(item.name, [f"those with {choice}"])
    return "\n\n".join(_explanation(word, rows, commands) for word in words)


def _explanation(word: str, rows: dict[str, tuple[str, Row]], commands: dict[str, list[str]]) -> str:
    if word not in rows:
        called = [name for name in rows if name.rpartition(".")[2] == word]
        meant = f", did you mean {' or '.join(called)}?" if called else closest(word, list(rows))
        raise ConfigError(f"explain {word}: no such key{meant}; `rankbench train --help` lists those of a command")
    heading, item = rows[word]
    sets = [
        name
        for name, path in plugins.choices("experiment").items()
        if OmegaConf.select(OmegaConf.load(path), word, throw_on_resolution_failure=False) is not None
    ]
    facts = {
        "allowed": item.allowed,
        "value": f"{item.value} ({commands[word][0]})",
        "commands": ", ".join(commands[word]),
        "stated under": heading,
        "set by": ", ".join(sets[:8]) + (f" and {len(sets) - 8} more presets" if len(sets) > 8 else ""),
    }
    lines = [f"{name}: {text}" for name, text in facts.items() if text]
    return "\n".join(
        textwrap.fill(line, _width(), subsequent_indent="    ", break_on_hyphens=False)
        for line in (f"{word}: {item.meaning}", *lines)
    )


def list_of_presets(words: list[str]) -> str:
    """Each preset with its command, its cost, the run here that represents it, and what it measures. A word plugins=[a]
    adds those of plug-ins."""
    if wrong := [word for word in words if not word.startswith("plugins=")]:
        raise ConfigError(f"list {wrong[0]}: takes no key but plugins=[<module>]; leave it out")
    plugins.find(plugins.named(words))
    from rankbench.presets import described
    from rankbench.runs.files import OUTPUTS

    all_presets, runs, width = described(), {}, _width()
    if any(OUTPUTS.glob("*/*")):  # the module that finds the runs is slow to load
        from rankbench.report.preset_runs import best_runs

        runs = best_runs(all_presets, OUTPUTS)
    lines = []
    for name, preset in all_presets.items():
        run = runs.get(name)
        here = "" if run is None else f" [{run.folder}, {run.budget}{'' if run.complete else ', not finished'}]"
        lines.append(f"{name}{here}")
        texts = (f"rankbench {preset.verb}; {preset.cost.rstrip(';')}" if preset.verb else "", preset.about)
        for text in filter(None, texts):
            lines.append(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def _rows(command: str, cfg: DictConfig, every_analysis: bool) -> Iterator[tuple[str, Row]]:
    """The keys of a command with their values, each with its heading."""
    if plugins.FOUND:
        load_plugins()
    yield from rows_of(command, cfg)
    chosen = {f"task={cfg.task.name}", *(f"analysis=[{name}]" for name in cfg.analysis)} if "task" in cfg else set()
    for choice, (heading, rows) in (stated() if plugins.FOUND else written()).items():
        if choice in chosen or (every_analysis and chosen and choice.startswith("analysis")):
            for item in rows:
                yield heading, item._replace(value=in_words(OmegaConf.select(cfg, item.name, default=item.value)))


def _width() -> int:
    """Width of the terminal, but from 80 to 120 columns."""
    return min(max(shutil.get_terminal_size().columns, 80), 120)


def _lines(item: Row) -> str:
    label, indent = f"  {item.name}={item.value}", " " * COLUMN
    start = label.ljust(COLUMN) if len(label) < COLUMN - 1 else indent
    text = textwrap.fill(
        f"{item.meaning} [{item.allowed}]",
        _width(),
        initial_indent=start,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return text if start != indent else f"{label}\n{text}"


def _groups(command: str) -> str:
    """The config groups of a command with their choices, and the folders with those of plug-ins."""
    lines = [f"  {name}: {', '.join(plugins.choices(name))}" for name in sorted(plugins.groups_of(command))]
    lines += [f"  plug-in {name}: {plugin.conf}" for name, plugin in plugins.FOUND.items() if plugin.conf is not None]
    return "\n".join(lines) or "  none"

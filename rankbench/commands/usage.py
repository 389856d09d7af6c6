"""`rankbench COMMAND --help`: the groups, then each key with its value, its meaning and what is allowed."""

import shutil
import textwrap
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from rankbench.commands.compose import load_plugins
from rankbench.commands.composition import composed
from rankbench.commands.reference import Row, in_words, rows_of, sections
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, closest

COLUMN = 34  # column in which meanings begin
KEYS = "Keys (key=value), with the values of this command line:\n"
CFG = "--cfg job prints the config and runs nothing."
SWEEP = "-m runs every combination of comma-separated values."
ONE_JOB = ("data",)  # commands that refuse -m


def usage(command: str, words: list[str]) -> str:
    """The help for a command line. A word without `=` restricts it to the keys below: `model`, `analysis.paths`."""
    asked = [word for word in words if "=" not in word]
    cfg = composed(command, *(word for word in words if "=" in word))
    rows = list(_rows_with_values(command, cfg, every_analysis=bool(asked)))
    shown: dict[str, list[Row]] = {}
    for heading, item in rows:
        if not asked or any(item.name == word or item.name.startswith(f"{word}.") for word in asked):
            shown.setdefault(heading, []).append(item)
    parts = sorted({item.name.partition(".")[0] for _, item in rows if "." in item.name})
    if not shown:
        there = f"groups are {', '.join(parts)}" if parts else f"`rankbench {command} --help` lists all keys"
        raise ConfigError(f"--help {asked[0]}: no keys there{closest(asked[0], parts)}; {there}")
    text = "\n\n".join("\n".join([heading, *map(_lines, items)]) for heading, items in shown.items())
    if asked:
        return text
    sweeps = command not in ONE_JOB
    head = [f"Usage: rankbench {command} [key=value ...] {'[-m] ' if sweeps else ''}[--cfg job]"]
    if parts:
        example = "model, --help analysis.paths" if "model" in parts else parts[-1]
        head.append(f"       rankbench {command} --help GROUP    only its keys: --help {example}")
    if groups := _groups(command):
        head += ["", "Groups (group=choice):", *groups]
    return "\n".join([*head, "", KEYS, text, "", f"{SWEEP} {CFG}" if sweeps else CFG])


def _rows_with_values(command: str, cfg: DictConfig, every_analysis: bool) -> Iterator[tuple[str, Row]]:
    """The keys of a command with their values, each with its heading."""
    if plugins.FOUND:
        load_plugins()
    yield from rows_of(command, cfg)
    chosen = {f"task={cfg.task.name}", *(f"analysis=[{name}]" for name in cfg.analysis)} if "task" in cfg else set()
    for heading, rows in sections().items() if chosen else ():
        if heading.partition(": ")[0] in chosen or (every_analysis and heading.startswith("analysis=")):
            for item in rows.values():
                yield heading, item._replace(value=in_words(OmegaConf.select(cfg, item.name, default=item.value)))


def terminal_width() -> int:
    """Width of the terminal, but from 80 to 120 columns."""
    return min(max(shutil.get_terminal_size().columns, 80), 120)


def _lines(item: Row) -> str:
    label, indent, text = f"  {item.name}={item.value}", " " * COLUMN, f"{item.meaning} [{item.allowed}]"
    lines = textwrap.wrap(text, terminal_width() - COLUMN, break_on_hyphens=False)
    first = [label.ljust(COLUMN) + lines.pop(0)] if len(label) < COLUMN - 1 else [label]
    return "\n".join([*first, *(indent + line for line in lines)])


def _groups(command: str) -> list[str]:
    """The config groups of a command with their choices, and the folders with those of plug-ins."""
    lines = [f"  {name}: {', '.join(plugins.choices(name))}" for name in sorted(plugins.groups_of(command))]
    lines += [f"  plug-in {name}: {plugin.conf}" for name, plugin in plugins.FOUND.items() if plugin.conf is not None]
    return lines

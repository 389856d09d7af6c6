"""`rankbench explain WORD`: what a word of rankbench means: a key, a group of keys, a choice such as a task or an
analysis, a metric, a column of a table, a preset or a claim."""

import re
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from rankbench.commands.compose import load_plugins
from rankbench.commands.reference import METRICS, PAGE, Row, sections, subject_of
from rankbench.commands.usage import terminal_width
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, closest, entries
from rankbench.config.presets import files_of
from rankbench.config.schema import SCHEMAS

HELP = """Usage: rankbench explain WORD [WORD ...] [plugins=[a]]

Explains a key (model.norm), a group of keys (model), a choice of a group (sorting, paths, san), a metric or a column of
a table (effective_rank, outcome), a preset (dong_fig4_sorting) or a claim (dong_fig2_skips). plugins=[a] adds those of
a plug-in."""
VERDICTS = PAGE.with_name("CLAIMS.md")  # with the columns of verdicts.csv and statements.csv
GROUPS = ("task", "model", "analysis", "optimizer", "cluster", "search")  # whose choices are explained
Facts = dict[str, str]
Keys = dict[str, tuple[str, Row]]  # each key's heading and row


def explained(words: list[str]) -> str:
    """The text of the command."""
    plugins.find(plugins.named(words))
    asked = [word for word in words if not word.startswith("plugins=")]
    if odd := [word for word in asked if "=" in word or word.startswith("-")]:
        raise ConfigError(f"explain {odd[0]}: takes words without `=`, as in `rankbench explain model.norm`")
    load_plugins()
    keys: Keys = {}  # of all commands, tasks and analyses
    for heading, rows in sections().items():
        for name, row in rows.items():
            keys.setdefault(name, (heading, row))
    return "\n\n".join("\n\n".join(map(_in_lines, _meanings(word, keys))) for word in asked)


def _meanings(word: str, keys: Keys) -> list[Facts]:
    """All that a word means, each as facts by name; the first is the word itself."""
    if word in keys:
        return [_key(word, *keys[word])]
    kinds = (_group, _choice, _measured, _judged, _preset, _claim)
    found = [facts for of_kind in kinds for facts in of_kind(word, keys)]
    if found:
        return found
    called = [name for name in keys if name.rpartition(".")[2] == word]
    meant = f", did you mean {' or '.join(called)}?" if called else closest(word, sorted(_all_words(keys)))
    raise ConfigError(f"explain {word}: unknown{meant}; `rankbench explain` says what can be asked for")


def _key(word: str, heading: str, row: Row) -> Facts:
    commands = (name for name, schema in SCHEMAS.items() if any(entry.name == word for entry in entries(schema)))
    contents = {
        name: [OmegaConf.create(plugins.content_of(file)) for file in files_of(name)]
        for name in plugins.choices("experiment")
    }
    select = partial(OmegaConf.select, key=word, throw_on_resolution_failure=False)
    sets = [name for name, files in contents.items() if any(select(content) is not None for content in files)]
    return {
        word: row.meaning,
        "allowed": row.allowed,
        "value": row.value,
        "commands": ", ".join(commands),
        "stated under": heading,
        "set by": ", ".join(sets[:8]) + (f" and {len(sets) - 8} more presets" if len(sets) > 8 else ""),
    }


def _group(word: str, keys: Keys) -> Iterator[Facts]:
    names = [name for name in keys if name.startswith(f"{word}.")]
    if names:
        files = plugins.choices(word)
        choices = {f"choices, as {word}={next(iter(files))}": ", ".join(files)} if files else {}
        yield {word: f"group of {len(names)} keys; rankbench train --help {word}", **choices}


def _choice(word: str, keys: Keys) -> Iterator[Facts]:
    """A file of a group (a task, a model, an analysis), or a value of a key."""
    from rankbench.analyses import ANALYSES

    of_choices = {heading.partition(": ")[0]: rows for heading, rows in sections().items()}
    for group in GROUPS:
        if (path := plugins.choices(group).get(word)) is not None:
            choice = f"analysis=[{word}]" if group == "analysis" else f"{group}={word}"
            facts = {choice: " ".join(plugins.comments_in(path))}
            if group == "analysis" and (analysis := ANALYSES.get(word)) is not None:
                facts |= {"table": subject_of(analysis.table), "columns": ", ".join(analysis.columns)}
            yield facts | {"keys": ", ".join(of_choices.get(choice, ()))}
    for name, (_, row) in keys.items():
        if word in row.allowed.split(", ") and not row.allowed.startswith("list"):
            yield {f"{name}={word}": row.meaning}


def _measured(word: str, keys: Keys) -> Iterator[Facts]:
    """A metric or a column, with its formula and the analyses that measure it."""
    from rankbench.analyses import ANALYSES

    meanings: dict[str, list[str]] = {}
    for name, analysis in ANALYSES.items():
        if word in analysis.columns:
            meanings.setdefault(analysis.columns[word], []).append(name)
    formula, source = _cells_by_name(METRICS, 3).get(word, ("", ""))
    for meaning, names in meanings.items():
        tables = ", ".join(f"{name}.csv" for name in names)
        command = f"rankbench analyze run=latest analysis=[{names[0]}]"
        facts = {f"{word} (column of {tables})": meaning, "formula": formula, "range, source": source}
        yield facts | {"measured by": command}


def _judged(word: str, keys: Keys) -> Iterator[Facts]:
    """A column of the tables of verdicts."""
    if word in (meanings := _cells_by_name(VERDICTS, 2)):
        yield {f"{word} (column of verdicts.csv, statements.csv)": meanings[word][0]}


def _preset(word: str, keys: Keys) -> Iterator[Facts]:
    from rankbench.config.presets import all_claims_of, described

    if (preset := described().get(word)) is not None:
        claims = ", ".join(all_claims_of(word))
        yield {f"experiment={word}": preset.about, "command": preset.command, "cost": preset.cost, "claims": claims}


def _claim(word: str, keys: Keys) -> Iterator[Facts]:
    from rankbench.config.presets import all_claims_of, presets
    from rankbench.judging import CLAIMS

    if (claim := CLAIMS.get(word)) is not None:
        by = [name for name in presets() if word in all_claims_of(name)]
        yield {
            f"{word} ({'check' if claim.is_check else 'claim'})": claim.statement,
            "claimed": f"{claim.claimed} ({claim.threshold})",
            "source": claim.source,
            "control, in which it must fail": claim.control.statement,
            "table": f"{claim.table}.csv",
            "judged by": ", ".join(presets()[name] for name in by[:4]) + (" and others" if len(by) > 4 else ""),
        }


def _all_words(keys: Keys) -> set[str]:
    """Every word that can be explained."""
    from rankbench.analyses import ANALYSES
    from rankbench.judging import CLAIMS

    groups = {name.partition(".")[0] for name in keys}
    choices = {name for group in (*GROUPS, "experiment") for name in plugins.choices(group)}
    columns = {name for analysis in ANALYSES.values() for name in analysis.columns}
    return {*keys, *groups, *choices, *columns, *_cells_by_name(VERDICTS, 2), *CLAIMS}


def _cells_by_name(page: Path, num_columns: int) -> dict[str, list[str]]:
    """The names in the first cells of the tables of this many columns, each with the other cells of its row."""
    row = r"^\| (`.*?)" + r" \| (.*?)" * (num_columns - 1) + r" ?\|$"
    rows = re.findall(row, page.read_text(encoding="utf-8").replace(r"\|", "|"), re.MULTILINE)
    return {name: cells for names, *cells in rows for name in re.findall(r"`(\w+)`", names)}


def _in_lines(facts: Facts) -> str:
    return "\n".join(
        textwrap.fill(f"{name}: {text}", terminal_width(), subsequent_indent="    ", break_on_hyphens=False)
        for name, text in facts.items()
        if text
    )

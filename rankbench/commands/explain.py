"""`rankbench explain WORD`: what a word of rankbench means: a key, a group of keys, a choice such as a task or an
analysis, a metric, a column of a table, a preset or a claim."""

import re
import textwrap
from collections.abc import Iterator

from omegaconf import OmegaConf

from rankbench.commands.composition import composed
from rankbench.commands.reference import METRICS, TABLES, Row, stated, tables_page, written
from rankbench.commands.usage import rows_with_values, terminal_width
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, closest
from rankbench.config.schema import SCHEMAS

HELP = """Usage: rankbench explain WORD [WORD ...] [plugins=[a]]

Explains a key (model.norm), a group of keys (model), a choice of a group (sorting, paths, san), a metric or a column of
a table (effective_rank), a preset (dong_fig4_sorting) or a claim (dong_fig2_skips). plugins=[a] adds those of a
plug-in."""
GROUPS = ("task", "model", "analysis", "optimizer", "cluster", "search")  # whose choices are explained
Facts = dict[str, str]
Keys = dict[str, tuple[str, Row, list[str]]]  # each key's heading, row and commands


def explained(words: list[str]) -> str:
    """The text of the command."""
    plugins.find(plugins.named(words))
    asked = [word for word in words if not word.startswith("plugins=")]
    if not asked or {"-h", "--help"} & set(asked):
        return HELP
    if odd := [word for word in asked if "=" in word or word.startswith("-")]:
        raise ConfigError(f"explain {odd[0]}: takes words without `=`, as in `rankbench explain model.norm`")
    keys = _keys()
    return "\n\n".join("\n\n".join(map(_in_lines, _meanings(word, keys))) for word in asked)


def _meanings(word: str, keys: Keys) -> list[Facts]:
    """All that a word means, each as facts by name; the first is the word itself."""
    if word in keys:
        return [_key(word, *keys[word])]
    found = [facts for of_kind in (_group, _choice, _measured, _preset, _claim) for facts in of_kind(word, keys)]
    if found:
        return found
    called = [name for name in keys if name.rpartition(".")[2] == word]
    meant = f", did you mean {' or '.join(called)}?" if called else closest(word, sorted(_all_words(keys)))
    raise ConfigError(f"explain {word}: unknown{meant}; `rankbench explain` says what can be asked for")


def _keys() -> Keys:
    """All keys of all commands."""
    keys: Keys = {}
    for command in SCHEMAS:
        for heading, row in rows_with_values(command, composed(command), every_analysis=True):
            keys.setdefault(row.name, (heading, row, []))[2].append(command)
    for choice, (heading, rows) in _sections().items():
        for row in rows:
            keys.setdefault(row.name, (heading, row, [f"those with {choice}"]))
    return keys


def _sections() -> dict[str, tuple[str, list[Row]]]:
    """The keys of each task and analysis."""
    return stated() if plugins.FOUND else written()


def _key(word: str, heading: str, row: Row, commands: list[str]) -> Facts:
    sets = [
        name
        for name, path in plugins.choices("experiment").items()
        if OmegaConf.select(OmegaConf.load(path), word, throw_on_resolution_failure=False) is not None
    ]
    return {
        word: row.meaning,
        "allowed": row.allowed,
        "value": f"{row.value} ({commands[0]})",
        "commands": ", ".join(commands),
        "stated under": heading,
        "set by": ", ".join(sets[:8]) + (f" and {len(sets) - 8} more presets" if len(sets) > 8 else ""),
    }


def _group(word: str, keys: Keys) -> Iterator[Facts]:
    names = [name for name in keys if name.startswith(f"{word}.")]
    if names:
        files = plugins.choices(word)
        choices = {f"choices, as {word}={next(iter(files))}": ", ".join(files)} if files else {}
        commands = ", ".join(dict.fromkeys(command for name in names for command in keys[name][2]))
        yield {word: f"group of {len(names)} keys; rankbench train --help {word}", **choices, "commands": commands}


def _choice(word: str, keys: Keys) -> Iterator[Facts]:
    """A file of a group (a task, a model, an analysis), or a value of a key."""
    sections = _sections()
    for group in GROUPS:
        if (path := plugins.choices(group).get(word)) is not None:
            choice = f"analysis=[{word}]" if group == "analysis" else f"{group}={word}"
            about, columns = _tables().get(word, ("", {})) if group == "analysis" else ("", {})
            _, rows = sections.get(choice, ("", []))
            facts = {choice: " ".join(plugins.comments_in(path)), "table": about}
            yield facts | {"columns": ", ".join(columns), "keys": ", ".join(row.name for row in rows)}
    for name, (_, row, _) in keys.items():
        if word in row.allowed.split(", ") and not row.allowed.startswith("list"):
            yield {f"{name}={word}": row.meaning}


def _measured(word: str, keys: Keys) -> Iterator[Facts]:
    """A metric or a column, with its formula and the analyses that measure it."""
    meanings: dict[str, list[str]] = {}
    for analysis, (_, columns) in _tables().items():
        if word in columns:
            meanings.setdefault(columns[word], []).append(analysis)
    formula, source = _formulas().get(word, ("", ""))
    for meaning, analyses in meanings.items():
        tables = ", ".join(f"{name}.csv" for name in analyses)
        command = f"rankbench analyze run=latest analysis=[{analyses[0]}]"
        facts = {f"{word} (column of {tables})": meaning, "formula": formula, "range, source": source}
        yield facts | {"measured by": command}


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
    from rankbench.judging import CLAIMS

    groups = {name.partition(".")[0] for name in keys}
    choices = {name for group in (*GROUPS, "experiment") for name in plugins.choices(group)}
    columns = {name for _, columns in _tables().values() for name in columns}
    return {*keys, *groups, *choices, *columns, *CLAIMS}


def _tables() -> dict[str, tuple[str, dict[str, str]]]:
    """The tables of docs/TABLES.md, and those of plug-ins: what each is about, and the meaning of its columns."""
    tables = {}
    text = tables_page() if plugins.FOUND else TABLES.read_text(encoding="utf-8")
    for section in text.split("\n## `")[1:]:
        heading, _, rest = section.partition("\n")
        name, _, about = heading.partition("`: ")
        tables[name] = (about, dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", rest.replace(r"\|", "|"), re.MULTILINE)))
    return tables


def _formulas() -> dict[str, tuple[str, str]]:
    """The metrics of docs/METRICS.md: formula, and range and source."""
    formulas: dict[str, tuple[str, str]] = {}
    for names, formula, source in re.findall(
        r"^\| (`.*?) \| (.*?) \| (.*?) ?\|$", METRICS.read_text(encoding="utf-8").replace(r"\|", "|"), re.MULTILINE
    ):
        formulas |= dict.fromkeys(re.findall(r"`(\w+)`", names), (formula, source))
    return formulas


def _in_lines(facts: Facts) -> str:
    return "\n".join(
        textwrap.fill(f"{name}: {text}", terminal_width(), subsequent_indent="    ", break_on_hyphens=False)
        for name, text in facts.items()
        if text
    )

"""Random overrides from the real keys: valid, edge and absurd values, unknown keys and choices, interpolations."""

import math
import random
import resource
import shutil
import types
import typing
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pandas as pd
from limits import limited
from test_combinations import SMALL_OPTIONS, TASK_WORDS

from campaigns.campaign import Campaign
from campaigns.in_process import CRASHED, TOO_LONG, called, complaint, files_under
from rankbench.analyses import ANALYSES
from rankbench.commands.messages import groups
from rankbench.config.keys import Entry, entries
from rankbench.config.schema import SCHEMAS, conf_dir
from rankbench.tasks import TASKS

SECONDS = 100  # of the processor, for one command
MEMORY = 12 << 30  # bytes of address space of this process
LARGE = 1000  # a command may take longer than SECONDS if one of its numbers is larger than this
SIZES = ["model.layers=1", "model.heads=2", "model.width=6", "replicas=1"]
TRAINING = ["trainer.steps=2", "trainer.batch_size=4", "trainer.eval_every=1"]
COMMANDS = {"train": 6, "analyze": 4, "report": 1}  # with how often each is tried
PATHS = ("run", "runs", "out", "inputs", "module", "checkpoint", "pages", "task.path", "task.test_path")
ABSURD = [
    *("nan", "inf", "-inf", "1e400", "-1", "0", "-0.0", "1e-320", "2147483648", "9223372036854775808", "1" + "0" * 30),
    *("9" * 5000, "word", "x" * 3000, "null", "''", "true", "[]", "[[]]", "[1,2]", "[null]", "{}", "{a:1}", "[nan]"),
    *("???", "é∞", "'a b'", "'a\nb'", "a=b", "a,b", "1,2", "$x", "[", "{", "'", "~", "@", "\\", "%s", "{0}"),
    *("${model.width}", "${oc.env:HOME}", "${oc.decode:null}", "${", "${nothing}", "${by_budget:{a:1}}", "${now:%Y}"),
    *("!!python/object/apply:os.system ['touch canary']", "$(touch canary)", "../x", "/dev/null", "range(1,3)"),
    *("choice(1,2)", "interval(0,1)", "glob(*)", "int(x)", "1_000", "0x10", "1e3", "1.5", "[1.5]", "[word]", "[-1]"),
]


def values(entry: Entry, numbers: random.Random) -> str:
    """A random value for a key: most often one that its range allows, else one at or beyond its ends, else absurd."""
    kind = numbers.random()
    if kind < 0.3:
        return numbers.choice(ABSURD)
    members = [kind for kind in typing.get_args(entry.type) if kind is not types.NoneType]
    if isinstance(entry.type, types.UnionType) and numbers.random() < 0.2:
        return "null"
    plain = members[0] if isinstance(entry.type, types.UnionType) else entry.type
    if typing.get_origin(plain) is list:
        items = [_value(typing.get_args(plain)[0], entry, numbers, kind < 0.5) for _ in range(numbers.randrange(3))]
        return f"[{','.join(items)}]"
    return _value(plain, entry, numbers, kind < 0.5)


def _value(kind: type, entry: Entry, numbers: random.Random, at_an_end: bool) -> str:
    key = entry.key
    if key.choices:
        chosen = numbers.choice(list(key.choices))
        return chosen[:-1] if at_an_end else chosen
    if kind is bool:
        return numbers.choice(["true", "false"])
    if kind not in (int, float):
        return numbers.choice(["word", "a b", "a/b", "1", "x.py:build", "nowhere", "'$a$'", "'<b>'", "'a,b=c'"])
    low = next((end for end in (key.at_least, key.above) if end is not None), 0)
    high = next((end for end in (key.at_most, key.below) if end is not None), None)
    step = 1 if kind is int else 1e-6
    if at_an_end:
        ends = [low, low - step, low + step] + ([] if high is None else [high, high + step, high - step])
        return str(kind(numbers.choice(ends)))
    most = low + 8 if high is None else min(high, low + 8)
    return str(numbers.randint(math.ceil(low), math.floor(most)) if kind is int else numbers.uniform(low, most))


def command(numbers: random.Random) -> list[str]:
    """A random command line: a small one that runs, with one to three words that may be anything."""
    verb = numbers.choices(list(COMMANDS), list(COMMANDS.values()))[0]
    keys, words = entries(SCHEMAS[verb]), []
    if verb in ("train", "analyze"):
        task = numbers.choice(list(TASKS))
        words = [f"task={task}", *TASK_WORDS[task], *SIZES, *(TRAINING if verb != "analyze" else [])]
        keys += entries(TASKS[task], "task.")
        chosen = numbers.sample(list(ANALYSES), numbers.choice([0, 0, 1, 2] if verb == "train" else [1, 2]))
        words.append(f"analysis=[{','.join(chosen)}]")
        words += [f"analysis.{name}.{word}" for name in chosen for word in SMALL_OPTIONS.get(name, [])]
        for name in chosen:
            keys += entries(ANALYSES[name].options, f"analysis.{name}.") * 2
    if verb == "analyze" and numbers.random() < 0.3:
        words = [word for word in words if word.partition(".")[0] not in ("task", "model")]
        words = ["run=../trained", *(word for word in words if not word.startswith(("task=", "replicas=")))]
    if verb == "report":
        words = [numbers.choice(["runs=../trained", "runs=..", "runs=../tr*"])]
    for _ in range(numbers.choice([1, 1, 2, 3])):
        words.append(odd_word(keys, numbers))
    if numbers.random() < 0.05 and verb in ("train", "analyze"):
        words += ["-m", numbers.choice(["seed=0,1", "model.layers=1,2", "task=sorting,nothing", "model=san,lstm"])]
    return [verb, *words]


def odd_word(keys: list[Entry], numbers: random.Random) -> str:
    """A word that may be anything: a value for a key, a choice of a group, an unknown key."""
    kind = numbers.random()
    if kind < 0.12:
        group = numbers.choice(groups())
        if group in ("cluster", "search"):  # what they start outlives the command
            group = "model"
        there = [path.stem for path in (conf_dir() / group).glob("*.yaml")]
        choice = numbers.choice([*there, *there, *ABSURD])
        return f"{group}=[{choice}]" if group == "analysis" else f"{group}={choice}"
    entry = numbers.choice(keys)
    value = values(entry, numbers)
    if kind < 0.15:
        return f"{entry.name}x={value}"
    if kind < 0.17:
        return f"~{entry.name}"
    if kind < 0.19:
        return f"{entry.name}.sub={value}"
    sign = "+" if kind < 0.21 else "++" if kind < 0.25 else ""
    return f"{sign}{entry.name}={value}"


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Try so many commands, each in an empty folder beside a trained run."""
    ended = Counter()
    with limited(resource.RLIMIT_AS, MEMORY):
        words = [*TASK_WORDS["sorting"], *SIZES, *TRAINING, "trainer.dynamics_every=1", "out=trained"]
        assert called("train", *words, at=folder, seconds=60).code == 0
        for _ in range(size):
            at = folder / "case"
            at.mkdir()
            typed = command(numbers)
            before = files_under(folder)
            result = called(*typed, at=at, seconds=SECONDS)
            written = files_under(folder) - before
            ended["ran" if result.code == 0 else "stopped by the clock" if result.code == TOO_LONG else "refused"] += 1
            line = judged(typed, result, written)
            shutil.rmtree(at)
            for name in sorted(files_under(folder) - before, reverse=True):
                path = folder / name
                path.unlink() if path.is_file() or path.is_symlink() else path.rmdir()
            yield None if line is None else f"{' '.join(typed)[:1500]!r}: {line}"
    return "; ".join(f"{count} {how}" for how, count in ended.most_common())


def judged(typed: list[str], result: typing.Any, written: set[str]) -> str | None:
    """What is wrong with the outcome of a command line, if anything."""
    if any(name.endswith("canary") for name in written):
        return "executed a value"
    if result.code == TOO_LONG:
        large = pd.to_numeric(pd.Series(" ".join(typed).replace("=", " ").split()), errors="coerce").max() > LARGE
        return None if large or "trainer.compile=true" in typed else result.err
    if (line := complaint(result)) is not None:
        return line
    allowed = "out of memory" in result.err  # only the work shows that
    if result.code not in (0, CRASHED) and written and not allowed:
        return f"refused, but wrote {sorted(written)[:3]}: {result.err.splitlines()[-1][:200]}"
    return None


CAMPAIGN = Campaign(
    about="Random overrides from the real keys of train, analyze and report, on small sizes: values within a "
    "key's range, at and beyond its ends, and absurd ones; wrong choices, unknown keys, interpolations, sweeps.",
    wrong="a traceback, a refusal of more than one line or 1,000 characters, a file of a refused command, an executed "
    "value, or 100 seconds of the processor without a large number among the values "
    "or a compiler.",
    full_size=5000,
    cases=cases,
)

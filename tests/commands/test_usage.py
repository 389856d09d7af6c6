"""rankbench.commands.usage and rankbench.commands.reference: help and docs/CONFIG.md say what the fields of the
dataclasses say."""

import re

import pytest
from refusals import refusal

from rankbench.analyses import ANALYSES
from rankbench.commands.explain import explained
from rankbench.commands.listing import listing
from rankbench.commands.reference import PAGE, page, written
from rankbench.commands.usage import usage
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, entries
from rankbench.config.presets import presets
from rankbench.config.schema import SCHEMAS
from rankbench.tasks import TASKS


def plain(text):
    """The text without its line breaks and columns."""
    return " ".join(text.split())


def test_the_page_is_what_the_code_generates():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_page_has_every_task_and_every_analysis():
    choices = {heading.partition(": ")[0] for heading in written()}
    assert choices > {f"task={name}" for name in TASKS} | {f"analysis=[{name}]" for name in ANALYSES}


def test_what_is_read_from_the_page_is_what_the_fields_say():
    of_choices = {heading.partition(": ")[0]: rows for heading, rows in written().items()}
    for name, task in TASKS.items():
        rows = [(row.name, row.meaning, row.allowed) for row in of_choices[f"task={name}"].values()]
        keys = entries(task, "task.")
        assert rows == [(entry.name, entry.key.meaning, entry.key.allowed(entry.type)) for entry in keys]
    assert of_choices["analysis=[bounds]"]["analysis.bounds.sequences"].value == "32"


@pytest.mark.parametrize("command", SCHEMAS)
def test_help_says_the_value_the_meaning_and_the_allowed_values_of_every_key(command):
    text = usage(command, [])
    assert text.startswith(f"Usage: rankbench {command} ")
    for group in plugins.groups_of(command):
        assert f"\n  {group}: {', '.join(plugins.choices(group))}\n" in text
    for entry in entries(SCHEMAS[command]):
        if "dict" not in str(entry.type):
            assert re.search(rf"^  {re.escape(entry.name)}=", text, re.MULTILINE), entry.name
            assert plain(f"{entry.key.meaning} [{entry.key.allowed(entry.type)}]") in plain(text), entry.name


def test_help_has_the_keys_of_the_task_and_of_the_chosen_analyses():
    text = usage("train", ["task=char_lm", "analysis=[bounds,lipschitz]"])
    chosen = entries(TASKS["char_lm"], "task.")
    for name in ("bounds", "lipschitz"):
        chosen += entries(ANALYSES[name].options, f"analysis.{name}.")
    for entry in chosen:
        assert f"  {entry.name}=" in text and plain(entry.key.meaning) in plain(text)
    assert "analysis.pruning" not in text


def test_help_shows_the_values_of_the_command_line():
    text = usage("train", ["model=san", "task.length=5", "analysis=[paths]", "analysis.paths.subset_sizes=[3]"])
    for said in ("model.name=san", "model.mlp=false", "task.length=5", "analysis.paths.subset_sizes=[3]", "clip=null"):
        assert re.search(rf"{re.escape(said)}\s", text), said


def test_help_of_one_group_is_its_keys_alone():
    names = re.findall(r"^  (\S+?)=", usage("train", ["model", "model.layers=3"]), re.MULTILINE)
    assert names and all(name.startswith("model.") for name in names)
    assert "model.layers=3 " in usage("train", ["model", "model.layers=3"])
    assert re.findall(r"^  (\S+?)=", usage("analyze", ["analysis.curves"]), re.MULTILINE) == ["analysis.curves.splits"]


@pytest.mark.further
def test_a_key_is_explained(monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    norm, length = explained(["model.norm", "task.length"]).split("\n\n")
    assert norm.startswith("model.norm: Place of the norm. pre: ")
    for said in ("\nallowed: none, pre, post, peri, ngpt\n", "value: post\n", "commands: train, analyze"):
        assert said in norm
    assert "dong_fig2_residual" in norm and "task=sorting" in length
    # by the preset that it builds on, and by what several presets share
    assert "kim_fig4_rates, kim_fig4_width512 and 8 more presets" in explained(["optimizer.beta2"])
    assert "knob_embedding_skip, knob_exclusive, knob_hyper_connections" in explained(["model.init_gain"])
    for words, said in (
        (["norm"], "did you mean model.norm?"),
        (["modle.norm"], "did you mean model.norm?"),
        (["efective_rank"], "did you mean effective_rank?"),
        (["model.norm=pre"], "takes words without `=`"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            explained(words)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "effective_rank",
            "formula: exp of the entropy of s / Σ s\nrange, source: 1 to min(N, D); Roy and Vetterli 2007",
        ),
        ("effective_rank", "\nmeasured by: rankbench analyze run=latest analysis=[residual]"),
        ("model", "keys; rankbench train --help model\nchoices, as model=amsel: amsel, "),
        ("sorting", "task=sorting: Input: letters. Output: their order"),
        ("sorting", "keys: task.name, task.length, task.alphabet, "),
        ("paths", "analysis=[paths]: Accuracy of the paths of each length"),
        ("paths", "\ncolumns: "),
        ("dong_fig4_sorting", "\ncommand: rankbench train experiment=dong_fig4_sorting\ncost: one CPU core: "),
        ("dong_fig2_skips", "judged by: rankbench analyze experiment=dong_fig2_checkpoints"),
        ("peri", "model.norm=peri: Place of the norm."),
        ("low95", "low95 (column of verdicts.csv, statements.csv): Ends of the 95 % interval of the mean."),
    ],
)
def test_other_words_are_explained(word, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert " ".join(said.split()) in " ".join(explained([word]).split())


@pytest.mark.further
def test_presets_are_listed_by_paper_in_a_line_each(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = listing([])
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    assert sorted(line.split()[0] for line in lines) == sorted(presets()) and max(map(len, lines)) <= 80
    blocks = [block.splitlines() for block in text.split("\n\n")]
    (dong,) = (block[1:] for block in blocks if block[0] == "Dong et al. 2021")
    assert all(line.startswith("  dong_") for line in dong)
    assert re.search(r"^  dong_bounds +4 min ", text, re.MULTILINE)  # at budget=laptop
    assert len(dong) == sum("dong_" in name for name in presets())
    assert blocks[-1][0] == "Others"
    found = listing(["entropy"])
    assert "zhai_heads\n      rankbench train; one CPU core: 5 minutes" in found and "kim_table2" not in found
    assert "does tied L2 attention lose" in " ".join(listing(["kim_fig9"]).split())  # not cut at "app."
    with pytest.raises(ConfigError, match=r"^list entrpy: no preset has this, did you mean entropy\?; "):
        listing(["entrpy"])


def test_help_of_a_misspelt_group_suggests_one():
    said = "--help modle: no keys there, did you mean model?; groups are analysis, model, "
    assert refusal(usage, "train", ["modle"]).startswith(said)


def test_help_names_only_what_the_command_takes():
    """data has no groups of keys and refuses -m; plot has one group, and no model."""
    data, plot, train = (usage(command, []) for command in ("data", "plot", "train"))
    assert "GROUP" not in data and "-m" not in data.split() and "Groups" not in data
    assert "--help GROUP    only its keys: --help report\n" in plot and "[-m]" in plot and "Groups" not in plot
    assert "--help GROUP    only its keys: --help model, --help analysis.paths\n" in train
    said = "--help model: no keys there; `rankbench data --help` lists all keys"
    assert refusal(usage, "data", ["model"]) == said


@pytest.mark.parametrize("columns", ["60", "100", "200"])
def test_help_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = [line for line in usage("train", ["model"]).splitlines() if line.startswith("  ")]
    assert max(map(len, lines)) <= min(max(int(columns), 80), 120)

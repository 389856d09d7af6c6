"""The documents name what there is, and their links lead somewhere."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from command_line import ROOT, python, succeeds
from notebook import code_cells, execute

import rankbench
from rankbench.analyses import ANALYSES
from rankbench.analyses.columns import STREAMS
from rankbench.commands.reference import TABLES, tables_page
from rankbench.judging import judge
from rankbench.judging.statement import statements_of, table_of
from rankbench.measures.attention_matrices import ATTENTION_METRICS
from rankbench.measures.states import STATE_METRICS
from rankbench.runs.tables import read_table

NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
HISTORY = ROOT / "docs" / "results" / "notes" / "history.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", HISTORY, *sorted((ROOT / "docs").glob("*.md")), *NOTEBOOKS]


def first_cells(page, column):
    """Words in backticks in one column of a page's tables."""
    rows = [line.split("|") for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    return [word for row in rows for word in re.findall(r"`(\w+)`", row[column])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_sentence_of_the_front_page_names_its_table():
    """Those that say what stands, what does not, and what surprises: each links to a preset on a page of results."""
    pages = ROOT / "docs" / "results"
    said = (pages / "notes" / "index.md").read_text().partition("- **What this scale cannot say.**")[0]
    text = " ".join(said.partition("- **")[2].split())
    sentences = re.split(r"(?<!et al)(?<!Fig)\. (?=[A-Z-])", re.sub(r"(?:- )?(?:\*\*)?[\w ]+\.\*\* ", "", text))
    assert len(sentences) > 15
    for sentence in sentences:
        links = re.findall(r"\]\(([^)#]+)#([^)]+)\)", sentence)
        assert links, sentence
        for page, preset in links:
            assert f"\n### {preset}\n" in (pages / page).read_text(), (page, preset)


def test_the_citation_is_of_this_release():
    """The package's version is that of the newest release in the change log, and both citations name it."""
    newest = re.search(r"^## \[([0-9.]+)\] - (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["date-released"]) == newest.groups()
    assert newest[1] == rankbench.__version__
    assert f"version = {{{newest[1]}}}" in (ROOT / "README.md").read_text()


def test_the_guide_has_every_analysis_with_its_figure_below_its_question():
    text = (ROOT / "docs" / "GUIDE.md").read_text().partition("## The choices")[0]
    entries = {re.search(r"`(\w+)`", entry)[1]: entry for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]}
    assert sorted(entries) == sorted(ANALYSES)
    for name, entry in entries.items():
        drawn = (ROOT / "docs" / "guide" / f"{name}.png").exists()
        assert re.findall(r"\(guide/(\w+)\.png\)", entry) == [name] * drawn


def test_every_metric_has_its_formula():
    assert sorted(first_cells("METRICS.md", 1)) == sorted([*STATE_METRICS, *ATTENTION_METRICS, *STREAMS])


def test_the_page_of_claims_has_every_column_of_verdicts_and_of_statements():
    sums = pd.DataFrame({"seed": [0, 1], "scheme": "frozen", "selection": "all", "remainder": 1e-14})
    verdicts = judge("paths_sum_to_output", sums)
    columns = {*verdicts[0], *table_of(statements_of(verdicts))}
    assert sorted(first_cells("CLAIMS.md", 1)) == sorted(columns)


def test_the_page_of_tables_is_that_of_the_code():
    assert TABLES.read_text(encoding="utf-8") == tables_page(), "run `make docs`"


@pytest.mark.further
@pytest.mark.usefixtures("unpainted_here", "rounded_once_here")
def test_the_preset_on_the_page_of_extensions_runs_from_a_folder_of_the_user(tmp_path):
    preset = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "EXTENDING.md").read_text(), re.DOTALL)[1]
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(preset)
    few = ["model.layers=2", "figures=[]", *(f"analysis.{name}.sequences=4" for name in ("residual", "collapse"))]
    done = succeeds("train", "--config-dir", "conf", "experiment=mine", "budget=smoke", *few, "out=sweep", at=tmp_path)
    assert "dong_fig2_skips" in done.out
    sweep = read_table(tmp_path / "sweep" / "sweep.csv")
    assert sweep.groupby("model").seed.nunique().to_dict() == {"san_skip": 2, "transformer": 2}
    assert all((tmp_path / "sweep" / f"{name}.csv").exists() for name in ("residual", "collapse", "verdicts"))


@pytest.mark.further
def test_the_page_of_extensions_is_a_plugin_that_keeps_its_promises(tmp_path):
    page = (ROOT / "docs" / "EXTENDING.md").read_text()
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings[:6] == ["A preset", "A metric", "A task", "An attention", "An analysis", "A plug-in"]
    assert all("```" in page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0] for heading in headings[:6])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    for name, text in re.findall(r"`(conf/(?:task|analysis)/\w+\.yaml)`:\n\n```yaml\n(.*?)```", page, re.DOTALL):
        (tmp_path / "mine" / name).parent.mkdir(parents=True)
        (tmp_path / "mine" / name).write_text(text)
    done = python("-m", "rankbench", "check", "plugins=mine", at=tmp_path).stdout  # which keeps what the plug-in brings
    for tried in ("task=copying", "model.kind=scaled", "model.attention=cauchy", "model.attention=signed_gate"):
        assert f"{tried}: " in done
    assert "optimizer.name=sign_descent: " in done and "analysis=weight_norms: " in done and "1 of METRICS" in done


def test_every_notebook_is_executed_by_a_test():
    names = re.findall(r'^        (?:pytest.param)?\("(\w+)", ', Path(__file__).read_text(), re.MULTILINE)
    assert set(names) == {path.stem for path in NOTEBOOKS}


def listed(text):
    """Rows of the tutorial's listing: relative residuals by layer, by model.skip and kind of weights."""
    rows, skip = {}, None
    for line in text.splitlines():
        if match := re.search(r"model\.skip=(true|false)", line, re.IGNORECASE):
            skip = match[1].lower()
        if match := re.match(r"\s*(trained|initialised)\s+full((?:\s+\d\.\de[-+]\d\d){7})$", line):
            rows[skip, match[1]] = [float(number) for number in match[2].split()]
    return rows


@pytest.mark.further
@pytest.mark.parametrize(
    ("steps", "kinds"), [(1, ["initialised"]), pytest.param(500, ["initialised", "trained"], marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("unpainted_here", "rounded_once_here")
def test_the_tutorials_listing_is_what_its_command_prints(tmp_path, steps, kinds):
    """The weights before training do not depend on the number of steps."""
    text = (ROOT / "docs" / "TUTORIAL.md").read_text()
    (command,) = re.findall(r"^    rankbench (train -m .*)$", text, re.MULTILINE)
    assert "trainer.steps=500" in command and "model.layers=2,6" in command
    command = command.replace("=500", f"={steps}").replace("layers=2,6", "layers=6")
    result = succeeds(*command.split(), "figures=[]", at=tmp_path)
    printed, written = listed(result.out + result.err), listed(text)
    assert len(written) == 4
    for skip in ("true", "false"):
        for kind in kinds:
            for number, wanted in zip(printed[skip, kind], written[skip, kind], strict=True):
                # what is next to rounding differs between machines
                assert number == pytest.approx(wanted, rel=0.1) or max(number, wanted) < 1e-15, (skip, kind)


def substituted(notebook, words):
    """A copy of the notebook with other words in its code."""
    text = json.dumps([cell["source"] for cell in code_cells(notebook)])
    for old, new in words.items():
        assert old in text
        text = text.replace(old, new)
    sources = json.loads(text)
    return {"cells": [{"cell_type": "code", "source": source} for source in sources]}


TINY = {"steps=150": "steps=4", "step_150": "step_4", "steps=250": "steps=6", "replicas=3": "replicas=1"}


@pytest.mark.further
@pytest.mark.parametrize(
    ("name", "words", "left"),
    [
        pytest.param("first_study", {}, "runs/skip/summary.json", marks=pytest.mark.slow),
        ("first_study", TINY, "runs/skip/summary.json"),
        ("my_checkpoint", {}, "measured/network.csv"),
        ("watch_my_training", {"range(200)": "range(60)"}, "watched/observed_states.csv"),
    ],
)
def test_notebooks_can_be_executed_and_show_what_is_stored(name, words, left, tmp_path, monkeypatch):
    if name == "my_checkpoint":
        pytest.importorskip("transformers", reason="needs the extra: pip install 'rankbench[pretrained]'")
    monkeypatch.chdir(tmp_path)
    path = ROOT / "docs" / f"{name}.ipynb"
    notebook = json.loads(path.read_text())
    again = substituted(notebook, words)
    execute(again)
    for stored, cell in zip(code_cells(notebook), code_cells(again), strict=True):
        assert stored["execution_count"] == cell["execution_count"]
        kinds = [[list(output.get("data", output.get("name"))) for output in c["outputs"]] for c in (stored, cell)]
        assert kinds[0] == kinds[1]
        images = [output.get("data", {}).get("image/png") for output in stored["outputs"]]
        assert not images or images[0] is None or len(images[0][0]) > 10_000
    assert (tmp_path / left).exists()
    assert any("data" in output for cell in code_cells(notebook) for output in cell["outputs"])

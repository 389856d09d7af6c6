"""The documents name what there is, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from rankbench.analyses import ANALYSES
from rankbench.commands.reference import TABLES, tables_page
from rankbench.measures.attention_matrices import ATTENTION_METRICS
from rankbench.measures.states import STATE_METRICS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def first_cells(page, column):
    """Words in backticks in one column of a page's tables."""
    rows = [line.split("|") for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    return [word for row in rows for word in re.findall(r"`(\w+)`", row[column])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_guide_names_every_analysis():
    text = (ROOT / "docs" / "GUIDE.md").read_text().partition("## The choices")[0]
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(ANALYSES)


def test_every_metric_has_its_formula():
    assert sorted(first_cells("METRICS.md", 1)) == sorted([*STATE_METRICS, *ATTENTION_METRICS])


def test_the_page_of_tables_is_that_of_the_code():
    assert TABLES.read_text(encoding="utf-8") == tables_page(), "run `make docs`"

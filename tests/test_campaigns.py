"""The campaigns: their record, and each with a few cases, so that `make campaigns` works when it is wanted."""

import fcntl
import random
import re
import threading

import pytest
from campaigns import CAMPAIGNS
from campaigns.campaign import COLUMNS, PAGE, page, record, records, run


def test_the_page_is_that_of_the_record():
    assert PAGE.read_text(encoding="utf-8") == page(CAMPAIGNS), "run `PYTHONPATH=tests python -m campaigns`"
    assert set(records()) <= set(CAMPAIGNS)


def test_the_record_has_enough_cases_of_each_kind_of_foreign_code():
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z-]+)", records()["foreign"]["remark"])}
    assert counts["modules"] >= 200 and counts["plug-ins"] >= 30
    assert counts["checkpoints"] >= 90 and counts["inputs"] >= 85


def test_a_campaign_counts_its_cases(tmp_path):
    def cases(numbers: random.Random, size: int, folder):
        for number in range(size):
            yield "odd" if number % 2 else None
        return f"{numbers.randrange(10)} in {folder.name}"

    campaign = next(iter(CAMPAIGNS.values()))._replace(cases=cases)
    lines = []
    row = run("name", campaign, 3, 5, tmp_path, lines.append)
    assert (row["cases"], row["wrong"], row["seed"]) == (5, 2, 3)
    assert lines == ["name 2: odd", "name 4: odd"]
    assert row["remark"] == f"{random.Random('name 3').randrange(10)} in {tmp_path.name}"


def test_campaigns_that_run_side_by_side_lose_no_row(tmp_path, monkeypatch):
    """One that ends while another writes the record waits for it."""
    monkeypatch.setattr("campaigns.campaign.RECORD", tmp_path / "record.csv")
    monkeypatch.setattr("campaigns.campaign.PAGE", tmp_path / "page.md")
    rows = [dict.fromkeys(COLUMNS, "1") | {"campaign": name} for name in ("kill", "cut")]
    with (tmp_path / "record.csv").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threads = [threading.Thread(target=record, args=(row, CAMPAIGNS), daemon=True) for row in rows]
        for thread in threads:
            thread.start()
            thread.join(0.2)
        assert (tmp_path / "record.csv").read_text() == ""
    for thread in threads:
        thread.join(30)
    assert set(records()) == {"kill", "cut"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_few_cases_go_well(name, tmp_path):
    wrong = []
    row = run(name, CAMPAIGNS[name], 0, 20 if name == "soak" else 3, tmp_path, wrong.append)
    assert row["cases"] >= 3 and wrong == []

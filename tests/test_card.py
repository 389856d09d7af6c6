"""paper_scale.card: what fits into the minutes for which there is a GPU, and how it continues."""

import subprocess
import time
from collections import Counter
from math import inf
from unittest.mock import Mock

import pandas as pd
import pytest
from paper_scale import card, queue
from paper_scale.queue import CARD, FINISHED, WAITING
from refusals import refusal

from rankbench.runs.tables import read_table

QUEUE = pd.DataFrame(  # by preset: command, claims, minutes of a core, state
    [
        ("small", "train", 1, inf, CARD),
        ("dense", "train", 6, 120.0, WAITING),
        ("huge", "train", 9, inf, CARD),
        ("short", "train", 9, 10.0, WAITING),
        ("done", "train", 9, 120.0, FINISHED),
        ("given", "analyze", 9, inf, CARD),
    ],
    columns=["preset", "command", "claims", "minutes", "state"],
)
SECONDS = {"small": 60, "dense": 120}  # else an hour


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The commands that are begun, of which each ends at once; in a folder of outputs of their own."""
    monkeypatch.setattr(card, "FIRST", {"tests": ("pytest -q", 1.0), "bench": ("benchmarks card", 1.0)})
    monkeypatch.setattr(card, "plan", lambda budget: QUEUE)
    monkeypatch.setattr(card, "estimate", lambda preset: SECONDS.get(preset, 3600))
    monkeypatch.setattr(card.files, "OUTPUTS", tmp_path)
    commands = []

    def begin(words, **_):
        commands.append(words[2:])
        return Mock(wait=lambda seconds: 0)

    monkeypatch.setattr(subprocess, "Popen", begin)
    return commands


@pytest.mark.usefixtures("begun")
def test_tests_and_benchmarks_come_first_and_then_most_claims_a_minute():
    table = card.card_plan(13)
    assert list(table.work) == ["tests", "bench", "dense", "small", "huge"]
    words = "\n".join(card.in_words(table, 13))
    assert "4 pieces of work take 5 min in all; there are 13 min" in words and "too long: huge (1 h)" in words


@pytest.mark.usefixtures("begun")
def test_only_the_named_presets_run_however_short():
    assert set(card.card_plan(13, ["short", "small"]).work) == {"bench", "tests", "short", "small"}


def test_the_same_command_continues_with_what_has_not_been_done(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "AT_ONCE", 1)
    assert card.main(["1.5"]) == 0  # no room for dense
    assert begun[0] == ["pytest", "-q"] and begun[1] == ["benchmarks", "card"]
    assert "experiment=small" in begun[2] and len(begun) == 3
    assert card.main(["4.5"]) == 0
    assert "experiment=dense" in begun[3] and len(begun) == 4
    state = read_table(tmp_path / "queue_card.csv").set_index("work")
    done = {"bench", "tests", "dense", "small"}
    assert dict(state.state) == dict.fromkeys(done, FINISHED) | {"huge": WAITING}
    assert dict(state["from"]) == dict.fromkeys(done, "measured") | {"huge": "estimated"}
    monkeypatch.setattr(card, "source_digest", lambda: "other code")
    assert card.main(["4.5"]) == 0
    assert begun[4:] == [["pytest", "-q"], ["benchmarks", "card"]]  # runs stay, whatever the code


def test_what_comes_first_has_the_gpu_for_itself_and_runs_go_side_by_side(begun, monkeypatch):
    at_once, most = set(), Counter()

    def done(command, end):
        at_once.add(command)
        time.sleep(0.2)
        most[command.split()[1]] = max(most[command.split()[1]], len(at_once))
        at_once.remove(command)
        return FINISHED

    monkeypatch.setattr(queue, "_done", done)
    monkeypatch.setattr(card, "AT_ONCE", 3)
    monkeypatch.setattr(card, "FIRST", {str(n): (f"benchmarks bench{n}", 1.0) for n in range(2)})
    assert card.main(["13"]) == 0
    assert most == {"bench0": 1, "bench1": 1, "train": 2}


def test_work_that_is_not_done_when_the_time_is_over_is_asked_to_stop(monkeypatch):
    work = Mock(wait=Mock(side_effect=[subprocess.TimeoutExpired("work", 0), -15]))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: work)
    assert queue._done("rankbench train", end=0.0) == WAITING
    work.terminate.assert_called_once_with()
    work.kill.assert_not_called()


@pytest.mark.usefixtures("begun")
def test_a_plan_does_nothing(begun):
    assert card.main(["13", "plan"]) == 0 and begun == []


@pytest.mark.parametrize("words", [[], ["soon"], ["-1"], ["inf"]])
def test_other_words_are_refused(words):
    assert "give a number of minutes" in refusal(card.main, words)


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("name", ["given", "done", "unknown"])
def test_a_preset_that_is_not_trained_or_has_run_is_refused(name):
    assert f"preset={name}: unknown" in refusal(card.main, ["13", name])


@pytest.mark.further
def test_an_estimate_is_of_the_steps_of_all_jobs():
    # three networks of two layers and three of twelve, 4 steps of two seeds, whose kernels are as short as they get
    seconds = card.estimate("kim_table3_fixed_lr", "smoke")
    assert seconds == pytest.approx(6 * card.START + 3 * 4 * (2 + 12) * card.LAYER, rel=1e-12)

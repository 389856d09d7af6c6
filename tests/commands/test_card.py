"""rankbench.commands.card: what fits into the minutes for which there is a GPU, and how it continues."""

import subprocess

import pandas as pd
import pytest

from rankbench.commands import card
from rankbench.config.keys import ConfigError
from rankbench.runs.tables import read_table

QUEUE = pd.DataFrame(  # by preset: command, claims, state
    [
        ("small", "train", 1, card.CARD),
        ("dense", "train", 6, card.CARD),
        ("huge", "train", 9, card.CARD),
        ("cpu", "train", 9, card.WAITING),
        ("given", "analyze", 9, card.CARD),
    ],
    columns=["preset", "command", "claims", "state"],
)
SECONDS = {"small": 60, "dense": 120}  # else an hour


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The commands that are begun, of which each ends at once; in a folder of outputs of their own."""
    monkeypatch.setattr(card, "FIRST", {"tests": ("pytest -q", 2.0)})
    monkeypatch.setattr(card, "plan", lambda budget: QUEUE)
    monkeypatch.setattr(card, "estimate", lambda preset: SECONDS.get(preset, 3600))
    monkeypatch.setattr(card.files, "OUTPUTS", tmp_path)
    commands = []

    class Work:
        def __init__(self, words, **_):
            commands.append(words[2:])

        def wait(self, seconds):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Work)
    return commands


@pytest.mark.usefixtures("begun")
def test_tests_come_first_and_then_most_claims_a_minute():
    table = card.card_plan(13)
    assert list(table.work) == ["tests", "dense", "small", "huge"]
    words = "\n".join(card.in_words(table, 13))
    assert "3 pieces of work take 5 min in all; there are 13 min" in words and "too long: huge (1 h)" in words


def test_the_same_command_continues_with_what_has_not_been_done(begun, tmp_path, monkeypatch):
    assert card.main(["1.5"]) == 0  # there is room for small alone
    assert [words[1:2] for words in begun] == [["train"]] and "experiment=small" in begun[0]
    assert card.main(["4.5"]) == 0
    assert begun[1] == ["pytest", "-q"] and "experiment=dense" in begun[2] and len(begun) == 3
    state = read_table(tmp_path / "queue_card.csv").set_index("work")
    assert dict(state.state) == {"tests": "finished", "dense": "finished", "small": "finished", "huge": "waiting"}
    assert dict(state["from"]) == {"tests": "measured", "dense": "measured", "small": "measured", "huge": "estimated"}
    monkeypatch.setattr(card, "source_digest", lambda: "other code")
    assert card.main(["4.5"]) == 0
    assert begun[3:] == [["pytest", "-q"]]  # runs stay, whatever the code


def test_work_that_is_not_done_when_the_time_is_over_is_asked_to_stop(monkeypatch):
    asked = []

    class Work:
        def __init__(self, *_, **__):
            pass

        def wait(self, seconds):
            if not asked:
                raise subprocess.TimeoutExpired("work", seconds)
            return -15

        def terminate(self):
            asked.append("terminate")

    monkeypatch.setattr(subprocess, "Popen", Work)
    assert card._done("rankbench train", end=0.0) == card.WAITING and asked == ["terminate"]


@pytest.mark.usefixtures("begun")
def test_a_plan_does_nothing(begun):
    assert card.main(["13", "plan"]) == 0 and begun == []


@pytest.mark.parametrize("words", [[], ["soon"], ["-1"], ["13", "now"]])
def test_other_words_are_refused(words):
    with pytest.raises(ConfigError, match="give a number of minutes"):
        card.main(words)


@pytest.mark.parametrize(("preset", "steps"), [("kim_growth", 1000), ("kim_fig9_param_matched", 12_000)])
def test_an_estimate_is_of_the_steps_of_all_jobs(preset, steps):
    # three networks of one layer each, whose kernels are as short as they get
    assert card.estimate(preset, "laptop") == pytest.approx(3 * (card.START + steps * card.LAYER), rel=1e-12)

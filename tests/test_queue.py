"""paper_scale.queue: the order of the presets at one budget, what it leaves out, and how it continues."""

import re
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from paper_scale import queue

from rankbench.config.keys import ConfigError
from rankbench.config.presets import Preset
from rankbench.runs.tables import read_table

PRESETS = {  # with the number of their claims
    "slow": ("rankbench train experiment=slow", "one CPU core: 2 hours; budget=laptop: 1 minute", 4),
    "quick": ("rankbench analyze experiment=quick", "one CPU core: 30 seconds, also with budget=laptop", 1),
    "card": ("rankbench train experiment=card", "one GPU: hours; budget=laptop: one CPU core, 3 minutes", 9),
    "long": ("rankbench train experiment=long", "one CPU core: hours (an estimate); budget=laptop: 5 minutes", 9),
    "given": ("rankbench analyze experiment=given model=pretrained model.path=<folder>", "4 minutes", 2),
    "done": ("rankbench analyze experiment=done", "one CPU core: 10 seconds, also with budget=laptop", 1),
}


@pytest.fixture
def presets(monkeypatch, tmp_path):
    """Presets of which one has been run, in a folder of outputs of their own."""
    described = {name: Preset(command, cost, "") for name, (command, cost, _) in PRESETS.items()}
    monkeypatch.setattr(queue, "described", lambda: described)
    monkeypatch.setattr(queue, "all_claims_of", lambda name: ["claim"] * PRESETS[name][2])
    done = SimpleNamespace(complete=True, budget="paper")
    monkeypatch.setattr(queue, "best_runs", lambda names, outputs: {"done": done} if "done" in names else {})
    monkeypatch.setattr(queue, "OUTPUTS", tmp_path)


@pytest.mark.usefixtures("presets")
def test_most_claims_an_hour_first():
    table = queue.plan("paper").set_index("preset")
    assert list(table.index) == ["done", "quick", "given", "slow", "card", "long"]
    assert dict(table.state) == {
        "done": "finished",
        "quick": "waiting",
        "given": "needs a network",
        "slow": "waiting",
        "card": "needs a card",
        "long": "waiting",
    }
    assert table.claims_per_hour["slow"] == 4 / 2 and table.claims_per_hour["quick"] == 60 * 2
    assert table["from"]["long"] == "unknown" and table["from"]["slow"] == "stated"
    at_laptop = queue.plan("laptop").set_index("preset")
    assert dict(at_laptop.minutes) == {"done": 1 / 6, "quick": 0.5, "given": 4, "slow": 1, "card": 3, "long": 5}
    assert at_laptop.state["card"] == "waiting" and at_laptop.state["done"] == "waiting"  # done at paper's scale alone


@pytest.mark.usefixtures("presets")
def test_runs_what_waits_and_remembers_how_long_it_took(monkeypatch, tmp_path, capfd):
    begun = []

    def begin(command, **_):
        begun.append(command[3:])
        return Mock(wait=lambda seconds: int("experiment=slow" in command))

    monkeypatch.setattr(subprocess, "Popen", begin)
    assert queue.main(["paper"]) == 1  # because one of them failed
    assert sorted(words[1] for words in begun) == ["experiment=long", "experiment=quick", "experiment=slow"]
    assert ["analyze", "experiment=quick", "budget=paper", f"out={tmp_path / 'analyze' / 'paper_quick'}"] in begun
    told = capfd.readouterr().out
    assert "3 presets to run; 2 of them take 2.01 h of one core" in told
    assert re.search(r"^quick .* 1 claim$", told, re.MULTILINE) and re.search(r"^slow .* 4 claims$", told, re.MULTILINE)
    assert "needs a card: card" in told and "needs a network: given" in told and "finished: done" in told
    table = read_table(tmp_path / "queue_paper.csv").set_index("preset")
    assert table.state["slow"] == "failed" and table.state["long"] == table.state["quick"] == "finished"
    assert table["from"]["long"] == "measured" and table["from"]["slow"] == "stated"
    again = queue.plan("paper").set_index("preset")  # what failed, and what its folder does not show as complete
    assert again.state["slow"] == "waiting" and again["from"]["quick"] == "measured" and again.minutes["quick"] < 0.1


@pytest.mark.usefixtures("presets")
def test_a_plan_runs_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("ran"))
    assert queue.main(["paper", "plan"]) == 0


@pytest.mark.parametrize(
    "words, line", [([], "give a budget"), (["papr"], "did you mean paper"), (["paper", "plam"], "give a budget")]
)
def test_wrong_words(words, line):
    with pytest.raises(ConfigError, match=line):
        queue.main(words)

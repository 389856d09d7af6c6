"""rankbench.commands.budgets: what of a preset fits into a time."""

import math

import pytest
from refusals import refusal

from rankbench.commands.budgets import costs, fitted
from rankbench.commands.compose import compose
from rankbench.config import presets
from rankbench.config.presets import described
from rankbench.config.schema import KEYS

MINUTE, HOUR = 60, 3600


@pytest.mark.parametrize(
    "text, laptop, paper",
    [
        ("one CPU core: 45 minutes; budget=laptop: 4 minutes", 4 * MINUTE, 45 * MINUTE),
        ("one GPU: 1 day (an estimate); budget=laptop: one CPU core, 10 minutes", 10 * MINUTE, math.inf),
        ("one GPU: 1 hour; one CPU core: days; budget=laptop: 2 minutes", 2 * MINUTE, math.inf),
        ("one GPU: days; budget=laptop: one CPU core, 1.5 hours (an estimate)", 1.5 * HOUR, math.inf),
        ("one CPU core: 1 minute; budget=laptop: 30 seconds", 30, MINUTE),
        ("one CPU core: 30 minutes, also with budget=laptop", 30 * MINUTE, 30 * MINUTE),
    ],
)
def test_costs_are_read_as_they_are_written(text, laptop, paper):
    assert costs(text) == (laptop, paper)


def test_every_preset_states_its_cost_at_budget_laptop():
    assert {name for name, preset in described().items() if costs(preset.cost)[0] == math.inf} == set()


@pytest.mark.parametrize(
    "command, preset, time, chosen",
    [
        ("train", "dong_bounds", "12min", "budget=paper, about 9 min"),
        # laptop: 4 minutes with 3 seeds and 300 steps; paper: 10 seeds and 1000 steps
        ("train", "dong_bounds", "8min", "budget=laptop replicas=6, about 8 min"),
        ("train", "dong_bounds", "5.5min", "budget=laptop replicas=4 trainer.steps=309, about 5.49 min"),
        ("train", "dong_bounds", "240s", "budget=laptop replicas=3, about 4 min"),
        # 10 minutes with 5 seeds and 12,000 steps; paper: 5 seeds and 100,000 steps, for which no CPU's time is stated
        ("train", "amsel_learned_m", "6min", "budget=laptop replicas=3, about 6 min"),
        ("train", "amsel_learned_m", "1d", "budget=laptop replicas=5 trainer.steps=100000, about 1.39 h"),
        # 4 minutes with 5 seeds and 10 epochs; paper: 10 seeds and 105 epochs
        ("train", "dong_fig4_sorting", "15min", "budget=laptop replicas=10 trainer.epochs=18, about 14.4 min"),
        ("analyze", "knob_temperature", "3min", "budget=laptop replicas=10, about 3 min"),
    ],
)
def test_what_fits(command, preset, time, chosen, caplog):
    words = ["experiment=demo", f"experiment={preset}", f"budget={time}", "seed=3"]  # the last preset counts
    assert fitted(command, words) == [*words[:2], words[3], *chosen.partition(",")[0].split()]
    assert f"budget={time}: {chosen} by the preset's stated cost" in caplog.text


def test_the_config_records_what_was_chosen():
    cfg = compose("analyze", "experiment=dong_layernorm", "budget=90s", "model.mask=none", "model.values=free")
    assert (cfg.budget, cfg.replicas) == ("laptop", 5)


@pytest.mark.parametrize(
    "words, message",
    [
        (["budget=2h"], "budget=2h: a time needs a preset, whose cost is known; give experiment=<name>"),
        (["experiment=demo", "budget=2h", "replicas=3"], "replicas=3: budget=2h chooses seeds and steps"),
        (["experiment=demo", "budget=2h", "++trainer.steps=3"], "++trainer.steps=3: budget=2h chooses"),
        (["experiment=demo", "budget=2h", "-m"], "-m: budget=2h chooses"),
        (
            ["experiment=dong_fig2_residual", "budget=3min"],
            "budget=3min: dong_fig2_residual takes about 4.5 min with the fewest seeds that a verdict needs",
        ),
    ],
)
def test_refused(words, message):
    assert refusal(fitted, "train", words).startswith(message)


def test_a_preset_that_states_no_cost_fits_into_no_time(monkeypatch):
    monkeypatch.setattr(presets, "described", lambda: {"mine": presets.Preset("", "", "")})
    line = refusal(fitted, "train", ["experiment=mine", "budget=2h"])
    assert line == "budget=2h: the file of mine states no time on CPU cores; give budget=smoke, laptop, paper"


def test_the_key_says_that_a_time_is_allowed():
    assert "2h" in KEYS["budget"].meaning
    line = refusal(compose, "train", "budget=2x")
    assert "budget=2x: unknown; allowed are smoke, laptop, paper; or, with a preset, a time" in line

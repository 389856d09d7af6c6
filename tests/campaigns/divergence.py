"""Seeds whose weights become infinite or no numbers at random steps of a training that is interrupted and continued."""

import math
import random
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from command_line import SMALLEST

from campaigns.campaign import Campaign
from campaigns.processes import differences, results
from rankbench.commands.compose import compose
from rankbench.config.schema import TrainConfig
from rankbench.runs.run import Run
from rankbench.training.loop import train
from rankbench.training.seeds_side_by_side import Training

STEPS, SEEDS = 16, 3
SIZES = [*SMALLEST, f"trainer.steps={STEPS}", "trainer.checkpoint_every=3", f"replicas={SEEDS}"]


def _train(cfg: TrainConfig, run: Run, spoilt: dict[int, tuple[int, float]], kill_at: int | None = None) -> None:
    """Train; spoilt: for some seeds the step at which their weights are set to a value. kill_at: a step that is not
    finished."""
    update = Training.update

    def spoil_and_update(self: Training) -> None:
        for seed, (step, value) in spoilt.items():
            if self.progress.step == step:
                place = [number for number, status in enumerate(self.progress.status) if status == "training"].index(
                    seed
                )
                for parameter in self.parameters.values():
                    parameter.data[place] = value
        if self.progress.step == kill_at:
            raise KeyboardInterrupt
        update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "update", spoil_and_update)
        train(cfg, run)


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Spoil one or two seeds, once without and once with an interruption."""
    healthy = {}
    for number in range(size):
        evaluated = numbers.choice([1, 3, 4])
        cfg = compose("train", *SIZES, f"trainer.eval_every={evaluated}")
        if evaluated not in healthy:
            healthy[evaluated] = Run(folder / f"healthy{evaluated}")
            train(cfg, healthy[evaluated])
        step = numbers.randint(1, STEPS - 1)
        seeds = numbers.sample(range(SEEDS), numbers.choice([1, 1, 2]))
        spoilt = {seed: (step, numbers.choice([math.nan, math.inf, 1e30, -math.inf])) for seed in seeds}
        whole, stopped = Run(folder / "whole"), Run(folder / "stopped")
        _train(cfg, whole, spoilt)
        with pytest.raises(KeyboardInterrupt):
            kill_at = numbers.randrange(STEPS)
            _train(cfg, stopped, spoilt, kill_at)
        _train(cfg, stopped, spoilt)
        line = differences(results(stopped.folder), results(whole.folder)) or _wrong(whole, spoilt, healthy[evaluated])
        shutil.rmtree(whole.folder), shutil.rmtree(stopped.folder)
        yield (
            None if line is None else f"case {number}, evaluated every {evaluated}, {spoilt}, kill at {kill_at}: {line}"
        )
    return f"{STEPS} steps, {SEEDS} seeds side by side"


def _wrong(run: Run, spoilt: dict[int, tuple[int, float]], healthy: Run) -> str | None:
    """What is wrong with a training of which some seeds were spoilt, compared with the same one without that."""
    rows, wanted = run.table("metrics"), healthy.table("metrics")
    for row in run.summary()["seeds"]:
        if row["seed"] in spoilt:
            if row["status"] != "diverged" or row.get("diverged_at") != spoilt[row["seed"]][0]:
                return f"seed {row['seed']}: {row}"
            continue
        if row["status"] != "finished":
            return f"seed {row['seed']} is {row['status']}"
        noticed = max(seed["steps"] for seed in run.summary()["seeds"] if seed["status"] == "diverged")
        # later the seeds left are a smaller product, which may round otherwise
        ours, theirs = (
            table[(table.seed == row["seed"]) & (table.step <= noticed)].drop(columns=["seconds", "tokens_per_second"])
            for table in (rows, wanted)
        )
        if not ours.reset_index(drop=True).equals(theirs.reset_index(drop=True)):
            return f"seed {row['seed']} has other numbers"
    return None


CAMPAIGN = Campaign(
    about="Of three seeds side by side one or two get weights of nan, infinity or 1e30 at a random step; the same "
    "training is also killed at a random step and continued.",
    wrong="a divergence at another step than the spoilt one, a healthy seed whose metrics differ in a bit from a "
    "training without it as long as both are in the stack, or an interrupted training that ends otherwise.",
    full_size=300,
    cases=cases,
)

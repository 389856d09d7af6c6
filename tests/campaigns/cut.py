"""Power cuts: the writes of a training and its analyses, cut at every operation of the disk; then the same command."""

import random
import shutil
from collections.abc import Generator
from pathlib import Path

from command_line import SMALLEST
from power_cuts import power_cuts, restore

from campaigns.campaign import Campaign
from campaigns.jobs import MEASURED
from campaigns.processes import differences, results
from rankbench.analysing.runner import analyze_trained
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.config.schema import TrainConfig
from rankbench.runs.files import WriteError
from rankbench.runs.run import Run
from rankbench.training.loop import train

SIZES = [*SMALLEST, *MEASURED]


def _config(numbers: random.Random) -> TrainConfig:
    steps = numbers.randint(2, 6)
    words = [f"trainer.steps={steps}", f"trainer.checkpoint_every={numbers.randint(1, steps)}"]
    words += [f"trainer.eval_every={numbers.randint(1, steps)}", f"replicas={numbers.randint(1, 2)}"]
    return compose("train", *SIZES, *words, f"trainer.dynamics_every={numbers.choice(['null', '1', '2'])}")


def _run(cfg: TrainConfig, run: Run) -> None:
    train(cfg, run)
    analyze_trained(cfg, run)


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Record the writes of random trainings, and go on from every state that a cut could leave."""
    done = trainings = 0
    while done < size:
        cfg, trainings = _config(numbers), trainings + 1
        reference, run = (Run(folder / place / "run") for place in (f"whole{trainings}", f"cut{trainings}"))
        reference.folder.mkdir(parents=True)
        run.folder.parent.mkdir()
        with power_cuts(reference.folder) as left:
            _run(cfg, reference)
        wanted = results(reference.folder)
        for number, files in enumerate(left[: size - done]):
            restore(files, run.folder)
            try:
                _run(cfg, run)
                line = differences(results(run.folder), wanted)
            except (ConfigError, WriteError) as error:
                line = str(error)
            shutil.rmtree(run.folder)
            done += 1
            yield None if line is None else f"training {trainings}, state {number} ({', '.join(files)}): {line}"
    return f"of {trainings} trainings"


CAMPAIGN = Campaign(
    about="The writes of trainings with two analyses are recorded, with random intervals of evaluations, checkpoints "
    "and dynamics. A case is what a power cut could leave at one operation: names and contents up to the last sync, or "
    "also what followed it, in whole or in half; then the same command goes on from there.",
    wrong="a refusal, a file left behind, or tables, weights and statuses that differ from the uncut ones.",
    full_size=1000,
    cases=cases,
)

"""`make card MINUTES=13`: what is worth a GPU's time, within the minutes for which there is one.

    make card MINUTES=13                                the plan, then tests, benchmarks and runs; it continues
    make card MINUTES=13 PRESETS=plan                   the plan alone
    make card MINUTES=13 PRESETS="kim_fig4_charlm garg_head_rank"       of the presets these alone

First the tests that need a GPU, then the record of the benchmarks, one after the other. Then, side by side and at the
papers' scale, the trained presets that take a core of a CPU more than LONG: those that decide most claims a minute
first, each only if it fits into what is left. outputs/queue_card.csv is the state, with the minutes as they were
measured here (of a run: beside others) or else as they are estimated for a run alone; tables and figures lie beside it.
"""

import sys
import time
from collections.abc import Collection
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import cast

import pandas as pd

from paper_scale.queue import FAILED, FINISHED, WAITING, how_long, in_lines, kept, plan, work_off
from rankbench.commands.compose import compose
from rankbench.commands.composition import composed
from rankbench.commands.failures import refusing
from rankbench.commands.sweeps import Grid
from rankbench.config.keys import ConfigError, check_known
from rankbench.config.schema import TrainConfig
from rankbench.model import skeleton
from rankbench.runs import files
from rankbench.runs.machine import processors, source_digest
from rankbench.tasks import Corpus, build_task
from rankbench.training.compiling import num_steps

# Estimates of a step, from an H100 (docs/BENCHMARKS.md): seconds of a layer's kernels in a graph, however small, and
# operations a second where they are large. START: of a job, with imports and recording.
LAYER, RATES, START = 0.23e-3, {"fp32": 2.5e13, "bf16": 5e13, "fp64": 1.2e13}, 12.0
LM = "task=char_lm task.path=ptb model=causal model.layers=5 model.width=512 model.dropout=0.1 optimizer=adam"
LM += " precision=bf16 trainer.batch_size=64 trainer.steps=12 replicas=3"
BENCH = "device=cuda repeats=3 record=docs"
FIRST = {  # minutes, on an H100 with 16 processors
    "tests": (f"pytest -v --tb=short -m gpu -p no:benchmark -n {max(1, processors() - 2)}", 1.7),
    "bench": (f"benchmarks card replicas=50 trainer.compile=true {BENCH}", 2.2),
    "bench of a language model": (f"benchmarks card {LM} trainer.compile=true {BENCH}", 1.7),
    "bench of analyses": (f"benchmarks paths metrics {BENCH}", 0.4),
}
LONG = 30  # minutes of a core
AT_ONCE = max(1, processors() // 2)  # processes


def card_plan(minutes: float, names: Collection[str] = ()) -> pd.DataFrame:
    """A row for each piece of work, in order. minutes: those of the whole; what takes longer is too long. names: of
    the only presets. Raises ConfigError for those that are not trained or have run."""
    before, digest = kept(_state()), source_digest()
    work = [(name, words, 0, took) for name, (words, took) in FIRST.items()]
    queue = plan("paper")
    trained = queue[(queue.command == "train") & (queue.state != FINISHED)]
    check_known("preset", names, trained.preset)
    chosen = trained[trained.preset.isin(names) if names else trained.minutes > LONG]
    runs = [(row.preset, _command(row.preset), row.claims, estimate(row.preset) / 60) for row in chosen.itertuples()]
    work += sorted(runs, key=lambda run: -run[2] / run[3])
    done = pd.DataFrame(work, columns=["work", "command", "claims", "minutes"])
    done = done.assign(**{"from": "estimated", "state": WAITING, "source": digest})
    for index, row in done.iterrows():
        if (known := before.get(row.work)) is not None and known.command == row.command:
            done.loc[index, ["minutes", "from"]] = known.minutes, known["from"]
            if known.state == FINISHED and (known.claims or known.source == digest):  # other code has other tests
                done.loc[index, "state"] = FINISHED
    return done


def _state() -> Path:
    return files.OUTPUTS / "queue_card.csv"


def _command(preset: str) -> str:
    return f"rankbench train experiment={preset} out={files.OUTPUTS / 'train' / f'card_{preset}'}"


def estimate(preset: str, budget: str = "paper") -> float:
    """Seconds that a preset trains on an H100, without evaluations and analyses."""
    words = (f"experiment={preset}", f"budget={budget}")
    whole = composed("train", *words, return_hydra_config=True)
    jobs = Grid(whole).jobs if "MULTIRUN" in str(whole.hydra.mode) else [[]]
    own_words = ([word for word in job if word.partition("=")[0] not in ("experiment", "budget")] for job in jobs)
    configs = (cast(TrainConfig, compose("train", *words, *own)) for own in own_words)
    return sum(START + _seconds_of_job(cfg) for cfg in configs)


def _seconds_of_job(cfg: TrainConfig) -> float:
    task = build_task(cfg.task)
    applied = skeleton(replace(cfg.model, shared_layers=False), task)  # a shared matrix is applied in every layer
    weights = sum(parameter.numel() for parameter in applied.parameters() if parameter.ndim > 1)
    tokens = task.length // 2 if isinstance(task, Corpus) else task.length  # a text's length on average
    operations = 6 * prod((cfg.replicas, cfg.trainer.batch_size, tokens, weights))
    return num_steps(cfg, task) * max(LAYER * cfg.model.layers, operations / RATES[cfg.precision])


def run(table: pd.DataFrame, minutes: float) -> bool:
    """Do what waits and fits into what is left; whether all of that ended well."""
    end, comes_first = time.monotonic() + 60 * minutes, table.work.isin(FIRST)
    work_off(table, table.command[comes_first], _state(), 1, end)
    work_off(table, table.command[~comes_first], _state(), AT_ONCE, end)
    return not (table.state == FAILED).any()


def in_words(table: pd.DataFrame, minutes: float) -> list[str]:
    """What will be done, with its time, and what is too long for all of the time."""
    fits = table[(table.state == WAITING) & (table.minutes <= minutes)]
    total = f"{len(fits)} pieces of work take {how_long(fits.minutes.sum())} in all; there are {how_long(minutes)}"
    long = [f"{row.work} ({how_long(row.minutes)})" for row in table[table.minutes > minutes].itertuples()]
    return [*in_lines(fits), total, *([f"too long: {', '.join(long)}"] if long else [])]


def main(words: list[str]) -> int:
    """Returns the exit code: 1 if something failed."""
    try:
        minutes = float(words[0])
    except (IndexError, ValueError):
        minutes = 0.0
    if not 0 < minutes < inf:
        raise ConfigError(f"card {' '.join(words)}: give a number of minutes, `plan` for the plan alone, presets")
    is_plan = words[1:2] == ["plan"]
    table = card_plan(minutes, words[2:] if is_plan else words[1:])
    files.OUTPUTS.mkdir(exist_ok=True)
    print("\n".join(in_words(table, minutes)), flush=True)
    return int(not is_plan and not run(table, minutes))


if __name__ == "__main__":
    with refusing("card"):
        sys.exit(main(sys.argv[1:]))

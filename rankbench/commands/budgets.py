"""A budget that is a time, as in budget=2h: choose the scale, seeds and steps of a preset that fit, by the cost stated
in its file. Nothing is measured, so that the same command always makes the same choice and continues its own run."""

import logging
import math
import re
from collections.abc import Iterable

from omegaconf import OmegaConf

from rankbench.config.keys import ConfigError
from rankbench.config.schema import BUDGETS
from rankbench.progress import UNITS, duration

log = logging.getLogger(__name__)

SECONDS = UNITS | {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
FEWEST = 3  # seeds; with fewer, no claim has a verdict


def fitted(command: str, words: list[str]) -> list[str]:
    """Replace a budget that is a time by budget, replicas and a length of training, and log these words.

    Chooses paper if it fits, else laptop. Time that laptop leaves goes into seeds, up to paper's number, and then into
    steps, up to paper's number. If laptop does not fit, it gets fewer seeds. ConfigError if FEWEST seeds do not fit.
    """
    given = [word for word in words if re.fullmatch(r"budget=\d+(\.\d+)?(s|min|h|d)", word)]
    if not given or command not in ("train", "analyze"):
        return words
    budget, others = given[-1], [word for word in words if word not in given]
    chosen, cost = _chosen(command, budget, others)
    log.warning("%s: %s, about %s by the preset's stated cost", budget, " ".join(chosen), duration(cost))
    return [*others, *chosen]


def _chosen(command: str, budget: str, others: list[str]) -> tuple[list[str], float]:
    """The words that replace a budget, and the seconds that the command then takes."""
    from rankbench.commands.composition import composed
    from rankbench.config.presets import described

    presets = described()
    name = next((word.partition("=")[2] for word in reversed(others) if re.match(r"\+?experiment=", word)), None)
    if name not in presets:
        raise ConfigError(
            f"{budget}: a time needs a preset, whose cost is known; give experiment=<name> of `rankbench list`, or "
            f"one of budget={', '.join(BUDGETS)}"
        )
    for word in others:
        if word in ("-m", "--multirun") or re.match(r"\+*(replicas|trainer\.(steps|epochs))=", word):
            raise ConfigError(f"{word}: {budget} chooses seeds and steps of the preset; leave one of the two out")
    laptop, paper = costs(presets[name].cost)
    if laptop == math.inf:
        raise ConfigError(f"{budget}: the file of {name} states no time on CPU cores; give budget={', '.join(BUDGETS)}")
    ((length, unit),) = re.findall(r"^budget=([\d.]+)([a-z]+)$", budget)
    time = float(length) * SECONDS[unit]
    if time >= paper:
        return ["budget=paper"], paper
    small, large = (composed(command, f"experiment={name}", f"budget={scale}") for scale in ("laptop", "paper"))
    seeds = math.floor(small.replicas * time / laptop)
    if seeds < min(FEWEST, small.replicas):
        least = laptop * min(FEWEST, small.replicas) / small.replicas
        raise ConfigError(
            f"{budget}: {name} takes about {duration(least)} with the fewest seeds that a verdict needs; take that, or "
            "budget=smoke, which only shows that it runs"
        )
    seeds = min(seeds, max(small.replicas, large.replicas))
    keys, cost = {"budget": "laptop", "replicas": seeds}, laptop * seeds / small.replicas
    for key in ("trainer.steps", "trainer.epochs"):
        short, long = (OmegaConf.select(config, key) for config in (small, large))
        if command == "train" and short and long and short < long and (times := time / cost) > 1:
            keys[key] = min(math.floor(short * times), int(long))
            cost *= keys[key] / short
    return [f"{key}={value}" for key, value in keys.items()], cost


def costs(text: str) -> tuple[float, float]:
    """Seconds that a preset takes on CPU cores at budget=laptop and at budget=paper, according to its file.

    text: as in `one CPU core: 45 minutes; budget=laptop: 4 minutes`. inf where no number is given, as in `hours`, and
    where the time is stated for a GPU only.
    """
    parts = text.split(";")
    at_laptop = [part for part in parts if "budget=laptop:" in part]
    paper = _seconds(part for part in parts if part not in at_laptop and "GPU" not in part)
    return (_seconds(at_laptop) if at_laptop else paper), paper


def _seconds(parts: Iterable[str]) -> float:
    """The longest time that is stated; inf where there is none."""
    stated = re.findall(r"(\d+(?:\.\d+)?) (second|minute|hour|day)", " ".join(parts))
    return max((float(number) * SECONDS[unit] for number, unit in stated), default=math.inf)

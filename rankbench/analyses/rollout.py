"""Free running: a network applied again and again to its own output (Dong et al. 2021, sec. 4.2, Fig. 3).

Shapes: T step, N token, C coordinate.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.columns import WEIGHTS
from rankbench.config.keys import ConfigError, key
from rankbench.model.transformer import Transformer
from rankbench.plots.rollout import draw_rollout
from rankbench.tasks.circle_arcs import CircleArcs

ESCAPED = 100  # radii of the arcs: a run that ends farther out has left the circle for good
OVERFLOW = 1e6  # radii at which a run is stopped, long before its numbers overflow
SMALLEST_DISTANCE = 1e-12  # of the first distance; positions that are closer differ by rounding alone


@dataclass(frozen=True)
class Options:
    """How far the network runs, and when its tokens count as one point."""

    steps: int | None = key("Number of times the network is applied. null: the number of an arc's points.", at_least=1)
    every: int = key("Interval between rows. The last step is a row too.", unit="steps", at_least=1)
    collapsed_below: float = key("Share of the first distance below which tokens count as one point.", above=0, below=1)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each token at each step, in float64, from the start of the arcs. Lengths are in units of the radius.

    A run that diverges ends early.
    """
    task = subject.task
    steps = task.points if options.steps is None else options.steps
    parts = []
    for weights, exact in subject.networks_in_float64():
        path_TNC = free_run(exact, task, steps)
        summary = _summary(path_TNC, exact, task, options)
        parts.append(pd.DataFrame({"weights": weights, **_columns(path_TNC, task, options), **summary}))
    return pd.concat(parts, ignore_index=True)


@torch.no_grad()
def free_run(model: Transformer, task: CircleArcs, steps: int) -> np.ndarray:
    """Positions (T, 2, 2) at the steps 0..steps, or fewer if the run diverges."""
    device = model.read_out.weight.device
    now_1NC = task.positions(torch.zeros(1)).to(device)
    path = [now_1NC]
    for _ in range(steps):
        now_1NC = model(now_1NC)
        if not now_1NC.abs().max() < OVERFLOW * task.radius:  # also stops at nan
            break
        path.append(now_1NC)
    return torch.cat(path).cpu().numpy()


def _distances(path_TNC: np.ndarray) -> np.ndarray:
    return np.linalg.norm(path_TNC[:, 0] - path_TNC[:, 1], axis=-1)


def _columns(path_TNC: np.ndarray, task: CircleArcs, options: Options) -> dict[str, np.ndarray]:
    """Columns of the rows of a run, two for each step that is kept."""
    last = len(path_TNC) - 1
    kept = sorted({*range(0, last + 1, options.every), last})
    distance_T = _distances(path_TNC)
    error_TN = np.linalg.norm(path_TNC - task.positions(torch.arange(last + 1)).numpy(), axis=-1)
    return {
        "step": np.repeat(kept, 2),
        "token": np.tile([1, 2], len(kept)),
        "x": path_TNC[kept, :, 0].ravel(),
        "y": path_TNC[kept, :, 1].ravel(),
        "distance": np.repeat(distance_T[kept], 2),
        "below_floor": np.repeat(distance_T[kept] <= SMALLEST_DISTANCE * distance_T[0], 2).astype(float),
        "error": error_TN[kept].ravel(),
    }


@torch.no_grad()
def _summary(path_TNC: np.ndarray, model: Transformer, task: CircleArcs, options: Options) -> dict[str, float]:
    device = model.read_out.weight.device
    steps_T = torch.arange(task.points)
    here_TNC, next_TNC = task.positions(steps_T).to(device), task.positions(steps_T + 1).to(device)
    wrong, moved = ((x_TNC - next_TNC).square().sum(-1).mean().sqrt().item() for x_TNC in (model(here_TNC), here_TNC))
    distance_T = _distances(path_TNC)
    halved = np.flatnonzero(distance_T <= distance_T[0] / 2)
    return {
        "skip": int(model.cfg.skip),
        "mlp": int(model.cfg.mlp),
        "one_step_error": wrong / moved,
        "collapsed": int(distance_T[-1] < options.collapsed_below * distance_T[0]),
        "escaped": int(np.abs(path_TNC[-1]).max() > ESCAPED * task.radius),
        "half_step": float(halved[0]) if len(halved) else float("nan"),
    }


def digest(table: pd.DataFrame) -> str:
    """How many seeds collapse or escape, and how fast, for a terminal."""
    networks = table.drop_duplicates(["run", "model", "seed", "weights"])
    columns = ["collapsed", "escaped", "half_step", "one_step_error"]
    by_kind = networks.groupby(["model", "weights"], sort=False)[columns].mean()
    return (
        f"free running: shares of {networks.seed.nunique()} seeds that collapse and escape; means of the rest\n"
        f"{by_kind.round(3).to_string()}"
    )


def check(subject: Subject, _: Options) -> None:
    """Raise ConfigError for a task without a trajectory."""
    if not isinstance(task := subject.task, CircleArcs):
        raise ConfigError(
            f"analysis=rollout: needs a task with a trajectory; task.name={task.name} has none; use task=circle_arcs"
        )


COLUMNS = {
    **WEIGHTS,
    "step": "Number of times that the network was applied.",
    "token": "1 or 2.",
    "x": "The token's position.",
    "y": "The token's position.",
    "distance": "Distance between the tokens.",
    "below_floor": "1 where only rounding is left of the distance (1e-12 of the first one), else 0.",
    "error": "Distance to the token's true position, on the arc or past its end round the circle.",
    "skip": "Whether the network has skips. This and the next ones are the same in all rows of a network.",
    "mlp": "Whether it has MLPs.",
    "one_step_error": "Of the trained step: root mean square distance of predicted and true next positions over the "
    "length of a step. 1: no better than standing still.",
    "collapsed": "1 if the last distance is below the option collapsed_below of the first, else 0.",
    "escaped": "1 if a token is beyond 100 radii at the end, else 0.",
    "half_step": "First step with at most half the first distance; nan: none.",
}
ANALYSIS = Analysis(Options, table, draw_rollout, digest, COLUMNS, ("half_step",), {"sublayers", "task"}, check)

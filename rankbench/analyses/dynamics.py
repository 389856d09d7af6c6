"""How rank, entropy and constants of every layer change in training, as the run recorded them in layers.csv."""

from dataclasses import dataclass

import pandas as pd

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.keys import ConfigError, key
from rankbench.measures.attention_matrices import ATTENTION_FLOORS, ATTENTION_METRICS
from rankbench.measures.lipschitz_of_networks import HEAD_METRICS, LIPSCHITZ_METRICS
from rankbench.measures.states import STATE_FLOORS, STATE_METRICS
from rankbench.plots.dynamics import draw_dynamics
from rankbench.runs.tables import mean_of_seeds

METRICS = (*STATE_METRICS, *ATTENTION_METRICS, *HEAD_METRICS, *LIPSCHITZ_METRICS)


@dataclass(frozen=True)
class Options:
    """Which metrics of layers.csv are drawn."""

    metrics: list[str] = key("Metrics of layers.csv to draw.", choices=METRICS, nonempty=True)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: step, layer, sublayer, head, as in the table of the analysis `residual`; columns: the metrics, means over
    trainer.dynamics_sequences test sequences, and the noise floors of states and of P, as in `residual`.

    Rows of weights (layer, sublayer and head of the layer they belong to) also have the spectral norms of a head's
    W_QK, the bilinear form of the scores that enter the softmax, and of its W_VO (both as
    rankbench.measures.lipschitz_of_networks.head_maps), and bounds on the Lipschitz constant of attention on as many
    tokens as the longest of these sequences has, infinite if there is none. ConfigError for a run that was trained
    without trainer.dynamics_every."""
    if subject.history is None:
        raise ConfigError(
            f"analysis=[dynamics]: {subject.run} has no layers.csv; train it with trainer.dynamics_every=<steps>"
        )
    for metric in options.metrics:
        if metric not in subject.history:  # the run is older than this metric
            raise ConfigError(
                f"analysis.dynamics.metrics: {subject.run}/layers.csv has no {metric}; train it again, or name others"
            )
    floors = [name for name in (*STATE_FLOORS, *ATTENTION_FLOORS) if name in subject.history]
    return subject.history[["step", "layer", "sublayer", "head", *options.metrics, *floors]]


def digest(table: pd.DataFrame) -> str:
    """Each metric in the last layer, at the first and at the last step, mean over seeds and heads."""
    lines = [f"from step {table.step.min()} to {table.step.max()} ({mean_of_seeds(table.seed.nunique())}), last layer:"]
    last = table[table.layer == table.layer.max()]
    for metric in [name for name in table if name in METRICS]:
        by_step = last.dropna(subset=metric).groupby("step")[metric].mean()
        if len(by_step):
            lines.append(f"{metric} {by_step.iloc[0]:.3g} -> {by_step.iloc[-1]:.3g}")
    return "\n".join(lines)


def check(subject: Subject, _: Options) -> None:
    """Raise ConfigError for a training that does not record the layers."""
    assert subject.training is not None  # see needs
    if subject.training.trainer.dynamics_every is None:
        raise ConfigError(
            "analysis=dynamics: needs trainer.dynamics_every, the steps between two records of the layers; "
            "got trainer.dynamics_every=null"
        )


ANALYSIS = Analysis(
    Options,
    table,
    draw_dynamics,
    digest,
    ("step", "sublayer"),
    needs={"sublayers", "history"},
    check=check,
    most_panels=6,
)

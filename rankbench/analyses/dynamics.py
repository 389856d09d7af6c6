"""How rank, entropy and constants of every layer change in training, as the run recorded them in layers.csv."""

from dataclasses import dataclass

import pandas as pd

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.columns import ATTENTION, ATTENTION_FLOORS, STATE_FLOORS, STATES
from rankbench.config.keys import ConfigError, key
from rankbench.measures.attention_matrices import ATTENTION_METRICS
from rankbench.measures.lipschitz_of_networks import HEAD_METRICS, LIPSCHITZ_METRICS
from rankbench.measures.states import STATE_METRICS
from rankbench.plots.training import draw_dynamics
from rankbench.runs.tables import mean_of_seeds

METRICS = [*STATE_METRICS, *ATTENTION_METRICS, *HEAD_METRICS, *LIPSCHITZ_METRICS]


@dataclass(frozen=True)
class Options:
    """Which metrics of layers.csv are drawn."""

    metrics: list[str] = key("Metrics of layers.csv to draw.", choices=METRICS, nonempty=True)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each state, each head and each attention at each recorded step, as in the analysis `residual`.

    Numbers are means over trainer.dynamics_sequences test sequences. Columns are those of the option `metrics`, and the
    noise floors. ConfigError for a run that was trained without trainer.dynamics_every.
    """
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


COLUMNS = {
    "step": "Number of training steps.",
    "layer": "0: what enters the first layer; else the number of the layer.",
    "sublayer": "input; attention or mlp, the state after it; weights, P and the maps of one head.",
    "head": "Number of the head, from 1; empty for states.",
    **STATES,
    **ATTENTION,
    "qk_norm": "Spectral norm of a head's W_QK, the bilinear form of the scores that enter the softmax.",
    "vo_norm": "Spectral norm of a head's W_VO.",  # both as rankbench.measures.lipschitz_of_networks.head_maps
    **{
        name: f"Bound on the Lipschitz constant of attention for p = {p}, on as many tokens as the longest of these "
        "sequences has; infinite if there is none."
        for name, p in LIPSCHITZ_METRICS.items()
    },
    **STATE_FLOORS,
    **ATTENTION_FLOORS,
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_dynamics,
    digest,
    COLUMNS,
    ("step", "sublayer"),
    needs={"sublayers", "history"},
    check=check,
    most_panels=6,
)

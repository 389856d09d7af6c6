"""Loss and speed over training steps, as a run wrote them down in metrics.csv (Kim et al. 2021, Fig. 4, Tables 1-3)."""

import math
from dataclasses import dataclass

import pandas as pd

from rankbench.analyses.analysis import Analysis, Plan, Subject
from rankbench.config import ConfigError
from rankbench.plots.curves import draw_curves
from rankbench.tables import over_seeds


@dataclass(frozen=True)
class Options:
    """splits: whose rows there are, of train (means since the row before), valid and test."""

    splits: list[str]

    def __post_init__(self) -> None:
        for split in self.splits:
            if split not in ("train", "valid", "test"):
                raise ConfigError(f"analysis.curves.splits={split}: unknown; allowed are train, valid, test")
        if "test" not in self.splits:
            raise ConfigError("analysis.curves.splits: test is what the figure shows; leave it among them")


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: step, split; columns: loss (nats per scored token, or squared error), accuracy (where the task has one);
    microseconds_per_token, of training since the evaluation before, of all seeds of the run (nan at the start and,
    where there are more, in the first interval, which warms up).

    The same in all rows of a seed: variant (model.name), layers, parameters; best_step, that of the smallest validation
    loss (the last one where the task has no validation set); test_loss and test_bits (nats over log 2), at that step;
    smallest_test_loss, of all steps, which nobody may choose by but which papers print.

    ConfigError for a fresh model.
    """
    if subject.curve is None:
        raise ConfigError("analysis=[curves]: a fresh model has none; give a trained run with run=<folder>")
    rows = subject.curve
    test = rows[rows.split == "test"].set_index("step").loss
    valid = rows[rows.split == "valid"].set_index("step").loss
    best_step = test.index[-1] if valid.empty else valid.idxmin()
    found = rows[rows.split.isin(options.splits)][["step", "split", "loss", "accuracy"]].dropna(axis=1, how="all")
    times = 1e6 / rows[rows.split == "train"].set_index("step").tokens_per_second
    if len(times) > 1:
        times.iloc[0] = float("nan")
    return found.reset_index(drop=True).assign(
        variant=subject.model.cfg.name,
        layers=subject.model.cfg.layers,
        parameters=sum(parameter.numel() for parameter in subject.model.parameters()),
        best_step=best_step,
        test_loss=test[best_step],
        **({} if "accuracy" not in found else {"test_bits": test[best_step] / math.log(2)}),
        smallest_test_loss=test.min(),
        microseconds_per_token=found.step.map(times).to_numpy(),
    )


def digest(table: pd.DataFrame) -> str:
    """Test loss of each variant at its best validation step, mean over seeds, for a terminal."""
    lines = [f"test loss at the best validation step (mean of {table.seed.nunique()} seeds)"]
    for row in over_seeds(table, ["variant", "layers"], "test_loss").itertuples():
        spread = "" if pd.isna(row.ci95) else f" +- {row.ci95:.2g} (95 % CI)"
        bits = f", {row.mean / math.log(2):.4f} bits per token" if "test_bits" in table else ""
        lines.append(f"{row.variant}, layers={row.layers}: {row.mean:.4f}{spread}{bits}")
    return "\n".join(lines)


def check_plan(plan: Plan, _: Options) -> None:
    """ConfigError for a fresh model."""
    if plan.training is None:
        raise ConfigError("analysis=curves: needs a training; a fresh model has none; give run=<folder>")


ANALYSIS = Analysis(Options, table, draw_curves, digest, any_model=True, check=check_plan)

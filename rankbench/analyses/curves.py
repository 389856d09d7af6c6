"""Loss and speed over training steps, as the run recorded them in metrics.csv (Kim et al. 2021, Fig. 4, Tables 1-3)."""

import math
from dataclasses import dataclass

import pandas as pd

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.config.keys import ConfigError, key
from rankbench.plots.curves import draw_curves
from rankbench.runs.tables import mean_of_seeds, over_seeds
from rankbench.tasks.char_lm import CharLm


@dataclass(frozen=True)
class Options:
    """Which losses are drawn."""

    splits: list[str] = key(
        "Splits with rows. train: means since the previous row.", choices=("train", "valid", "test"), nonempty=True
    )

    def __post_init__(self) -> None:
        if "test" not in self.splits:
            raise ConfigError("analysis.curves.splits: the figure needs test; add it to the list")


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each evaluated step and split.

    A token of a language model is a predicted symbol: a character or the end of a sentence. ConfigError for a network
    that was not trained.
    """
    if subject.curve is None:
        raise ConfigError("analysis=[curves]: needs metrics.csv of a training; give with run=<folder> one that has it")
    rows = subject.curve
    test = rows[rows.split == "test"].set_index("step").loss
    valid = rows[rows.split == "valid"].set_index("step").loss
    valid = valid[valid.index.isin(test.index)]  # a kill can cut the rows of the last evaluation short
    best_step = test.index[-1] if valid.empty else valid.idxmin()
    losses = rows[rows.split.isin(options.splits)][["step", "split", "loss", "accuracy"]].dropna(axis=1, how="all")
    times = 1e6 / rows[rows.split == "train"].set_index("step").tokens_per_second
    if len(times) > 1:
        times.iloc[0] = float("nan")
    of_text = {}
    if isinstance(subject.task, CharLm):
        of_text["test_loss_per_character"] = test[best_step] * subject.task.symbols_per_character(subject.test)
        of_text |= subject.task.counted_losses(subject.test)
    return losses.reset_index(drop=True).assign(
        variant=subject.network.cfg.name,
        layers=subject.network.cfg.layers,
        width=subject.network.cfg.width,
        parameters=sum(parameter.numel() for parameter in subject.network.parameters()),
        best_step=best_step,
        test_loss=test[best_step],
        **of_text,
        **({} if "accuracy" not in losses else {"test_bits": test[best_step] / math.log(2)}),
        microseconds_per_token=losses.step.map(times).to_numpy(),
    )


def digest(table: pd.DataFrame) -> str:
    """Test loss of each variant at its best validation step, of a text also per character; mean over seeds."""
    text = "test_loss_per_character" in table
    unit = ", nats per predicted symbol, ends of sentences included" if text else ""
    lines = [f"test loss at the best validation step{unit} ({mean_of_seeds(table.seed.nunique())})"]
    axes = ["variant", "layers"]
    per_character = over_seeds(table, axes, "test_loss_per_character")["mean"] if text else None
    for number, row in enumerate(over_seeds(table, axes, "test_loss").itertuples()):
        spread = "" if pd.isna(row.low95) else f" [{row.low95:.4g}, {row.high95:.4g}] (95 %)"
        also = "" if per_character is None else f", {per_character[number]:.4f} nats per character"
        if "test_bits" in table:
            also += f", {row.mean / math.log(2):.4f} bits per {'symbol' if text else 'token'}"
        lines.append(f"{row.variant}, layers={row.layers}: {row.mean:.4f}{spread}{also}")
    return "\n".join(lines)


COLUMNS = {
    "step": "Number of training steps.",
    "split": "train, valid or test.",
    "loss": "Nats per scored token, or squared error.",
    "accuracy": "Share of scored tokens. No column for a regression.",
    "variant": "model.name. This and the next ones but the last are the same in all rows of a seed.",
    "layers": "Number of layers.",
    "width": "Width of the network.",
    "parameters": "Number of parameters.",
    "best_step": "Step of the smallest validation loss; the last step if the task has no validation set.",
    "test_loss": "Test loss at best_step.",
    "test_loss_per_character": "The same total of nats, those for the ends included, over the number of characters "
    "alone. This and the next two: of a language model.",
    "unigram_loss": "Loss of the training set's symbol frequencies.",
    "bigram_loss": "Loss of its frequencies of symbols after each symbol.",
    "test_bits": "test_loss over log 2 (bits). No column for a regression.",
    "microseconds_per_token": "Of training since the last evaluation, over all seeds of the run; nan at the start "
    "and, if there are several intervals, in the first one, which warms up.",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_curves,
    digest,
    COLUMNS,
    ("best_step",),
    needs={"history"},
    lines="variant",
    drawn_apart=("variant", "layers"),
)

"""What a claim is: a sentence that a table can refute, its number, its threshold and its control; and the claims."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from rankbench.config.keys import ConfigError, check_known
from rankbench.config.plugins import Registry
from rankbench.runs.intervals import SCALES

HELD, FAILED, UNDECIDED = "held", "failed", "undecided"
PASSED, BROKEN = "passed", "broken"  # outcomes of a check
NOTHING = "the table has no rows for this claim"
NOT_JUDGED = "not judged since the claim changed"
FEWEST = 3  # seeds, or steps, that an interval needs
STILL_FALLS = 0.02  # nats: a language model whose test loss falls by more over its last quarter is still in training
LEARNED = 0.9  # share of the reachable accuracy below which a network's paths say nothing about a claim


class NotMeasurable(Exception):
    """Raised by a measure where the rows do not hold its number; the message becomes the verdict's reason."""


def require(condition: object, reason: str) -> None:
    """Raise NotMeasurable with this reason where the condition of a measure does not hold."""
    if not condition:
        raise NotMeasurable(reason)


class AtMost(float):
    """Upper bound of a number that rounding hides."""


class Threshold(NamedTuple):
    """Where a number should lie: above the threshold (side=+1), below it (-1), or within it to either side of 0 (0)."""

    side: int
    at: float

    def __str__(self) -> str:
        return {+1: "> ", -1: "< ", 0: "within ±"}[self.side] + f"{self.at:g}"


above, below, within = partial(Threshold, +1), partial(Threshold, -1), partial(Threshold, 0)


class Control(NamedTuple):
    """A set-up in which the claim must fail: its description, and how its table is made from the judged rows."""

    statement: str
    falsify: Callable[[pd.DataFrame], pd.DataFrame]

    @classmethod
    def beyond(cls, statement: str, of: str = "", **columns: Any) -> "Control":
        """Control whose numbers lie beyond the threshold: these columns set to a number, or to a function of the rows,
        which pandas' language can express (`0.99 * bound_any`). of: which rows, in the same language; empty: all."""

        def falsify(rows: pd.DataFrame) -> pd.DataFrame:
            values = {name: rows.eval(x, engine="python") if isinstance(x, str) else x for name, x in columns.items()}
            return rows.assign(**values).where(rows.eval(of, engine="python"), rows) if of else rows.assign(**values)

        return cls(statement, falsify)


def untrained_by_accuracy(rows: pd.DataFrame) -> str:
    """Say why the network counts as untrained; empty if it has learned its task.

    Where `ceiling_accuracy` is known, the accuracy is taken as a share of it.
    """
    if "whole_accuracy" not in rows:
        return "the table does not say whether the network has learned its task; analyse the run again"
    reached = rows.whole_accuracy
    if "ceiling_accuracy" in rows:
        reached = reached / rows.ceiling_accuracy.fillna(1.0)
    accuracy = reached.groupby(rows.seed).mean().mean()
    return "" if accuracy >= LEARNED else f"the network has not learned its task (accuracy {accuracy:.3f})"


def untrained_by_loss(rows: pd.DataFrame) -> str:
    """Say why the language model counts as untrained; empty unless its test loss still falls (`loss_fall`)."""
    if "loss_fall" not in rows:
        return "this table does not say whether the test loss still fell; run the analysis again"
    fall = rows.groupby("seed").loss_fall.first().mean()
    if fall <= STILL_FALLS:
        return ""
    return f"the test loss still fell by {fall:.2g} nats over the last quarter of training"


def has_row(rows: pd.DataFrame, **values: str | float) -> bool:
    """Condition of a claim: whether a row has these values in these columns."""
    return bool((rows[list(values)] == pd.Series(values)).all(axis=1).any())


def looked_up(rows: pd.DataFrame, values: pd.Series) -> pd.Series:
    """Each row's value in a series that is indexed by some of the rows' columns, for controls."""
    return rows.join(values.rename("looked up"), on=values.index.names)["looked up"]


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper and how to test it.

    `measure` maps one seed's rows of `table` to a number, of which the paper says that it lies as `claimed`.

    control: a set-up in which the claim must fail.
    by: columns of the table; each of their values is judged separately.
    applies: whether the claim is about these rows at all; by default it is.
    why_untrained: says why a network is not trained well enough to be judged; None where training does not matter.
    either_way: the smallest and the largest number that a repeat can give. Untrained repeats are counted once at each
        extreme; the claim is decided if both give the same outcome.
    is_check: an identity, a theorem or a precondition of other claims, so it checks the tool or the preset rather than
        the networks.
    exact: the number does not depend on chance, so the worst seed decides.
    scale: `real`; `share` (in [0, 1]); `positive` (above 0, without an upper end); `rate` (each seed gives 0 or 1).
    published: the paper's number, or a function that gives the paper's rows for the configurations in ours, which are
    measured like ours.
    across: compares the configurations of a sweep, so it is judged once on all of them together.
    along: compares the values of this swept key, so it is judged once for each value of the other keys.
    exists: says that there is such a network; an example makes it held, and the lack of one leaves it undecided.
    repeats: the column of repeated measurements, `seed`, `step` or `checkpoint`; steps and checkpoints without a
        measurement are left out.
    floor: the column that is above 0 where rounding makes a row's numbers; a verdict says how many rows these are.
    sourced: whether the source states the threshold, or it is the 1 at which a ratio turns round. A threshold of 0 is
    the sign of a difference; all others are ours.
    since: the day on which the claim's test last changed. Verdicts of an earlier test are not shown as this claim's.
    in_words: of a measure that is a log10, the sentence in which `{}` stands for the number itself.
    """

    statement: str
    source: str
    table: str
    measure: Callable[[pd.DataFrame], float]
    claimed: Threshold
    control: Control
    by: tuple[str, ...] = ()
    applies: Callable[[pd.DataFrame], bool] = lambda rows: True
    why_untrained: Callable[[pd.DataFrame], str] | None = untrained_by_accuracy
    either_way: tuple[float, float] | None = None
    is_check: bool = False
    exact: bool = False
    scale: str = "real"
    published: float | Callable[[pd.DataFrame], pd.DataFrame] | None = None
    across: bool = False
    along: str = ""
    exists: bool = False
    repeats: str = "seed"
    floor: str = ""
    sourced: bool = False
    since: str = ""
    in_words: str = ""

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "measure": (Callable, "a function"),
            "claimed": (Threshold, "above(x), below(x) or within(x)"),
            "control": (Control, "a Control"),
            "by": (tuple, "a tuple of columns"),
            "applies": (Callable, "a function"),
            "why_untrained": (Callable | None, "a function or None"),
            "published": (float | int | Callable | None, "a number or a function"),
        }
        for name, (kind, wanted) in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{name} is of type {type(value).__name__}; give {wanted}")
        check_known("scale", [self.scale], ("real", *SCALES, "rate"))

    @property
    def threshold(self) -> str:
        """Where the threshold comes from: sign, source or ours."""
        return "sign" if self.claimed.at == 0 else "source" if self.sourced else "ours"


# A claim for which training does not matter, and a check on numbers that do not depend on chance either
of_any_weights = partial(Claim, why_untrained=None)
exact_check = partial(of_any_weights, is_check=True, exact=True)


def _before_training(rows: pd.DataFrame) -> pd.DataFrame:
    fresh = rows[rows.weights == "initialised"]
    return pd.concat([fresh, fresh.assign(weights="trained")])


# Of a claim on trained weights beside those that they began with
BEFORE_TRAINING = Control("the same networks before training", _before_training)


CLAIMS = Registry("CLAIMS", Claim)  # papers and plug-ins fill both
PAPERS = Registry("PAPERS", str)  # name -> title; a claim's source begins with the name of its paper


def paper_of(source: str) -> str:
    """Name of the paper that a claim's source names; the source itself if it is none of PAPERS."""
    return next((name for name in PAPERS if source.startswith(name)), source)

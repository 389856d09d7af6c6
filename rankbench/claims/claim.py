"""What a claim is and how it is judged: held, failed, or undecided at this budget.

A claim is judged by a number per seed and its 95 % confidence interval over seeds (Student's t). The interval on the
claimed side: held; on the other: failed; across the line, or too few seeds, or an untrained network: undecided. Times,
of which seeds trained side by side have one between them, are judged over the intervals between evaluations instead.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rankbench.tables import halfwidth95

HELD, FAILED, UNDECIDED = "held", "failed", "undecided"
FEWEST = 3  # seeds, or steps, that an interval is taken over
LEARNED = 0.9  # share of the reachable accuracy below which the paths of a network say nothing about a claim


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper and how to test it: `measure` maps one seed's rows of the table to a number, which the
    paper says lies above (side=+1) or below (side=-1) `line`.

    by: columns of the table whose values are judged one by one. needs_trained: undecided where the network has not
    learned its task (column whole_accuracy). exact: no chance is in the number, one seed decides. published: the number
    that the paper prints for what is measured, where it prints one. across: compares the configurations of a sweep, so
    that it is judged once, on all of them together. repeats: the column whose values are measurements of the same, seed
    or step; steps at which there is nothing to measure are left out.
    """

    statement: str
    source: str
    table: str
    measure: Callable[[pd.DataFrame], float]
    side: int
    line: float
    by: tuple[str, ...] = ()
    needs_trained: bool = True
    exact: bool = False
    published: float | None = None
    across: bool = False
    repeats: str = "seed"


def verdicts_of(name: str, claim: Claim, table: pd.DataFrame, facet: str | None = None) -> list[dict]:
    """Verdicts of one claim on a table: one for each value of the columns it is judged by and of the facet."""
    axes = [*([facet] if facet and not claim.across else []), *claim.by]
    verdicts = []
    for values, rows in table.groupby(axes, sort=False) if axes else [((), table)]:
        where = ", ".join(f"{axis}={value}" for axis, value in zip(axes, values, strict=True))
        found = np.array([claim.measure(one) for _, one in rows.groupby(claim.repeats)], dtype=float)
        if claim.repeats == "step" and np.isfinite(found).any():
            found = found[np.isfinite(found)]
        outcome, mean, halfwidth, reason = _decide(claim, rows, found)
        verdicts.append(
            {
                "claim": name,
                "where": where,
                "outcome": outcome,
                "measured": mean,
                "ci95": halfwidth,
                "published": claim.published,
                "claimed": f"{'>' if claim.side > 0 else '<'} {claim.line:g}",
                "num_seeds": rows.seed.nunique(),
                "num_repeats": len(found),
                "repeats": claim.repeats,
                "reason": reason,
                "statement": claim.statement,
                "source": claim.source,
            }
        )
    return verdicts


def _decide(claim: Claim, rows: pd.DataFrame, found: np.ndarray) -> tuple[str, float, float, str]:
    mean = float(found.mean())
    halfwidth = halfwidth95(found)
    if not np.isfinite(found).all():
        return UNDECIDED, mean, halfwidth, f"not measurable in every {claim.repeats}"
    if claim.exact:
        mean = float(found.min() if claim.side > 0 else found.max())  # the worst one decides
        return (HELD if claim.side * (mean - claim.line) > 0 else FAILED), mean, 0.0, ""
    if len(found) < FEWEST:
        return UNDECIDED, mean, halfwidth, f"fewer than {FEWEST} {claim.repeats}s"
    if claim.needs_trained and (learned := _learned(rows)) < LEARNED:
        return UNDECIDED, mean, halfwidth, f"the network has not learned its task (accuracy {learned:.3f})"
    distance = claim.side * (mean - claim.line)
    if abs(distance) <= halfwidth:
        return UNDECIDED, mean, halfwidth, "the line lies within the confidence interval"
    return (HELD if distance > 0 else FAILED), mean, halfwidth, ""


def _learned(rows: pd.DataFrame) -> float:
    """Accuracy of the whole network, as a share of what it can reach where that is known (ceiling_accuracy)."""
    reached = rows.whole_accuracy
    if "ceiling_accuracy" in rows:
        reached = reached / rows.ceiling_accuracy.fillna(1.0)
    return reached.groupby(rows.seed).mean().mean()


def verdict_line(verdict: dict) -> str:
    """A verdict as one line for a terminal."""
    where = f" [{verdict['where']}]" if verdict["where"] else ""
    why = f" ({verdict['reason']})" if verdict["reason"] else ""
    measured = f"{verdict['measured']:.3g} +- {verdict['ci95']:.2g}"
    over = f"{verdict['num_repeats']} {verdict['repeats']}s"
    return (
        f"{verdict['outcome']:<9} {verdict['claim']}{where}: measured {measured} "
        f"(95 % CI, {over}), claimed {verdict['claimed']}{why} - {verdict['source']}"
    )

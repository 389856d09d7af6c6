"""What the papers claim, as tests on tables: held, failed, or undecided at this budget.

A claim is judged by a number per seed and its 95 % confidence interval over seeds (Student's t). The interval on the
claimed side: held; on the other: failed; across the line, or too few seeds, or an untrained network: undecided.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import pandas as pd
from scipy import stats

from rankbench.tables import halfwidth95

HELD, FAILED, UNDECIDED = "held", "failed", "undecided"
FEWEST_SEEDS = 3
LEARNED = 0.9  # accuracy below which a network has not learned its task, and its paths say nothing about the claim
AT_CHANCE = 0.05  # "not much better than a random guess", taken as within five points of the commonest class


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper and how to test it: `measure` maps one seed's rows of the table to a number, which the
    paper says lies above (side=+1) or below (side=-1) `line`."""

    statement: str
    source: str
    table: str
    measure: Callable[[pd.DataFrame], float]
    side: int
    line: float
    by_scheme: bool = False
    needs_trained: bool = True


def judge(name: str, table: pd.DataFrame, facet: str | None = None) -> list[dict]:
    """Verdicts of one claim on a table: one for each scheme that the claim covers and each value of the facet."""
    claim = CLAIMS[name]
    axes = ([facet] if facet else []) + (["scheme"] if claim.by_scheme else [])
    verdicts = []
    for values, rows in table.groupby(axes, sort=False) if axes else [((), table)]:
        where = ", ".join(f"{axis}={value}" for axis, value in zip(axes, values, strict=True))
        seeds = np.array([claim.measure(one) for _, one in rows.groupby("seed")], dtype=float)
        outcome, mean, halfwidth, reason = _decide(claim, rows, seeds)
        verdicts.append(
            {
                "claim": name,
                "where": where,
                "outcome": outcome,
                "measured": mean,
                "ci95": halfwidth,
                "claimed": f"{'>' if claim.side > 0 else '<'} {claim.line:g}",
                "num_seeds": len(seeds),
                "reason": reason,
                "statement": claim.statement,
                "source": claim.source,
            }
        )
    return verdicts


def _decide(claim: Claim, rows: pd.DataFrame, seeds: np.ndarray) -> tuple[str, float, float, str]:
    mean = float(seeds.mean())
    halfwidth = halfwidth95(seeds)
    if not np.isfinite(seeds).all():
        return UNDECIDED, mean, halfwidth, "not measurable in every seed"
    if len(seeds) < FEWEST_SEEDS:
        return UNDECIDED, mean, halfwidth, f"fewer than {FEWEST_SEEDS} seeds"
    if claim.needs_trained and (learned := rows.groupby("seed").whole_accuracy.mean().mean()) < LEARNED:
        return UNDECIDED, mean, halfwidth, f"the network has not learned its task (accuracy {learned:.3f})"
    distance = claim.side * (mean - claim.line)
    if abs(distance) <= halfwidth:
        return UNDECIDED, mean, halfwidth, "the line lies within the confidence interval"
    return (HELD if distance > 0 else FAILED), mean, halfwidth, ""


def verdict_line(verdict: dict) -> str:
    """A verdict as one line for a terminal."""
    where = f" [{verdict['where']}]" if verdict["where"] else ""
    why = f" ({verdict['reason']})" if verdict["reason"] else ""
    measured = f"{verdict['measured']:.3g} +- {verdict['ci95']:.2g}"
    return (
        f"{verdict['outcome']:<9} {verdict['claim']}{where}: measured {measured} "
        f"(95 % CI, {verdict['num_seeds']} seeds), claimed {verdict['claimed']}{why} - {verdict['source']}"
    )


def published(figure: str) -> pd.DataFrame:
    """The published numbers of one figure: source, figure, where (the facet they belong to), series, x, value, unit."""
    with files("rankbench").joinpath("published.csv").open() as opened:
        table = pd.read_csv(opened)
    return table[table.figure == figure].reset_index(drop=True)


def figures_published() -> Iterator[str]:
    """Names of the figures that published.csv has numbers of."""
    with files("rankbench").joinpath("published.csv").open() as opened:
        yield from pd.read_csv(opened).figure.unique()


# Measures: one seed's rows -> a number


def _sampled(rows: pd.DataFrame, length: int) -> float:
    return rows[(rows.selection == "sampled") & (rows.path_length == length)].accuracy.mean()


def _length_one(rows: pd.DataFrame) -> float:
    return _sampled(rows, 1)


def _longest_above_majority(rows: pd.DataFrame) -> float:
    return _sampled(rows, rows.path_length.max()) - rows.majority_accuracy.mean()


def _shortest_above_majority(rows: pd.DataFrame) -> float:
    return _sampled(rows, 0) - rows.majority_accuracy.mean()


def _rank_correlation_with_length(rows: pd.DataFrame) -> float:
    sampled = rows[(rows.selection == "sampled") & (rows.path_length >= 1)]
    by_length = sampled.groupby("path_length").accuracy.mean()
    if by_length.nunique() < 2:
        return float("nan")
    return stats.spearmanr(by_length.index, by_length).statistic


def _whole(rows: pd.DataFrame) -> float:
    return rows.whole_accuracy.mean()


def _remainder_digits(rows: pd.DataFrame) -> float:
    return np.log10(max(rows.remainder.max(), np.finfo(float).tiny))


SUM = "Dong et al. 2021, Theorem 2.1"
FIG4 = "Dong et al. 2021, sec. 4.3"


def _protocol(statement: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim of Fig. 4 on sampled paths, judged under both schemes: the paper's own protocol is `recomputed`."""
    return Claim(statement, FIG4, "paths", measure, side, line, by_scheme=True)


CLAIMS: dict[str, Claim] = {
    "paths_sum_to_output": Claim(
        "The frozen paths and the biases add up to the output (log10 of the relative remainder, float64).",
        *(SUM, "paths", _remainder_digits, -1, -10.0),
        needs_trained=False,
    ),
    "dong_fig4_whole_sorting": Claim(
        "The whole network sorts (published accuracy .98; the line is .95).",
        *(FIG4, "paths", _whole, +1, 0.95),
        needs_trained=False,
    ),
    "dong_fig4_length_1_sorting": _protocol(
        "Length-1 paths attain an accuracy above .6 on sorting.", _length_one, +1, 0.6
    ),
    "dong_fig4_falls_with_length": _protocol(
        "Accuracy falls with path length, from 1 on (Spearman's rank correlation below 0).",
        *(_rank_correlation_with_length, -1, 0.0),
    ),
    "dong_fig4_longest_at_chance": _protocol(
        "The longest paths are not much better than chance (less than 5 points above the commonest class).",
        *(_longest_above_majority, -1, AT_CHANCE),
    ),
    "dong_fig4_length_0_at_chance": _protocol(
        "Length-0 paths hold no useful information (less than 5 points above the commonest class).",
        *(_shortest_above_majority, -1, AT_CHANCE),
    ),
}

"""How a claim is judged: held, failed, or undecided at this budget.

A claim is judged by one number per seed and the 95 % interval of their mean. It is held if the interval lies on the
claimed side of the threshold, and failed if it lies on the other side. It is undecided if the threshold is inside the
interval, if there are too few seeds, or if the network has not learned its task. A claim of equivalence has a threshold
to either side of 0, and two one-sided tests. A verdict of "held" counts only if the claim's negative control fails: a
table made from the same rows for which the claim is false.
"""

import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import NamedTuple, cast

import numpy as np
import pandas as pd

from rankbench.config import plugins
from rankbench.config.keys import ConfigError
from rankbench.judging.claim import (
    BROKEN,
    CLAIMS,
    FAILED,
    FEWEST,
    HELD,
    NOT_JUDGED,
    NOTHING,
    PASSED,
    UNDECIDED,
    AtMost,
    Claim,
    NotMeasurable,
)
from rankbench.runs.intervals import SAME, interval95, num_to_decide, p_value

Facet = str | Sequence[str] | None  # the column, or columns, of the keys that a sweep varies


class Judgement(NamedTuple):
    """`measured` is the mean over seeds, the worst seed's number (exact), or an upper bound of it (is_bound).

    p_value: of the one-sided test of what is claimed; nan where no interval decides. more_repeats: about how many more
    repeats would decide it, inf if more do not; nan where something else is missing.
    """

    outcome: str
    measured: float = math.nan
    low95: float = math.nan
    high95: float = math.nan
    interval: str = "none"
    is_bound: bool = False
    p_value: float = math.nan
    num_repeats: int = 0
    more_repeats: float = math.nan
    reason: str = ""


def judge(name: str, table: pd.DataFrame, facet: Facet = None) -> list[dict]:
    """Verdicts of one claim on a table: one for each value of the columns it is judged by and of the facet.

    Rows that the claim is not about are skipped. If that leaves nothing, the only verdict says so.
    """
    claim, keys = CLAIMS[name], [facet] if isinstance(facet, str) else [*(facet or ())]
    if "view" in table:  # claims about residuals are about all tokens
        table = table[table.view == "all"]
    try:
        verdicts = [
            _verdict(name, claim, rows, where, _controlled(claim, rows, keys))
            for where, rows in _settings(claim, table, keys)
            if claim.applies(rows)
        ]
    except Exception as error:
        if name not in plugins.brought("CLAIMS") or plugins.frames_of_user(error):
            raise
        raise ConfigError(
            f"claims={name}: cannot be judged on its table, {claim.table} ({type(error).__name__}: {error}); the "
            "table stays; mend the claim and repeat the command"
        ) from error
    return verdicts or [_verdict(name, claim, table, "", Judgement(UNDECIDED, reason=NOTHING))]


def _settings(claim: Claim, table: pd.DataFrame, swept_keys: list[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    axes = [*(key for key in swept_keys if not claim.across and key != claim.along), *claim.by]
    if not axes:
        yield "", table
        return
    for values, rows in table.groupby(axes, sort=False, dropna=False):
        known = [(axis, value) for axis, value in zip(axes, values, strict=True) if not pd.isna(value)]
        yield ", ".join(f"{axis}={_setting_text(value)}" for axis, value in known), rows


def _setting_text(value: object) -> str:
    """A setting's value in words: whole numbers, which a column with gaps holds as floats, without a point."""
    return f"{value:.0f}" if isinstance(value, float) and value > 1 and value.is_integer() else str(value)


def _verdict(name: str, claim: Claim, rows: pd.DataFrame, where: str, judged: Judgement) -> dict:
    if claim.is_check:
        judged = judged._replace(outcome={HELD: PASSED, FAILED: BROKEN}.get(judged.outcome, judged.outcome))
    of_rows = {"published": _published(claim, rows), "num_seeds": rows.seed.nunique(), "repeats": claim.repeats}
    return {"claim": name, "where": where, **judged._asdict(), **of_rows, **_words(claim)}


def _words(claim: Claim) -> dict:
    """The fields of a verdict that do not depend on the table."""
    return {
        "kind": "check" if claim.is_check else "claim",
        "claimed": str(claim.claimed),
        "side": claim.claimed.side,
        "line": claim.claimed.at,
        "threshold": claim.threshold,
        "exists": claim.exists,
        "refuted_by": _refuted_by(claim),
        "control": claim.control.statement,
        "statement": claim.statement,
        "source": claim.source,
        "since": claim.since,
    }


def is_outdated(verdict: dict) -> bool:
    """Whether a stored verdict comes from a test that its claim no longer has."""
    claim = CLAIMS.get(verdict["claim"])
    if claim is None:
        return False
    return verdict["claimed"] != str(claim.claimed) or (verdict.get("since") or "") != claim.since


def of_today(verdicts: list[dict]) -> list[dict]:
    """Stored verdicts in the words of today's claims, undecided where the test has changed. Those of claims that are no
    longer judged are left out."""
    return [_brought_up_to_date(verdict) for verdict in verdicts if verdict["claim"] in CLAIMS]


def _brought_up_to_date(verdict: dict) -> dict:
    words = _words(CLAIMS[verdict["claim"]])
    if verdict["reason"] == NOTHING or not is_outdated(verdict):
        return verdict | {name: words[name] for name in ("statement", "threshold", "since")}
    before = f"{measured_text(verdict)}, claimed {verdict['claimed']}"
    reason = f"{NOT_JUDGED} ({verdict['outcome']} before: {before})"
    unjudged = {"outcome": UNDECIDED, "interval": "none", "is_bound": False, "num_repeats": 0, "reason": reason}
    unjudged |= dict.fromkeys(("measured", "low95", "high95", "p_value", "more_repeats", "published"))
    return verdict | words | unjudged | {"since": verdict.get("since")}


def _published(claim: Claim, rows: pd.DataFrame) -> float | None:
    """The paper's number; None where the paper does not print what the measure needs."""
    try:
        return claim.measure(claim.published(rows)) if callable(claim.published) else claim.published
    except NotMeasurable:
        return None


def _refuted_by(claim: Claim) -> str:
    """What would refute the claim, for a reader."""
    if claim.exists:
        return "nothing here: the lack of an example does not refute that there is one"
    where = {+1: "below ", -1: "above ", 0: "beyond ±"}[claim.claimed.side] + f"{claim.claimed.at:g}"
    return f"one seed {where}" if claim.exact else f"a 95 % interval {where}"


def _controlled(claim: Claim, rows: pd.DataFrame, swept_keys: list[str]) -> Judgement:
    """Judge the rows, and the negative control where the claim is held.

    "held" becomes undecided if the control does not fail; "failed" does if the claim only says that an example exists.
    """
    if reason := _why_not_comparable(claim, rows, swept_keys):
        return Judgement(UNDECIDED, reason=reason)
    judged = _judgement(claim, rows)
    if claim.floor in rows and (num_rounding := int((rows[claim.floor] > 0).sum())):
        note = f"{num_rounding} of {len(rows)} rows are at the floor of rounding ({claim.floor})"
        judged = judged._replace(reason="; ".join(filter(None, [judged.reason, note])))
    if judged.outcome == FAILED and claim.exists:
        return judged._replace(outcome=UNDECIDED, reason="no example here, which does not refute that there is one")
    if judged.outcome != HELD:
        return judged
    control = _judgement(claim, claim.control.falsify(rows.copy()))
    if control.outcome == FAILED:
        return judged
    reason = f"its control did not fail ({control.outcome}): {claim.control.statement}"
    return judged._replace(outcome=UNDECIDED, reason=reason)


def _why_not_comparable(claim: Claim, rows: pd.DataFrame, swept_keys: list[str]) -> str:
    """Say how many seeds lack a network that the claim compares; empty if none does.

    A seed that diverges has no rows, and the others would be judged as if it had not been trained.
    """
    swept = {*swept_keys, claim.along} & {*rows} - {"seed"}
    keys = [key for key in swept if claim.across or key == claim.along]
    if not keys or claim.repeats != "seed":
        return ""
    by_seed = rows.drop_duplicates(["seed", *keys]).groupby("seed").size()
    lacking = int((by_seed < len(rows.drop_duplicates(keys))).sum())
    if not lacking:
        return ""
    return f"{lacking} of {len(by_seed)} seeds lack a network of the sweep: it diverged or is missing"


def _judgement(claim: Claim, rows: pd.DataFrame) -> Judgement:
    if rows.empty:
        return Judgement(UNDECIDED, reason="there are no such rows")
    if claim.repeats not in rows:
        return Judgement(UNDECIDED, reason=f"this needs a sweep over {claim.repeats}")
    try:
        values = [_measured(claim, rows_of_repeat) for _, rows_of_repeat in rows.groupby(claim.repeats)]
    except NotMeasurable as error:
        return Judgement(UNDECIDED, reason=str(error))
    if claim.repeats != "seed" and np.isfinite(values).any():
        values = [value for value in values if math.isfinite(value)]
    if not np.isfinite(values).all():
        return Judgement(UNDECIDED, num_repeats=len(values), reason=f"not measurable in every {claim.repeats}")
    if any(isinstance(value, AtMost) for value in values):
        return _judge_bounds(claim, rows, values)
    if claim.exact:
        side = claim.claimed.side
        worst = float(min(values) if side > 0 else max(values, key=None if side else abs))
        return Judgement(_side_of(claim, worst, worst), worst, interval="worst", num_repeats=len(values))
    reason = _why_not_decidable(claim, rows, len(values))
    if reason and claim.either_way and len(values) >= FEWEST:
        return _judge_either_way(claim, rows, values, reason)
    return _judge_interval(claim, values, reason)


def _measured(claim: Claim, rows: pd.DataFrame) -> float:
    value = claim.measure(rows)
    if not isinstance(value, Real | np.bool_):
        raise TypeError(f"its measure gave a {type(value).__name__}; return a number")
    lowest, highest = {"real": (-math.inf, math.inf), "positive": (0, math.inf)}.get(claim.scale, (0, 1))
    if value < lowest - SAME or value > highest + SAME:
        raise ValueError(f"its measure gave {value:g}, which is outside of its scale, {claim.scale}")
    return cast(float, value)


def _judge_interval(claim: Claim, values: list[float], reason: str) -> Judgement:
    """Judge the interval of the mean. reason: why it must not be decided, or empty."""
    side, line = claim.claimed
    mean, low, high, method = interval95(values, claim.scale)
    judged = Judgement(UNDECIDED, mean, low, high, method, num_repeats=len(values))
    if reason and len(values) >= FEWEST:
        return judged._replace(reason=reason)
    if not reason:
        judged = judged._replace(outcome=_side_of(claim, low, high), p_value=p_value(values, line, side, claim.scale))
        if judged.outcome != UNDECIDED:
            return judged
        reason = "the threshold lies within the interval"
    needed = max(num_to_decide(values, line, side, claim.scale), FEWEST)
    more = max(needed - len(values), 1.0)
    return judged._replace(reason=reason + _more_text(claim, more), more_repeats=more)


def _judge_either_way(claim: Claim, rows: pd.DataFrame, values: list[float], untrained: str) -> Judgement:
    """Judge numbers some of which are of untrained networks, with these at either extreme. untrained: says which.

    If both ways have the same outcome, the judgement is the one nearer to the threshold. Else it is undecided.
    """
    assert claim.why_untrained is not None and claim.either_way is not None  # else all are trained, or none counts
    lost = [bool(claim.why_untrained(rows_of_repeat)) for _, rows_of_repeat in rows.groupby(claim.repeats)]
    both = [
        _judge_interval(claim, [extreme if out else value for value, out in zip(values, lost, strict=True)], "")
        for extreme in claim.either_way
    ]
    note = f"{untrained}; {sum(lost)} of {len(lost)} {claim.repeats}s count as either extreme"
    if both[0].outcome != both[1].outcome:
        return _judge_interval(claim, values, note)
    nearer = min(both, key=lambda judged: abs(judged.measured - claim.claimed.at))
    return nearer._replace(reason="; ".join(filter(None, [nearer.reason, note])))


def _more_text(claim: Claim, more: float) -> str:
    """End of a sentence: how many more repeats would decide a claim."""
    if math.isnan(more):
        return ""
    if math.isinf(more):
        return f"; more {claim.repeats}s will not decide it"
    return f"; about {more:.0f} more {claim.repeats}{'' if more == 1 else 's'} would decide it"


def _judge_bounds(claim: Claim, rows: pd.DataFrame, values: list[float]) -> Judgement:
    """Judge numbers some of which rounding hides: decided only if all of them certainly lie below it."""
    highest = float(max(values))
    judged = Judgement(UNDECIDED, highest, is_bound=True, num_repeats=len(values))
    if reason := _why_not_decidable(claim, rows, len(values)):
        return judged._replace(reason=reason)
    if claim.claimed.side and highest < claim.claimed.at:
        return judged._replace(outcome=FAILED if claim.claimed.side > 0 else HELD)
    return judged._replace(reason="rounding hides the number")


def _why_not_decidable(claim: Claim, rows: pd.DataFrame, num_repeats: int) -> str:
    if not claim.exact and num_repeats < FEWEST:
        return f"fewer than {FEWEST} {claim.repeats}s"
    return claim.why_untrained(rows) if claim.why_untrained else ""


def _side_of(claim: Claim, low: float, high: float) -> str:
    """Outcome of an interval; a threshold that it touches counts as inside it, except for an exact number."""
    side, line = claim.claimed
    if side == 0:
        inside, outside = -line < low and high < line, low > line or high < -line
    else:
        inside, outside = (low > line, high < line)[::side]
    if claim.exact:
        return HELD if inside else FAILED
    return HELD if inside else FAILED if outside else UNDECIDED


def verdict_line(verdict: dict, numbers: str = "") -> str:
    """A verdict as one line for a terminal. numbers: words for its numbers; empty: measured, claimed and published."""
    where = f" [{verdict['where']}]" if verdict["where"] else ""
    why = f" ({verdict['reason']})" if verdict["reason"] else ""
    numbers = numbers or f"{measured_text(verdict)}, claimed {verdict['claimed']}{published_text(verdict)}"
    return f"{outcome_and_name(verdict)}{where}: {numbers}{why} - {verdict['source']}"


def outcome_and_name(row: dict) -> str:
    """How the line of a verdict, or of a statement, begins."""
    return f"{row['outcome']:<9} {'check ' if row['kind'] == 'check' else ''}{row['claim']}"


def is_number(value: float | None) -> bool:
    """Whether a cell of a verdict holds a number: None, nan and inf are none."""
    return value is not None and math.isfinite(value)


def published_text(verdict: dict) -> str:
    """The published number, after a comma; empty if there is none."""
    return f", published {verdict['published']:g}" if is_number(verdict["published"]) else ""


def measured_text(verdict: dict) -> str:
    """`number_text` in a sentence: `measured 2 [1.75, 2.25] (95 %, 3 seeds)`."""
    return f"{'measured ' if is_number(verdict['measured']) else ''}{number_text(verdict)}"


def number_text(verdict: dict) -> str:
    """The measured number, its interval and the number of repeats: `2 [1.75, 2.25] (95 %, 3 seeds)`."""
    if not is_number(verdict["measured"]):
        return "not measured"
    number, over = f"{verdict['measured']:.3g}", over_text(verdict)
    if verdict["is_bound"]:
        return f"at most {number} ({over})"
    if verdict["interval"] == "worst":
        return f"{number} (the worst of {over})"
    if not is_number(verdict["low95"]):
        return f"{number} ({over})"
    return f"{number} [{verdict['low95']:.3g}, {verdict['high95']:.3g}] (95 %, {over})"


def over_text(verdict: dict) -> str:
    """Number of repeats of a verdict: `3 seeds`, `1 seed`, `400 steps`."""
    count = verdict["num_repeats"]
    return f"{count:.0f} {verdict['repeats']}{'' if count == 1 else 's'}"

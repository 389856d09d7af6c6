"""Claims that what is measured agrees with the closed form of a law, as tests on the table `laws`.

A law's measure is the largest deviation of one seed over all parameters and x. Its threshold is a tolerance with a
reason. In its control the measurements of the control set-up are compared with the same closed form, and must be
farther off.
"""

from functools import partial

import pandas as pd

from rankbench.judging.claim import Claim, Control, NotMeasurable, below, has_row, of_any_weights

FORM = "closed form"


def _deviation(rows: pd.DataFrame, law: str, relative: bool) -> float:
    """Largest distance of a law's measurements from its closed form, relative to the form or absolute; nan if one is
    nan or stands where the form has no point."""
    claimed = rows[(rows.law == law) & (rows.setup == "claimed")]
    forms = claimed[claimed.curve == FORM].set_index(["parameter", "x"]).value
    measured = claimed[claimed.curve != FORM].set_index(["parameter", "x"]).value
    # a limit that is drawn beside the curves is not measured at all
    unmeasured = forms.index.difference(measured.index)
    unmeasured = unmeasured[unmeasured.isin(measured.index.unique("parameter"), level="parameter")]
    if len(unmeasured):
        parameter, x = unmeasured[0]
        raise NotMeasurable(f"{parameter} is not measured at {x:g}, where the law has a number")
    forms = forms.reindex(measured.index)
    off = (measured - forms).abs()
    return (off / forms.abs() if relative else off).max(skipna=False)


def _measured_in_control(rows: pd.DataFrame) -> pd.DataFrame:
    kept = rows[(rows.curve == FORM) | (rows.setup == "control")]
    return kept.assign(setup="claimed")


def agrees(
    law: str, line: float, statement: str, source: str, control: str, relative: bool = False, exact: bool = False
) -> Claim:
    """Claim that a law's measurements agree with its closed form within the tolerance. exact: it is a check, without
    chance."""
    return of_any_weights(
        statement=f"{statement} ({'relative ' if relative else ''}distance from the closed form, the largest).",
        source=source,
        table="laws",
        measure=partial(_deviation, law=law, relative=relative),
        claimed=below(line),
        scale="positive",
        is_check=exact,
        exact=exact,
        applies=partial(has_row, law=law),
        control=Control(control, _measured_in_control),
    )

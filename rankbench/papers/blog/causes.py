"""What the attention-paths blog names as causes of the collapse, as tests on the table `collapse`."""

from functools import partial

import numpy as np
import pandas as pd

from rankbench.judging.claim import Claim, Control, NotMeasurable, above
from rankbench.judging.residual_left import layers_ahead, left_along, log10_kept
from rankbench.judging.sweeps import between, rows_by_value

CAUSES = "Attention-paths blog, rank collapse"

# Measures: one seed's rows -> a number


def _least_speeding_up(rows: pd.DataFrame) -> float:
    """Decades of the relative residual that a layer removes over those that the layer before it removes; of the layer
    where this is least. 0 if a layer removes none."""
    logs = rows[rows.variant == "attention_only_no_norm"].sort_values("layer").log10_relative_residual.to_numpy()
    if len(logs) < 3 or not np.isfinite(logs).all():
        raise NotMeasurable("this needs attention alone, of two layers or more, whose logarithms float64 holds")
    removed = -np.diff(logs)
    return (removed[1:] / removed[:-1]).min() if removed.min() > 0 else 0.0


def _decades_between(rows: pd.DataFrame, key: str) -> float:
    logs = [log10_kept(of_value, "full") for of_value in rows_by_value(rows, key, fewest=2).values()]
    return max(logs) - min(logs)


# Controls


def _same_everywhere(rows: pd.DataFrame, key: str) -> pd.DataFrame:
    by_value = rows_by_value(rows, key)
    first = next(iter(by_value.values()))
    return pd.concat([first.assign(**{key: value}) for value in by_value])


CAUSES_OF_COLLAPSE: dict[str, Claim] = {
    # the opposite of knob_temperature: one of the two fails
    "blog_saturation_collapses": left_along(
        key="model.temperature",
        side=+1,
        statement="Saturated softmax makes tokens alike: the lower the temperature, the less is left",
        source=f"{CAUSES}, cause 1",
    ),
    "blog_tied_collapses_sooner": Claim(
        statement="Correlated queries and keys add to the collapse: with W_Q = W_K attention alone collapses sooner "
        "than with independent ones (layers, log3 of the ratio of the logarithms of what is left; the reading of "
        "'correlated' is ours).",
        source=f"{CAUSES}, cause 2",
        table="collapse",
        claimed=above(0.0),
        why_untrained=None,
        **between(
            *("model.tied_qk", "true", "false"),
            lambda tied, free: layers_ahead(log10_kept(tied, "full"), log10_kept(free, "full")),
        ),
    ),
    "blog_layers_feed_back": Claim(
        statement="What one layer loses speeds up the loss in the next, a feedback loop: every layer of attention "
        "alone removes more decades of the relative residual than the layer before it (ratio, of the layer where it "
        "is least).",
        source=f"{CAUSES}, cause 3",
        table="collapse",
        measure=_least_speeding_up,
        claimed=above(1.0),
        sourced=True,
        by=("weights",),
        why_untrained=None,
        control=Control.beyond(
            "each layer removes a hundredth less than the one before",
            log10_relative_residual=lambda rows: 0.99**rows.layer - 1,
        ),
    ),
    "blog_scale_matters": Claim(
        statement="The scale of the scores changes what is left: by more than a factor of ten between two temperatures "
        "of a sweep (decades; the line is ours).",
        source=f"{CAUSES}, cause 4",
        table="collapse",
        measure=partial(_decades_between, key="model.temperature"),
        claimed=above(1.0),
        along="model.temperature",
        exists=True,
        why_untrained=None,
        control=Control("as much is left at each temperature", partial(_same_everywhere, key="model.temperature")),
    ),
}

"""Claims of Kim et al. 2021, The Lipschitz constant of self-attention, on language models of characters.

They compare variants, so they are judged on all jobs of a sweep together, at the numbers of layers that the variants
share and the paper covers. The paper prints the smallest test loss of all steps; ours is read at the best validation
step. Losses are nats per predicted symbol. The end of a sentence counts as a symbol; the paper does not say whether it
does there, but differences barely depend on it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from rankbench.judging.claim import STILL_FALLS, Claim, Control, NotMeasurable, Threshold, above, below, require, within
from rankbench.judging.published import published
from rankbench.judging.sweeps import FEWEST_VALUES, MOSTLY, rank_correlation, with_exchanged
from rankbench.runs.tables import fall_in_last_quarter

DOT, L2, TIED = "causal", "causal_l2", "causal_l2_tied"
CONTRACTIVE, MATCHED, LSTM = "causal_contractive_l2", "causal_l2_matched", "lstm"
LITTLE = 0.02  # nats: "hardly any loss", taken as a fifth of what tying costs at one layer in Table 2
CLOSE = 0.1  # the paper says "the differences are rather small" of Table 1, which reach .16 (.08 on average)
NOISE = 0.02  # the most by which times of dot products may differ from themselves
MOST = 5  # the most layers for which the paper has each variant
SATURATING = (3, 5)  # numbers of layers at which the paper's best Transformer beats the LSTM
DEEP = 10  # number of layers beyond which the paper says dot products fail at a fixed learning rate
FAILS = 0.1  # nats: five times the difference between the variants at ten layers
WIDTH = 512  # of the paper's networks
ABOUT = 0.05  # nats to either side of the LSTM's "around 1.0", half of its last digit

# Measures: one seed's rows of all jobs -> a number


def _by_layers(rows: pd.DataFrame, variant: str, value: str, fewest: int = 1, most: float = np.inf) -> pd.Series:
    chosen = rows[(rows.variant == variant) & rows.layers.between(fewest, most)]
    return chosen.groupby("layers")[value].agg(lambda of: of.mean(skipna=False))


def _gaps(rows: pd.DataFrame, variant: str, base: str, fewest: int = 1, most: float = MOST) -> pd.Series:
    """Test loss of a variant less that of another, by the number of layers that both have."""
    losses = (_by_layers(rows, name, "test_loss", fewest, most).rename(name) for name in (variant, base))
    of_both = pd.concat(losses, axis=1, join="inner")
    gaps = of_both[variant] - of_both[base]
    if gaps.empty:
        layers = f"{fewest} to {most:g}" if np.isfinite(most) else f"at least {fewest}"
        raise NotMeasurable(f"no number of layers ({layers}) at which there are both {variant} and {base}")
    return gaps


def _gap(rows: pd.DataFrame, variant: str, base: str, side: int, fewest: int = 1, most: float = MOST) -> float:
    """Test loss of a variant less that of another, at the number of layers that speaks most against the claim: the
    smallest gap if it is said to be large (side=+1), the largest if small (-1), or the largest to either side (0)."""
    gaps = _gaps(rows, variant, base, fewest, most)
    if gaps.isna().any():
        return np.nan
    return gaps.min() if side > 0 else gaps.max() if side < 0 else gaps[gaps.abs().idxmax()]


_gap_when_deep = partial(_gap, variant=DOT, base=TIED, side=+1, fewest=DEEP + 1, most=np.inf)


def _slower(rows: pd.DataFrame, variant: str) -> float:
    """Time of all timed steps over that of the same network with dot products, less 1; mean over the numbers of layers
    that the paper covers."""
    totals = rows[(rows.variant == variant) & (rows.layers <= MOST)].groupby("layers")[["seconds", "seconds_dot"]].sum()
    require(not totals.empty, f"no times of {variant}")
    return (totals.seconds / totals.seconds_dot).mean() - 1


def _best_lstm(rows: pd.DataFrame) -> float:
    return _by_layers(rows, LSTM, "test_loss", most=MOST).min(skipna=False)


def _best_over_lstm(rows: pd.DataFrame) -> float:
    return _by_layers(rows, DOT, "test_loss", *SATURATING).min(skipna=False) - _best_lstm(rows)


def _trend_with_depth(rows: pd.DataFrame) -> float:
    by_layers = _by_layers(rows, CONTRACTIVE, "test_loss")
    require(len(by_layers) >= FEWEST_VALUES, f"{CONTRACTIVE} has fewer than {FEWEST_VALUES} numbers of layers")
    return rank_correlation(list(by_layers), LITTLE)


# The paper's numbers for the same configurations


def _printed(rows: pd.DataFrame, figure: str = "kim_table2", value: str = "test_loss") -> pd.DataFrame:
    """The paper's numbers in the format of the analysis' table, for the variants and numbers of layers of `rows`. A
    published number without a number of layers applies to all of them. All are of the paper's width."""
    table = published(figure)
    by_layers = table.dropna(subset="x").set_index(["series", "x"]).value
    of_variant = table[table.x.isna()].set_index("series").value
    cells = rows[["variant", "layers"]].drop_duplicates()
    pairs = cells.itertuples(index=False, name=None)
    numbers = [by_layers.get(pair, of_variant.get(pair[0], np.nan)) for pair in pairs]
    return cells.assign(**{value: numbers}).dropna().assign(width=WIDTH)


# When language models count as trained


def _untrained(rows: pd.DataFrame, variants: tuple[str, ...]) -> str:
    """Say why the compared networks count as untrained; empty unless one of them (mean over seeds) knows little more
    than how common each symbol is, or has a test loss that still falls."""
    return _knows_only_frequencies(rows, variants, np.inf) or _still_falls(rows, variants)


def _may_turn(
    rows: pd.DataFrame, gap: Callable[[pd.DataFrame], float], claimed: Threshold, variant: str, base: str
) -> str:
    """Say why a gap between two networks' losses cannot be judged yet; empty if it can.

    Both must know more than frequencies, and the one whose further fall would bring the gap to a threshold must not
    fall any more: the variant if the gap is above the threshold, else the base; both if it lies between two thresholds.
    """
    measured = gap(rows)
    could_turn_it = (variant, base) if claimed.side == 0 and abs(measured) <= claimed.at else (base,)
    could_turn_it = (variant,) if measured > claimed.at else could_turn_it
    return _knows_only_frequencies(rows, (variant, base), MOST) or _still_falls(rows, could_turn_it, most=MOST)


def _deep_may_turn(rows: pd.DataFrame) -> str:
    """Say the same of dot products and tied L2 in deep networks. That dot products know only frequencies is what is
    claimed; that tied L2 knows more is, too."""
    deep = rows[rows.layers > DEEP]
    falls = _still_falls(rows, (DOT if _gap_when_deep(rows) > FAILS else TIED,), fewest=DEEP + 1)
    return _knows_only_frequencies(deep, (TIED,), np.inf) or falls


def _knows_only_frequencies(rows: pd.DataFrame, variants: tuple[str, ...], most: float) -> str:
    compared = rows[rows.variant.isin(variants) & (rows.layers <= most)]
    if "unigram_loss" not in rows or compared.empty:
        return ""
    means = compared.groupby(["variant", "layers"])[["test_loss", "unigram_loss", "bigram_loss"]].mean()
    over = means.test_loss - (means.unigram_loss + means.bigram_loss) / 2
    if over.max() <= 0:
        return ""
    loss, unigram, bigram = means.loc[over.idxmax()]
    return (
        f"{_network(*over.idxmax())} has not learned: its test loss of {loss:.3g} nats is nearer to what the "
        f"frequencies of symbols give ({unigram:.3g}) than to what those of their pairs do ({bigram:.3g})"
    )


def _network(variant: str, layers: int) -> str:
    return f"{variant} with {layers} layer{'' if layers == 1 else 's'}"


def _still_falls(rows: pd.DataFrame, variants: tuple[str, ...], fewest: int = 1, most: float = np.inf) -> str:
    """Say which network's test loss (mean over seeds) still falls; empty if none does."""
    compared = rows[(rows.split == "test") & rows.variant.isin(variants) & rows.layers.between(fewest, most)]
    curves = compared.set_index("step").groupby(["variant", "layers", "seed"]).loss
    falls = curves.apply(fall_in_last_quarter).groupby(["variant", "layers"]).mean()
    if falls.empty or falls.max() <= STILL_FALLS:
        return ""
    network, fall = _network(*falls.idxmax()), f"{falls.max():.2g} nats"
    return f"the test loss of {network} still fell by {fall} over the last quarter of training"


def _too_noisy(rows: pd.DataFrame) -> str:
    """Say why times cannot be compared; empty if dot products are as fast as dot products."""
    if not (rows.variant == DOT).any():
        return "no job times dot products against themselves, which would show the noise"
    noise = np.mean([_slower(of_seed, DOT) for _, of_seed in rows.groupby("seed")])
    if abs(noise) <= NOISE:
        return ""
    return f"dot products against themselves differ by {noise:.2g} of the time: the noise is too large"


# Controls


def _set_from_base(rows: pd.DataFrame, variant: str, base: str, *values: str, add: float) -> pd.DataFrame:
    """Set the variant's values to the base's plus `add`, at the same layers, seed and step."""
    keys = ["layers", "seed", "step", "split"]
    of_base = rows[rows.variant == base].groupby(keys)[list(values)].first()
    of_variant = rows[keys].join(of_base, on=keys)[list(values)] + add
    return rows.assign(**rows[list(values)].where(rows.variant != variant, of_variant))


def _dot_as_tied(rows: pd.DataFrame) -> pd.DataFrame:
    alike = _set_from_base(rows, DOT, TIED, "test_loss", add=0.0)
    return alike.assign(loss=alike.test_loss)


def _nearly_as_good_as_lstm(rows: pd.DataFrame) -> pd.DataFrame:
    lstm = rows[(rows.variant == LSTM) & (rows.layers <= MOST)]
    best = lstm[lstm.layers == lstm.groupby("layers").test_loss.mean().idxmin()]
    worse = best[["test_loss", "loss"]] + 0.01
    return pd.concat([rows[rows.variant != DOT], best.assign(variant=DOT, layers=SATURATING[0], **worse)])


# Where claims apply


def _has_lstm_and_depth(rows: pd.DataFrame) -> bool:
    deep = (rows.variant == DOT) & rows.layers.between(*SATURATING)
    return bool(deep.any() and (rows.variant == LSTM).any())


_curves = partial(Claim, table="curves", across=True)


def _compared(
    variant: str, base: str, claimed: Threshold, control: Control, *, statement: str, source: str, printed: bool = True
) -> Claim:
    """Claim on the variant's test loss less the base's. printed: whether the paper has it in Table 2."""
    gap = partial(_gap, variant=variant, base=base, side=claimed.side)
    return _curves(
        statement=statement,
        source=source,
        measure=gap,
        claimed=claimed,
        why_untrained=partial(_may_turn, gap=gap, claimed=claimed, variant=variant, base=base),
        published=_printed if printed else None,
        control=control,
        since="2026-11-26",
    )


def _loses(variant: str, base: str, line: float = 0.0, **claim: Any) -> Claim:
    """Claim that the variant loses more than the threshold against the base."""
    return _compared(variant, base, above(line), with_exchanged("variant", variant, base), **claim)


def _loses_little(variant: str, base: str, claimed: Threshold, **claim: Any) -> Claim:
    """Claim that the variant loses less than LITTLE against the base, or (within) neither loses nor gains as much."""
    control = Control(
        f"{variant} with a test loss .03 above that of {base}",
        lambda rows: _set_from_base(rows, variant, base, "test_loss", "loss", add=1.5 * LITTLE),
    )
    return _compared(variant, base, claimed, control, **claim)


def _timed(variant: str, name: str) -> Claim:
    """Claim on the time of a training step."""
    return Claim(
        statement=f"{name} attention trains about as fast as dot products (time of a step, relative difference, "
        "mean over the numbers of layers; threshold: ours, a tenth to either side).",
        source="Kim et al. 2021, Table 1",
        table="speed",
        across=True,
        measure=partial(_slower, variant=variant),
        claimed=within(CLOSE),
        why_untrained=_too_noisy,
        published=lambda rows: _printed(rows, "kim_table1_speed", "seconds").assign(seconds_dot=1.0),
        control=Control.beyond(
            "times 1.15 times those of dot products", of=f"variant == '{variant}'", seconds="1.15 * seconds_dot"
        ),
    )


FIG4 = "Kim et al. 2021, Fig. 4 and Table 2"
FIG9 = "Kim et al. 2021, app. M and Fig. 9"

CHAR_LM: dict[str, Claim] = {
    "kim_l2_loses_little": _loses_little(
        variant=L2,
        base=DOT,
        claimed=below(LITTLE),
        statement="L2 attention in place of dot products incurs hardly any loss (nats per symbol more, at the number "
        "of layers where it loses most; threshold: ours; the paper's networks: width 512).",
        source=FIG4,
    ),
    "kim_tying_loses": _loses(
        variant=TIED,
        base=L2,
        statement="Tying queries and keys incurs a loss (nats per symbol more than free L2, at the number of layers "
        "where it loses least; the paper's networks: width 512).",
        source=FIG4,
    ),
    "kim_contraction_loses": _loses(
        variant=CONTRACTIVE,
        base=TIED,
        statement="Dividing by the Lipschitz bound incurs a noticeable loss (nats per symbol more than tied L2, at the "
        "number of layers where it loses least; threshold: ours; the paper's networks: width 512).",
        source=FIG4,
        line=LITTLE,
    ),
    "kim_contraction_gains_from_depth": _curves(
        statement="Contractive L2 makes up for its loss with more layers (Kendall's rank correlation of layers and "
        "test loss; below -.5, three pairs in four in this order, threshold: ours; changes of less than .02 nats "
        "count as none; the paper's networks: width 512).",
        source=FIG4,
        measure=_trend_with_depth,
        claimed=below(-MOSTLY),
        why_untrained=partial(_untrained, variants=(CONTRACTIVE,)),
        published=_printed,
        control=Control.beyond(
            "its numbers of layers in reverse order",
            of=f"variant == '{CONTRACTIVE}'",
            layers="layers.max() + 1 - layers",
        ),
    ),
    "kim_lstm": _curves(
        statement="The best LSTM of the paper's width, 512, reaches about one nat (per symbol, less 1; threshold: "
        "ours, .05 to either side).",
        source="Kim et al. 2021, sec. 5.3 and Fig. 4",
        measure=lambda rows: _best_lstm(rows[rows.width >= WIDTH]) - 1,
        claimed=within(ABOUT),
        applies=lambda rows: "width" in rows and bool(((rows.variant == LSTM) & (rows.width >= WIDTH)).any()),
        why_untrained=partial(_untrained, variants=(LSTM,)),
        published=_printed,
        control=Control.beyond("an LSTM with a test loss of 1.1", of=f"variant == '{LSTM}'", test_loss=1.1),
    ),
    "kim_transformer_beats_lstm": _curves(
        statement="The best Transformer of 3 to 5 layers does better than the best LSTM (nats per symbol more; the "
        "paper: slightly better, and its networks have width 512).",
        source="Kim et al. 2021, sec. 5.3 and Fig. 4",
        measure=_best_over_lstm,
        claimed=below(0.0),
        applies=_has_lstm_and_depth,
        why_untrained=partial(_may_turn, gap=_best_over_lstm, claimed=below(0.0), variant=DOT, base=LSTM),
        published=_printed,
        control=Control("a Transformer with a test loss .01 above that of the best LSTM", _nearly_as_good_as_lstm),
    ),
    "kim_l2_as_fast": _timed(L2, "L2"),
    "kim_tied_as_fast": _timed(TIED, "Tied L2"),
    "kim_contractive_as_fast": _timed(CONTRACTIVE, "Contractive L2"),
    "kim_dot_fails_deep": _curves(
        statement="At a fixed rate dot products fail to train beyond 10 layers, where tied L2 trains (nats per symbol "
        "more, at the number of layers where they fail least; threshold: ours).",
        since="2026-11-26",
        source="Kim et al. 2021, app. N, Table 3 and Fig. 11",
        measure=_gap_when_deep,
        claimed=above(FAILS),
        applies=lambda rows: (rows.layers > DEEP).any(),
        why_untrained=_deep_may_turn,
        control=Control("dot products with the final loss of tied L2, at every step", _dot_as_tied),
    ),
    "kim_tying_not_parameters": _loses(
        variant=MATCHED,
        base=L2,
        statement="Equally many parameters do not make up for tying (nats per symbol more than free L2, at the number "
        "of layers where they lose least).",
        source=FIG9,
        printed=False,
    ),
    "kim_matched_as_tied": _loses_little(
        variant=TIED,
        base=MATCHED,
        claimed=within(LITTLE),
        statement="With as many parameters as free L2, tied L2 performs alike (nats per symbol less, at the number of "
        "layers where they differ most; threshold: ours, .02 to either side).",
        source=FIG9,
        printed=False,
    ),
}

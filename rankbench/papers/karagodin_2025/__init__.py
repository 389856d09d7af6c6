"""Claims of Karagodin, Ge, Polyanskiy and Rigollet 2025: what the place of the norms does."""

from functools import partial

from rankbench.judging.claim import Claim, above
from rankbench.judging.of_laws import agrees
from rankbench.judging.path_lengths import length_over
from rankbench.judging.residual_left import TENTH, keeps, kept_followed
from rankbench.judging.sweeps import at_value, between
from rankbench.papers.karagodin_2025.norm_placement import FIRST_SPEED, MEETING, NORM_PLACEMENT

PAPERS = {"Karagodin, Ge, Polyanskiy and Rigollet 2025": "Normalization in attention dynamics"}
LAWS = {"norm_placement": NORM_PLACEMENT, "first_speed": FIRST_SPEED, "meeting": MEETING}
KARAGODIN = "Karagodin, Ge, Polyanskiy and Rigollet 2025, Normalization in attention dynamics"

_agrees = partial(agrees, source=KARAGODIN, control="tokens that attend to themselves alone")

CLAIMS: dict[str, Claim] = {
    "knob_norm_place": keeps(
        statement="With peri-norm more than a tenth of the embedding's relative residual is left after the last layer, "
        "and with post-norm it is not (the share that is left).",
        source=KARAGODIN,
        table="collapse",
        claimed=above(TENTH),
        **at_value("model.norm", "peri", "post", kept_followed),
    ),
    "paths_norm_place": keeps(
        statement="With peri-norm, whose branches have the size of their norm, paths are more than twice as long as "
        "with pre-norm (mean length, each length weighted with the size of its sum, over that with pre-norm).",
        source=KARAGODIN,
        table="path_mass",
        floor="below_floor",
        claimed=above(2.0),
        **between("model.norm", "peri", "pre", length_over),
    ),
    # threshold: at the first late time, 100, the length of a pre-norm state differs from t by the time until tokens
    # met, which is a few
    "law_norm_placement": _agrees(
        law="norm_placement",
        line=0.05,
        statement="Tokens become one cluster at the rates exp(-2 t) with post-norm and nGPT, t^-2 with pre-norm and "
        "peri-norm, and exp(-4 sqrt(t)) with branches over sqrt(t)",
        relative=True,
    ),
    # threshold: two steps of 6/480, because Euler's rule errs by the order of a step at speeds of about 1
    "law_meeting": _agrees(
        law="meeting",
        line=0.025,
        statement="The cosine of orthonormal tokens grows with time as one differential equation for each place of the "
        "norm has it: fastest with nGPT, and slowest with pre-norm",
    ),
    # threshold: second-order terms of a step of 1e-6, and rounding over that step, are below 1e-5
    "law_first_speed": _agrees(
        law="first_speed",
        line=1e-4,
        statement="The cosine of orthonormal tokens begins to grow at 2/(exp(beta) + n - 1) with post-norm and "
        "pre-norm, and at 2/sqrt(exp(2 beta) + n - 1) with peri-norm and nGPT",
        relative=True,
        exact=True,
    ),
}

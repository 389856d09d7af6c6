"""Claim of Wang et al. 2022: the uniform part of attention makes tokens alike."""

from rankbench.judging.residual_left import left_along

PAPERS = {"Wang et al. 2022": "Anti-oversmoothing in deep vision transformers"}
WANG = "Wang et al. 2022, Anti-oversmoothing in deep vision transformers"

CLAIMS = {
    "knob_uniform_mix": left_along(
        key="model.mix_uniform",
        side=-1,
        statement="Attention's uniform part, a low-pass filter, makes tokens alike: the less of it there is, the more "
        "is left",
        source=WANG,
        table="residual",
    ),
}

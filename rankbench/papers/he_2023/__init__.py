"""Claims of He et al. 2023: attention beside the identity keeps tokens apart without skips."""

from rankbench.judging.residual_left import left_along, left_at

PAPERS = {"He et al. 2023": "Deep transformers without shortcuts"}
HE = "He et al. 2023, Deep transformers without shortcuts"

CLAIMS = {
    "knob_identity_mix": left_along(
        key="model.mix_attention",
        side=-1,
        statement="Without skips, the less of attention there is beside the identity, the more is left",
        source=HE,
        table="residual",
    ),
    "knob_identity_mix_enough": left_at(
        key="model.mix_attention",
        end=0,
        statement="Without skips, with little enough attention beside the identity",
        source=HE,
        table="residual",
    ),
}

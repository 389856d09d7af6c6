"""Claims of Joseph et al. 2024: skips that are strong enough keep tokens apart."""

from rankbench.judging.residual_left import left_along, left_at

PAPERS = {"Joseph et al. 2024": "Lambda-skip connections"}
JOSEPH = "Joseph et al. 2024, Lambda-skip connections"

CLAIMS = {
    "knob_lambda_skip": left_along(
        key="model.skip_scale", side=+1, statement="The stronger the skip, the more is left", source=JOSEPH
    ),
    "knob_lambda_skip_enough": left_at(
        key="model.skip_scale", end=-1, statement="With a skip that is strong enough", source=JOSEPH
    ),
}

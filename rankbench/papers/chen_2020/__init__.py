"""Claims of Chen et al. 2020: the embedding in the input of each layer keeps tokens apart and shortens the paths."""

from rankbench.judging.path_lengths import shorter_along
from rankbench.judging.residual_left import left_along, left_at

PAPERS = {"Chen et al. 2020": "Simple and deep graph convolutional networks (initial residual)"}
CHEN = "Chen et al. 2020, Simple and deep graph convolutional networks (initial residual)"

CLAIMS = {
    "knob_embedding_skip": left_along(
        key="model.embedding_skip",
        side=+1,
        statement="The more of the embedding enters each layer, the more is left",
        source=CHEN,
        table="residual",
    ),
    "knob_embedding_skip_enough": left_at(
        key="model.embedding_skip",
        end=-1,
        statement="With enough of the embedding in the input of each layer",
        source=CHEN,
        table="residual",
    ),
    "paths_embedding_skip": shorter_along(
        key="model.embedding_skip",
        statement="The more of the embedding enters each layer, the shorter are the paths",
        source=CHEN,
    ),
}

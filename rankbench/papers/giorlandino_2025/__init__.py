"""Claims of Giorlandino and Goldt 2025: low temperatures keep tokens apart."""

from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import left_along, left_at
from rankbench.papers.giorlandino_2025.signal_propagation import LAW

PAPERS = {"Giorlandino and Goldt 2025": "Two failure modes of deep transformers"}
LAWS = {"signal_propagation": LAW}
GIORLANDINO = "Giorlandino and Goldt 2025, Two failure modes of deep transformers"

CLAIMS = {
    "knob_temperature": left_along(
        key="model.temperature", side=-1, statement="The lower the temperature, the more is left", source=GIORLANDINO
    ),
    "knob_temperature_enough": left_at(
        key="model.temperature", end=0, statement="At a temperature that is low enough", source=GIORLANDINO
    ),
    # the line: twice 1/sqrt(256), by which products of one network's tokens err; it can grow where cosines do. Above
    # the critical beta, where few scores decide, the mean over 4 networks errs by as much
    "law_signal_propagation": agrees(
        law="signal_propagation",
        line=0.12,
        statement="The cosine of two tokens in a fresh Transformer follows the map of (q, p): to 1 with post-norm, "
        "more slowly with pre-norm, and hardly away from its start with centred attention; above the critical beta the "
        "more slowly the larger beta is",
        source="Giorlandino and Goldt 2025, Two failure modes of deep transformers; mean for n tokens derived here",
        control="values that are the identity in place of random ones",
    ),
}

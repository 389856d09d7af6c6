"""Claim of Zhu et al. 2024: fresh hyper-connections are plain skips."""

from rankbench.judging.claim import Claim, Control, below, exact_check
from rankbench.judging.path_lengths import length_over
from rankbench.judging.sweeps import rows_at

PAPERS = {"Zhu et al. 2024": "Hyper-connections"}

KEY = "model.hyper_connections"

CLAIMS: dict[str, Claim] = {
    "paths_hyper_connections": exact_check(
        statement="Fresh hyper-connections have the paths of plain skips: their mean lengths differ by rounding alone.",
        source="Zhu et al. 2024, Hyper-connections, sec. 2.3",
        table="path_mass",
        floor="below_floor",
        measure=lambda rows: abs(length_over(*(rows_at(rows, KEY, value) for value in ("free", "none"))) - 1),
        claimed=below(1e-9),
        along=KEY,
        control=Control.beyond(
            "paths of plain skips that are longer by one",
            path_length="path_length + (`model.hyper_connections` == 'none')",
        ),
    ),
}

"""The analyses by name. A new one is a file here, a YAML in conf/analysis and a line in ANALYSES."""

from rankbench.analyses import (
    bounds,
    collapse,
    dynamics,
    independence,
    path_counts,
    path_mass,
    paths,
    pruning,
    residual,
    rollout,
)
from rankbench.analyses.analysis import Analysis, Subject

__all__ = ["ANALYSES", "Analysis", "Subject"]

ANALYSES: dict[str, Analysis] = {
    "residual": residual.ANALYSIS,
    "paths": paths.ANALYSIS,
    "collapse": collapse.ANALYSIS,
    "bounds": bounds.ANALYSIS,
    "path_counts": path_counts.ANALYSIS,
    "independence": independence.ANALYSIS,
    "path_mass": path_mass.ANALYSIS,
    "pruning": pruning.ANALYSIS,
    "rollout": rollout.ANALYSIS,
    "dynamics": dynamics.ANALYSIS,
}

"""The analyses by name. A new one is a file here, a YAML in conf/analysis and a line in ANALYSES."""

from rankbench.analyses import (
    attention,
    bounds,
    collapse,
    curves,
    dynamics,
    head_rank,
    histograms,
    independence,
    invertibility,
    laws,
    lipschitz,
    path_counts,
    path_mass,
    paths,
    pruning,
    rank_theory,
    residual,
    rollout,
    samples,
    spectrum,
)
from rankbench.analyses.analysis import Analysis, ModuleSubject, Plan, Subject

__all__ = ["ANALYSES", "Analysis", "ModuleSubject", "Plan", "Subject"]

ANALYSES: dict[str, Analysis] = {
    "residual": residual.ANALYSIS,
    "paths": paths.ANALYSIS,
    "spectrum": spectrum.ANALYSIS,
    "attention": attention.ANALYSIS,
    "collapse": collapse.ANALYSIS,
    "bounds": bounds.ANALYSIS,
    "path_counts": path_counts.ANALYSIS,
    "independence": independence.ANALYSIS,
    "path_mass": path_mass.ANALYSIS,
    "pruning": pruning.ANALYSIS,
    "rollout": rollout.ANALYSIS,
    "dynamics": dynamics.ANALYSIS,
    "curves": curves.ANALYSIS,
    "samples": samples.ANALYSIS,
    "lipschitz": lipschitz.ANALYSIS,
    "invertibility": invertibility.ANALYSIS,
    "histograms": histograms.ANALYSIS,
    "head_rank": head_rank.ANALYSIS,
    "rank_theory": rank_theory.ANALYSIS,
    "laws": laws.ANALYSIS,
}

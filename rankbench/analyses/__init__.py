"""The analyses by name. A new one is a file here, a YAML in conf/analysis and its name in IN_ORDER."""

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

IN_ORDER = (
    *(residual, paths, spectrum, attention, collapse, bounds, path_counts, independence, path_mass, pruning),
    *(rollout, dynamics, curves, samples, lipschitz, invertibility, histograms, head_rank, rank_theory, laws),
)
ANALYSES: dict[str, Analysis] = {module.__name__.rpartition(".")[2]: module.ANALYSIS for module in IN_ORDER}

"""The analyses by name. A new one is a file here, a YAML in conf/analysis and its name in NAMES."""

from importlib import import_module

from rankbench.analyses.analysis import Analysis, Foreign, Subject
from rankbench.runs.tables import MEANINGS

__all__ = ["ANALYSES", "Analysis", "Foreign", "Subject"]

NAMES = (
    *("residual", "paths", "spectrum", "attention", "collapse", "bounds", "path_counts", "independence", "path_mass"),
    *("pruning", "rollout", "dynamics", "curves", "samples", "lipschitz", "invertibility", "histograms", "head_rank"),
    *("rank_theory", "laws", "speed", "signal_map"),
)
ANALYSES: dict[str, Analysis] = {name: import_module(f"{__name__}.{name}").ANALYSIS for name in NAMES}
MEANINGS.update({name: analysis.columns for name, analysis in ANALYSES.items()})

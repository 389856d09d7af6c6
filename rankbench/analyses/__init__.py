"""The analyses by name. A new one is a file here, a YAML in conf/analysis and a line in ANALYSES."""

from rankbench.analyses import paths, residual
from rankbench.analyses.analysis import Analysis, Subject

__all__ = ["ANALYSES", "Analysis", "Subject"]

ANALYSES: dict[str, Analysis] = {"residual": residual.ANALYSIS, "paths": paths.ANALYSIS}

"""Tables to figures, fit for a paper: the one package that knows matplotlib. It never sees a model.

A module a subject; every figure is drawn from its CSV alone.
"""

from rankbench.plots.figure import KINDS, Figure, save, show_in_notebook

__all__ = ["KINDS", "Figure", "save", "show_in_notebook"]

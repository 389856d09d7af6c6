"""Figures of tables, ready for a paper. No other package uses matplotlib, and this one never sees a model.

Each subject has a module; every figure is drawn from its CSV file alone.
"""

from rankbench.plots.captions import caption_of
from rankbench.plots.figure import KINDS, Figure, fit, remove_pages, save, save_pages, show_in_notebook
from rankbench.plots.marks import tick
from rankbench.plots.pages import Page
from rankbench.plots.style import check_style, drawn_with

__all__ = ["KINDS", "Figure", "Page", "caption_of", "check_style", "drawn_with", "fit", "save", "save_pages"]
__all__ += ["remove_pages", "show_in_notebook", "tick"]

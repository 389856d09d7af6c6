"""How figures look: fonts, sizes, lines and colours.

The user's matplotlibrc takes precedence over the settings here, and a command's style file over both. A style's
`figure.figsize` is the size of a panel, and its `axes.prop_cycle` gives the colours of the series. The colours here are
Okabe and Ito's, which colour-blind readers can tell apart.
"""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from rankbench.config.keys import ConfigError

# The groups of matplotlib's settings that say how a figure looks
DRAWING: tuple[str, ...] = ("axes", "errorbar", "figure", "font", "grid", "legend", "lines", "mathtext", "patch")
DRAWING += ("pdf", "savefig", "svg", "text", "xtick", "ytick")
HOUSE: dict[str, Any] = {
    "font.size": 8,  # printed as 8 pt, because a panel is as wide as a column
    "axes.titlesize": "medium",
    "axes.prop_cycle": cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]),
    "figure.figsize": (3.25, 2.6),  # inches, of a panel: as wide as a column of a page
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # embed fonts, so that text stays text
    "svg.hashsalt": "rankbench",  # the same figure always gives the same bytes
}
LEGEND = 7 / 8  # size of a legend's letters, relative to the others
DASHES = ["-", "--", ":", "-."]
MARKERS = ["o", "s", "^", "D", "v", "P"]
INK, GREY = "#000000", "#777777"
LIGHTEST = 0.72  # of plasma: lines that are lighter hardly show on white
LEGEND_LETTER = 0.05 / 7  # width of a letter in inches, per point of its size


def settings_in(file: Path) -> dict[str, Any]:
    """A style file's settings for drawing, but not for the layout of panels; none for matplotlib's own file."""
    if file == Path(matplotlib.get_data_path()) / "matplotlibrc":
        return {}
    settings = matplotlib.rc_params_from_file(str(file), use_default_template=False)
    drawing = [name for name in settings if name.partition(".")[0] in DRAWING and "layout" not in name]
    return {name: settings[name] for name in drawing}


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """Add the size of a legend's letters, which follows that of all others unless the settings have one."""
    return {"legend.fontsize": LEGEND * settings["font.size"], **settings}


STYLE: Any = _complete({**HOUSE, **settings_in(Path(matplotlib.matplotlib_fname()))})


@contextmanager
def drawn_with(style: str | None) -> Iterator[None]:
    """Draw with a matplotlib style file for as long as the context lasts; None changes nothing."""
    before = dict(STYLE)
    if style is not None:
        chosen = settings_in(Path(style))
        kept = [name for name in STYLE if name != "legend.fontsize" or "font.size" not in chosen]
        STYLE.update(_complete({name: STYLE[name] for name in kept} | chosen))
    try:
        yield
    finally:
        STYLE.clear()
        STYLE.update(before)


def check_style(style: str | None) -> None:
    """Raise ConfigError for a style file that cannot be read or drawn with, or that matplotlib complains about."""
    if style is None:
        return
    name, complaints = f"plot.style={style}", BufferingHandler(100)
    if not Path(style).is_file():
        raise ConfigError(f"{name}: no such file; give a matplotlib style file, with lines like `font.size: 9`")
    logger = logging.getLogger("matplotlib")
    before, logger.handlers, logger.propagate = (logger.handlers, logger.propagate), [complaints], False
    try:
        settings_in(Path(style))
        if complaints.buffer:
            raise ValueError(complaints.buffer[0].getMessage().strip().partition("\n")[0])
        with drawn_with(style), matplotlib.rc_context(STYLE):
            figure = Figure(layout="constrained")
            figure.subplots().set_title("a title")
            figure.savefig(io.BytesIO())  # fails if the style needs something that is not installed, such as LaTeX
    except Exception as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"{name}: matplotlib cannot draw with it ({message}); correct the file") from None
    finally:
        logger.handlers, logger.propagate = before


def colours() -> list[str]:
    """The colours of the series, of which a style has at least one."""
    return STYLE["axes.prop_cycle"].by_key().get("color", HOUSE["axes.prop_cycle"].by_key()["color"])


def colour_of(number: int) -> str:
    """Colour of the series with this number in its panel; after the last colour comes the first one again."""
    return colours()[number % len(colours())]


def colour_of_depth(layer: int, deepest: int) -> tuple[float, float, float, float]:
    """Colour of a line for each layer: the deeper, the lighter."""
    return matplotlib.colormaps["plasma"](LIGHTEST * layer / max(deepest, 1))


def marker_of(number: int) -> str:
    """Marker of the series with this number: another one once the colours repeat, so that no two look alike."""
    cycle, colour = divmod(number, len(colours()))
    return MARKERS[(cycle + colour) % len(MARKERS)]


def dashes_of(number: int) -> str:
    """Dashes of the series with this number: others once the colours repeat."""
    return DASHES[number // len(colours()) % len(DASHES)]


def panel_size() -> tuple[float, float]:
    """Width and height of a panel in inches."""
    return tuple(STYLE["figure.figsize"])


def points_of(setting: str) -> float:
    """Size of letters in points, such as that of `legend.fontsize`, which a style may give as a word."""
    with matplotlib.rc_context(STYLE):
        return FontProperties(size=STYLE[setting]).get_size_in_points()


def small(house_points: float) -> float:
    """Size in points of letters that are this size in our own style: smaller than the others, or equal to them."""
    return house_points / HOUSE["font.size"] * STYLE["font.size"]

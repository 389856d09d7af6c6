"""The numbers behind the marks of a drawn figure, and their positions, for pages on which a mark shows its number."""

import html
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

MOST_OF_LINE, MOST_OF_FIGURE = 60, 800  # marks that show their number; if there are more, this many in equal steps
POINTS = 72  # in an inch
FIELD = "Readings"  # of a PNG file
RADIUS = 4  # points: of the spot round a mark
HALF = 0.5  # of the distance between two words on an axis, which are at 0, 1, 2


class MarkReading(NamedTuple):
    """A mark's position, as shares of the figure's width and height from its top left corner, and the mark's text."""

    x: float
    y: float
    text: str


def readings_of(figure: Figure) -> list[MarkReading]:
    """The readings of a figure whose layout is done: points of lines, of scatter plots and bars, and cells of maps.
    Empty for a figure that is cropped when it is saved."""
    if rcParams["savefig.bbox"] == "tight":
        return []
    named: list[MarkReading] = []
    unnamed: list[MarkReading] = []  # such as the seeds behind a line; they come last
    for axes in figure.axes:
        for label, positions, values in _marks(axes) if axes.get_visible() else ():
            (named if label else unnamed).extend(_readings(figure, axes, label, positions, values))
    named = in_steps(named, MOST_OF_FIGURE)
    return named + in_steps(unnamed, MOST_OF_FIGURE - len(named))


def _readings(
    figure: Figure, axes: Axes, label: str, positions: np.ndarray, values: np.ndarray | None
) -> Iterator[MarkReading]:
    width, height = figure.bbox.size
    names = _name_of(axes, "x"), _name_of(axes, "y")
    axes.get_xlim(), axes.get_ylim()  # brings the limits up to date, if nothing has been drawn yet
    with np.errstate(all="ignore"):  # a logarithmic axis has no place for 0
        pixels = axes.transData.transform(positions)
    inside = [number for number, pixel in enumerate(pixels) if axes.bbox.contains(*pixel)]
    for number in in_steps(inside, MOST_OF_LINE) if values is None else inside:
        x, y = pixels[number]
        coordinates = zip(names, "xy", positions[number], strict=True)
        numbers = [f"{name} = {_tick(axes, which, value)}" for name, which, value in coordinates]
        numbers += [] if values is None else [f"{values[number]:.4g}"]
        text = f"{label}: " * bool(label) + "; ".join(numbers)
        yield MarkReading(round(x / width, 4), round(1 - y / height, 4), text)


def _marks(axes: Axes) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """Label, positions in data coordinates, and values (None if the positions show them) of all that the axes hold."""
    if axes.get_label() == "<colorbar>":
        return
    for line in axes.lines:
        if line.get_visible() and line.get_transform() == axes.transData:
            yield _label(line.get_label()), np.ma.filled(np.ma.asarray(line.get_xydata(), dtype=float), math.nan), None
    for points in axes.collections:
        offsets: np.ndarray = np.ma.filled(np.ma.asarray(points.get_offsets(), dtype=float), math.nan)
        if points.get_offset_transform() == axes.transData and offsets.size:
            yield _label(points.get_label()), offsets, None
    for bars in axes.containers:
        if isinstance(bars, BarContainer):
            tops = [(bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height()) for bar in bars]
            yield _label(bars.get_label()), np.array(tops, dtype=float).reshape(-1, 2), None
    for image in axes.images:
        values: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), math.nan)
        if values.ndim == 2:
            rows, columns = np.nonzero(np.isfinite(values))
            yield "", np.stack([columns, rows], axis=1).astype(float), values[rows, columns]


def in_steps(items: list, most: int) -> list:
    """At most `most` of the items, in equal steps."""
    if len(items) <= most:
        return items
    return [items[step] for step in np.unique(np.linspace(0, len(items) - 1, max(0, most)).round().astype(int))]


def _label(label: object) -> str:
    """A label as in a legend; empty where matplotlib made it up."""
    return "" if str(label).startswith("_") else _plain(str(label))


def _name_of(axes: Axes, which: str) -> str:
    """The label of the axis, or of one that shares it."""
    shared = getattr(axes, f"get_shared_{which}_axes")().get_siblings(axes)
    labels = [getattr(other, f"get_{which}label")() for other in (axes, *shared)]
    return _plain(next(filter(None, labels), "")) or which


def _plain(text: str) -> str:
    """The words of a text, without its formulas where there are words."""
    text = text.replace(r"$\log_{10}$", "log10")
    words = re.sub(r"\s+", " ", re.sub(r"\$[^$]*\$", " ", text)).strip(" ,;:/")
    return words or re.sub(r"\\[a-zA-Z,|!;]+|[${}\\]", "", text).strip()


def _tick(axes: Axes, which: str, value: float) -> str:
    """A number on the axis as text: in the axes' own format if they have one, or as the word of the nearest tick."""
    if (printed := getattr(axes, f"fmt_{which}data")) is not None:
        return printed(value)
    axis = getattr(axes, f"{which}axis")
    if isinstance(axis.get_major_locator(), FixedLocator):
        positions = axis.get_majorticklocs()
        words = zip(positions, axis.get_major_formatter().format_ticks(positions), strict=True)
        near = [
            (abs(position - value), word)
            for position, word in words
            if re.search("[a-zA-Z]", word) and abs(position - value) < HALF
        ]
        if near:
            return _plain(min(near)[1])
    return f"{value:.4g}"


def png_field(readings: list[MarkReading]) -> PngInfo:
    """The readings as a compressed field of a PNG file."""
    info = PngInfo()
    if readings:
        info.add_text(FIELD, json.dumps(readings), zip=True)
    return info


def spots_over_png(path: Path) -> str:
    """SVG to lay over the picture: the spots of the readings that the file holds; empty if it holds none."""
    try:
        with Image.open(path) as picture:
            text, (width, height) = getattr(picture, "text", {}).get(FIELD, "[]"), picture.size
            dots_per_inch = picture.info.get("dpi", (POINTS, POINTS))[0]
        readings = [MarkReading(float(x), float(y), str(words)) for x, y, words in json.loads(text)]
    except (OSError, ValueError, TypeError, RecursionError):  # damaged, or not written by us
        return ""
    spots = as_spots(readings, width, height, RADIUS / POINTS * dots_per_inch)
    return spots and f'<svg class="spots" viewBox="0 0 {width} {height}" aria-hidden="true">{spots}</svg>'


def as_spots(readings: list[MarkReading], width: float, height: float, radius: float) -> str:
    """SVG: invisible spots on the marks of a figure of this size, each with its reading as its title."""
    if not readings:
        return ""
    spots = (
        f'<circle cx="{x * width:.1f}" cy="{y * height:.1f}" r="{radius:.1f}">'
        f"<title>{html.escape(text)}</title></circle>"
        for x, y, text in readings
    )
    return f'<g class="readings" fill="none" stroke="none" pointer-events="all">{"".join(spots)}</g>'


def with_spots(svg: bytes, readings: list[MarkReading]) -> bytes:
    """An SVG file with the spots on top."""
    size = re.search(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if size is None:
        return svg
    head, end, rest = svg.rpartition(b"</svg>")
    return head + as_spots(readings, float(size[1]), float(size[2]), RADIUS).encode() + end + rest

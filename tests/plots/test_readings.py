"""What the marks of a figure tell: their numbers, at the places where they are drawn."""

import io
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from rankbench.plots import figure as figures
from rankbench.plots.path_mass import draw_path_mass
from rankbench.plots.readings import MOST_OF_FIGURE, readings_of, spots_over_png

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture
def drawn():
    """A figure with a line, seeds behind it, bars in words, a map and a line across, and its pixels."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    (lines, bars), (cells, empty) = figure.subplots(2, 2)
    lines.plot([1, 2, 3], [0.1, 10, np.nan], "o-", color="#0000FF", markersize=8, label=r"trained, $\lambda$ = 1")
    lines.plot([1, 2], [1, 1], ".", color="#0000FF", markersize=12)
    lines.axhline(5, color="#00FF00", label="a level")
    lines.set_yscale("log")
    lines.set_xlabel("path length k")
    lines.set_ylabel(r"mass $\|S\|$")
    bars.bar([0, 1], [2, 3], color="#FF0000", label="seed 0")
    bars.set_xticks([0, 1], ["no skip", "skip"])
    cells.imshow([[0.0, 1.0], [np.nan, 3.0]], cmap="gray")
    empty.set_visible(False)
    empty.plot([0], [0], label="unseen")
    figure.savefig(image := io.BytesIO(), dpi=200)
    return figure, np.asarray(Image.open(image).convert("RGB"))


def test_each_mark_tells_its_number_where_it_is_drawn(drawn):
    figure, pixels = drawn
    height, width, _ = pixels.shape
    found = {reading.text: reading for reading in readings_of(figure)}
    marks = {
        "trained,  = 1: path length k = 1; mass = 0.1": BLUE,
        "trained,  = 1: path length k = 2; mass = 10": BLUE,
        "path length k = 1; mass = 1": BLUE,
        "seed 0: x = no skip; y = 2": RED,
        "seed 0: x = skip; y = 3": RED,
        "x = 0; y = 0; 0": (0, 0, 0),
        "x = 1; y = 1; 3": (255, 255, 255),
    }
    marks = {re.sub(r"\s+", " ", text): colour for text, colour in marks.items()}
    assert set(marks) <= set(found)
    assert len(found) == len(marks) + 2  # one more seed, one more cell: no level, no nan, nothing unseen
    for text, colour in marks.items():
        x, y = round(found[text].x * width), round(found[text].y * height)
        around = pixels[y - 3 : y + 4, x - 3 : x + 4].reshape(-1, 3)
        assert (around == colour).all(1).any(), text


def test_the_files_of_a_figure_hold_its_readings(drawn, tmp_path):
    figure, _ = drawn
    png, svg = figures.save(figure, tmp_path / "figure", (".png", ".svg"))
    text = svg.read_text()
    assert len(re.findall("<circle ", text)) == len(readings_of(figure)) == 9
    assert "<title>seed 0: x = no skip; y = 2</title>" in text and text.rstrip().endswith("</svg>")
    over = spots_over_png(png)
    assert re.findall("<title>(.*?)</title>", over) == re.findall("<circle .*?<title>(.*?)</title>", text)
    places = [
        [float(number) for number in re.findall(r'c[xy]="([\d.]+)"', spots)] for spots in (text, over)
    ]  # in points and in pixels
    assert np.array(places[1]) == pytest.approx(np.array(places[0]) / 72 * 200, abs=0.3)


def test_a_picture_without_readings_has_no_spots(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "plain.png")
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG")
    assert spots_over_png(tmp_path / "plain.png") == spots_over_png(tmp_path / "damaged.png") == ""


def test_the_readings_of_many_marks_are_thinned():
    figure = Figure()
    axes = figure.subplots()
    for number in range(40):
        axes.plot(np.arange(100), np.full(100, number), label=f"run {number}" if number < 3 else None)
    readings = readings_of(figure)
    assert len(readings) == MOST_OF_FIGURE
    assert sum(reading.text.startswith("run ") for reading in readings) == 3 * 60
    assert "run 2: x = 0; y = 2" in {reading.text for reading in readings}
    assert "run 2: x = 99; y = 2" in {reading.text for reading in readings}


def test_a_cell_of_a_map_is_named_as_its_axes_are():
    places = [{"layer": layer, "head": head} for layer in (1, 2) for head in (1, 2, 3)]
    rows = [{"part": "head", **at, "mass": 0.1 * at["layer"] + at["head"], "loss_without": 1.0} for at in places]
    rows += [{"part": "length", "path_length": k, "mass": 1.0, "gradient_mass": 0.1} for k in range(3)]
    figure = draw_path_mass(pd.DataFrame(rows).assign(whole_loss=0.5, seed=0, run="run"))
    figure.draw_without_rendering()
    cells = [reading.text for reading in readings_of(figure) if reading.text.startswith("head = ")]
    assert {"head = 1; layer = 1; 1.1", "head = 3; layer = 2; 3.2"} <= set(cells) and len(cells) == 12


def test_a_logarithm_on_an_axis_of_powers_is_told_as_a_power():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [-3, -4], label="run")
    axes.fmt_ydata = lambda power: f"10^{power:g}"
    axes.set_xlabel("layer (0: embedding)")
    axes.set_ylabel("$\\log_{10}$ of residual\nor diameter $d$")
    assert [reading.text for reading in readings_of(figure)] == [
        "run: layer (0: embedding) = 0; log10 of residual or diameter = 10^-3",
        "run: layer (0: embedding) = 1; log10 of residual or diameter = 10^-4",
    ]

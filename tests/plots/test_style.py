"""rankbench.plots.style: a user's matplotlibrc and style files reach the figures, and a bad file is refused."""

import pandas as pd
import pytest
from command_line import python
from matplotlib.colors import to_hex, to_rgb
from refusals import refusal

from rankbench import plots
from rankbench.analyses import ANALYSES
from rankbench.commands.checks import check_everything
from rankbench.commands.compose import compose
from rankbench.plots import style
from rankbench.plots.sweep import draw_sweep

RUNS = pd.DataFrame({"k": [1, 2, 4] * 2, "s": ["a"] * 3 + ["b"] * 3, "seed": 0, "test_accuracy": 0.5})


def style_file(folder, *lines):
    path = folder / "paper.mplstyle"
    path.write_text("\n".join(lines))
    return str(path)


def look_of(figure):
    """Sizes of tick labels, titles, and legend; width of the lines; their colours."""
    axes = figure.axes[0]
    sizes = [text.get_fontsize() for text in (axes.get_xticklabels()[0], axes.title, figure.legends[0].get_texts()[0])]
    lines = [container.lines[0] for container in axes.containers]
    return sizes, {line.get_linewidth() for line in lines}, [to_hex(line.get_color()) for line in lines]


@pytest.mark.further
def test_a_users_matplotlibrc_comes_first(tmp_path, monkeypatch):
    settings = ["font.size: 16", "figure.figsize: 2, 1.5", "axes.prop_cycle: cycler('color', ['k', 'r'])"]
    settings += ["backend: svg", "figure.autolayout: True", "savefig.dpi: figure"]
    (tmp_path / "matplotlibrc").write_text("\n".join(settings))
    program = """from pathlib import Path
import pandas as pd
from rankbench.plots.figure import grid_of, save
from rankbench.plots.style import STYLE, colours, panel_size
sizes = STYLE["font.size"], STYLE["legend.fontsize"], panel_size()
print(*sizes, colours(), {"backend", "figure.autolayout"} & set(STYLE))
save(grid_of(pd.DataFrame(), None, 1)[0], Path("figure"))"""
    monkeypatch.setenv("MATPLOTLIBRC", str(tmp_path))
    assert python("-c", program, at=tmp_path).stdout == "16.0 14.0 (2.0, 1.5) ['k', 'r'] set()\n"
    assert (tmp_path / "figure.png").exists() and (tmp_path / "figure.pdf").exists()


def test_a_style_file_changes_letters_lines_and_colours_for_as_long_as_it_is_asked_for(tmp_path):
    plain = look_of(draw_sweep(RUNS, "k", "s"))
    chosen = ["font.size: 16", "lines.linewidth: 3", "axes.prop_cycle: cycler('color', ['r', 'lime'])"]
    with plots.drawn_with(style_file(tmp_path, *chosen)):
        drawn = look_of(draw_sweep(RUNS, "k", "s"))
    assert drawn == ([16.0, 16.0, 14.0], {3.0}, ["#ff0000", "#00ff00"])
    assert plain == ([8.0, 8.0, 7.0], {1.2}, ["#0072b2", "#d55e00"]) == look_of(draw_sweep(RUNS, "k", "s"))
    with plots.drawn_with(style_file(tmp_path, "font.size: 10", "legend.fontsize: 5", "figure.figsize: 2, 1.5")):
        figure = draw_sweep(RUNS, "k", "s")
    assert look_of(figure)[0] == [10.0, 10.0, 5.0]
    assert figure.get_figwidth() == 2


@pytest.mark.parametrize("number", [1, 2, 12])
def test_a_style_may_have_any_number_of_colours(tmp_path, number):
    several = pd.concat([RUNS.assign(s=name) for name in "abcdefghijkl"])
    rows = {"p": 2.0, "part": "attention", "weights": "fresh", "attention": "dot", "start": 0, "step": 0, "layer": 1}
    rows |= {"seed": 0, "tokens": [2, 4] * 2, "value": [1.0, 2.0, 3.0, 4.0]}
    lipschitz = pd.DataFrame(rows | {"quantity": ["certificate"] * 2 + ["ball"] * 2})
    with plots.drawn_with(style_file(tmp_path, f"axes.prop_cycle: cycler('color', {list('krgbcmykrgbc')[:number]})")):
        widths = look_of(draw_sweep(several, "k", "s"))[1]
        assert len(ANALYSES["lipschitz"].figure(lipschitz).axes[0].lines) == 2
    assert min(widths) > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("font.size: large and red", "Could not convert 'large and red' to float"),
        ("font.sise: 3", "Bad key font.sise"),
        ("hello", "Missing colon"),
        ("text.usetex: True\npgf.texsystem: none\nfont.size: -1", "matplotlib cannot draw with it"),
        (None, "no such file; give a matplotlib style file"),
    ],
)
@pytest.mark.parametrize("command", ["plot", "report"])
def test_a_bad_style_file_is_refused_in_one_line_before_anything_is_written(tmp_path, command, text, said):
    path = str(tmp_path / "none") if text is None else style_file(tmp_path, text)
    words = ["sweep.csv"] if command == "plot" else []
    line = refusal(check_everything, compose(command, *words, f"plot.style={path}", f"out={tmp_path / 'out'}"))
    assert line.startswith(f"plot.style={path}: ") and said in line
    assert not (tmp_path / "out").exists()


def test_a_label_that_is_longer_than_its_panel_is_broken_outside_of_formulas(tmp_path):
    with plots.drawn_with(style_file(tmp_path, "font.size: 16")):
        figure = draw_sweep(RUNS, "k", "s")
        words = "a label with many words and a formula"
        figure.axes[0].set_ylabel(words + r" $a + b$")
        plots.save(figure, tmp_path / "figure", (".png",))
    text = figure.axes[0].get_ylabel()
    assert "\n" in text and text.replace("\n", " ") == words + r" $a + b$" and "$a + b$" in text
    assert style.STYLE["font.size"] == 8


@pytest.mark.parametrize("number", [1, 2, 5, 7, 8])
def test_series_beyond_the_last_colour_have_another_marker(tmp_path, number):
    colours = ",".join(f"'0.{colour}'" for colour in range(number))
    with plots.drawn_with(style_file(tmp_path, f"axes.prop_cycle: cycler('color', [{colours}])")):
        looks = [(style.colour_of(series), style.marker_of(series)) for series in range(number * len(style.MARKERS))]
    assert len(set(looks)) == len(looks)


def test_no_line_is_lighter_than_the_lightest_of_our_colours():
    def luminance(colour):
        channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]  # of sRGB
        return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]

    lightest = max(map(luminance, style.HOUSE["axes.prop_cycle"].by_key()["color"]))
    assert all(luminance(style.colour_of_depth(layer, 12)) < lightest for layer in range(13))
    assert luminance(style.colour_of_depth(1, 1)) < lightest

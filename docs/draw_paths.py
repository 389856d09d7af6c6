"""Draws paths.png beside this file: the paths of a network of two layers with two heads each, by their length."""

from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt

from rankbench.plots.style import colours

HEIGHTS = {"head 1": 1.0, "head 2": 0.0, "skip": -1.0}
ENDS = ("X", "output")
PLACES = (0.0, 1.7, 3.7, 5.4)  # of the input, the two layers and the output, from left to right


def main() -> None:
    """Draw the figure."""
    plt.switch_backend("agg")
    figure, axes = plt.subplots(1, 3, figsize=(7.6, 1.9), layout="constrained")
    for length, axis in enumerate(axes):
        paths = [path for path in product(HEIGHTS, repeat=2) if 2 - path.count("skip") == length]
        for number, path in enumerate(paths):
            shift = 0.07 * (number - (len(paths) - 1) / 2)
            heights = [shift / 2, *(HEIGHTS[name] + shift for name in path), shift / 2]
            axis.plot(PLACES, heights, color=colours()[number], linewidth=1.5)
        for place, (name, height) in product(PLACES[1:3], HEIGHTS.items()):
            box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "0.6"}
            axis.text(place, height, name, ha="center", va="center", fontsize=7, bbox=box)
        for place, name in zip(PLACES[::3], ENDS, strict=True):
            box = {"boxstyle": "round,pad=0.25", "facecolor": "0.9", "edgecolor": "0.3"}
            axis.text(place, 0, name, ha="center", va="center", fontsize=7, bbox=box)
        count = f"{len(paths)} path{'s' * (len(paths) > 1)} through {length or 'no'} head{'s' * (length != 1)}"
        axis.set_title(f"$S_{length}$: {count}", fontsize=8)
        axis.set(xlim=(-0.6, 6.2), ylim=(-1.4, 1.4))
        axis.axis("off")
    figure.savefig(Path(__file__).with_name("paths.png"), dpi=200)


if __name__ == "__main__":
    main()

"""PNG files of a limited size, from figures that have been drawn."""

import io
from pathlib import Path

from PIL import Image, ImageOps

SHRINK = 0.9  # factor of both sides, until the file fits
STEP = 8  # of 255; shades are rounded to its multiples, which nobody sees and which takes a third less room


def png_within(path: Path, limit: int) -> bytes:
    """The PNG file's bytes if there are at most `limit`; else the picture with rounded shades, smaller until it fits.

    A palette would take less room, but where a figure has many colours its few are others.
    """
    content, scale = path.read_bytes(), 1.0
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    while len(content) > limit and min(picture.size) * scale > 1:
        written = io.BytesIO()
        smaller = ImageOps.scale(picture, scale, Image.Resampling.BOX)  # others add shades around every edge
        smaller.point(lambda shade: min(255, round(shade / STEP) * STEP)).save(written, "png", optimize=True)
        content, scale = written.getvalue(), SHRINK * scale
    return content

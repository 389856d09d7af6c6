"""PNG files of a limited size, from figures that have been drawn."""

import io
from pathlib import Path

from PIL import Image, ImageOps

COLOURS = (256, 64, 16)  # of the palettes that are tried in turn
SHRINK = 0.8  # factor of both sides, until the file fits


def png_within(path: Path, limit: int) -> bytes:
    """The PNG file's bytes if there are at most `limit`; else the picture with fewer colours, then smaller, until it
    fits."""
    content = path.read_bytes()
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    while len(content) > limit and min(picture.size) > 1:
        for colours in COLOURS:
            written = io.BytesIO()
            picture.quantize(colours).save(written, "png", optimize=True)
            content = written.getvalue()
            if len(content) <= limit:
                return content
        picture = ImageOps.scale(picture, SHRINK, Image.Resampling.LANCZOS)
    return content

"""The colours of charts: distinguished by everyone, in light and in dark."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from tfswap.report.markup import FOLDER
from tfswap.report.page import COLOURS
from tfswap.report.picture import COLOURS as PICTURE
from tfswap.report.timeline import KINDS

pytestmark = pytest.mark.fast

SEEN_BY = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopes": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopes": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopes": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""How linear red, green and blue are seen where one kind of cones is missing, by G. M. Machado et al. 2009, "A
physiologically-based model for simulation of color vision deficiency"."""
LEAST = 16.0
"""The least distance of two colours in CIELAB; 2.3 can just be seen side by side."""


def linear(colour: str) -> list[float]:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    r, g, b = (min(1.0, max(0.0, part)) for part in rgb)
    xyz = (
        (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047,
        0.2126729 * r + 0.7151522 * g + 0.0721750 * b,
        (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883,
    )
    x, y, z = (part ** (1 / 3) if part > 216 / 24389 else (24389 / 27 * part + 16) / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: str, who: str) -> tuple[float, float, float]:
    rgb = linear(colour)
    return lab([sum(a * b for a, b in zip(row, rgb, strict=True)) for row in SEEN_BY[who]])


def palettes() -> dict[str, dict[str, str]]:
    """The colours of the page by name, in light and in dark."""
    text = (FOLDER / "page.css").read_text(encoding="utf-8")
    blocks = [re.findall(r"--(\w+): (#[0-9a-f]{6});", block) for block in re.findall(r"\.tfswap \{(.*?)\}", text, re.S)]
    light, dark = (dict(block) for block in blocks if block)
    return {"light": light, "dark": dark}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("who", SEEN_BY)
def test_kinds_of_memory_and_of_blocks_are_distinguished(theme: str, who: str) -> None:
    colours = palettes()[theme]
    for names in (KINDS, COLOURS.values()):
        for a, b in itertools.combinations(names, 2):
            assert math.dist(seen(colours[a], who), seen(colours[b], who)) >= LEAST, (a, b)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out(theme: str) -> None:
    colours = palettes()[theme]
    for name, least in (("ink", 7), ("soft", 4.5), ("accent", 4.5), ("limit", 3)):
        light, dark = sorted((seen(colours[each], "all")[0] for each in (name, "paper")), reverse=True)
        luminances = [((part + 16) / 116) ** 3 for part in (light, dark)]
        assert (luminances[0] + 0.05) / (luminances[1] + 0.05) >= least, name


def test_pictures_have_the_colours_of_pages() -> None:
    light = palettes()["light"]
    assert {KINDS[kind]: colour for kind, colour in PICTURE.items()} == {kind: light[kind] for kind in KINDS}

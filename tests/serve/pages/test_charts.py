"""Charts say what their numbers are, at the right places."""

import math
import re

import pytest

from imprint.serve.pages.charts import draw_ranges, draw_ratio, draw_signed_bar, find_reach
from imprint.serve.pages.picture import draw_picture

SVG = re.compile(r'<rect class="(\w[\w-]*)" x="([-\d.]+)" y="[\d.]+" width="([\d.]+)"')


@pytest.mark.parametrize("value", [1.0, 0.25, -0.5, -1.0])
def test_a_bar_is_as_long_as_its_value_on_its_side(value: float) -> None:
    ((kind, start, length),) = SVG.findall(draw_signed_bar(value, None, 1.0, "helps"))
    assert kind == "helps" and float(length) == pytest.approx(142 * abs(value), abs=0.01)
    assert float(start) == pytest.approx(150 if value > 0 else 150 - 142 * abs(value), abs=0.01)


def test_an_interval_that_contains_0_crosses_the_middle_and_none_is_cut_off() -> None:
    for value, half, crosses in ((0.5, 0.2, False), (0.5, 0.6, True), (-0.5, 0.2, False), (-1.0, 3.0, True)):
        svg = draw_signed_bar(value, half, find_reach([value], [half]), "unclear")
        low, high = map(float, re.findall(r'class="whisker" d="M([\d.]+) .*H([\d.]+)M', svg)[0])
        assert (low < 150 < high) == crosses
        assert 0 <= low < high <= 300


def test_nothing_is_drawn_of_nothing() -> None:
    assert 'width="0.00"' in draw_signed_bar(0.0, None, 0.0, "unclear")


def test_a_ratio_is_drawn_in_its_interval_and_told_in_words() -> None:
    svg = draw_ratio("Ratio", 0.9, 0.7, 1.2, (0.5, 2.0))
    at = float(re.findall(r'cx="([\d.]+)"', svg)[0])
    low, high = map(float, re.findall(r'class="whisker" d="M([\d.]+) .*H([\d.]+)M', svg)[0])
    share = (math.log(0.9) - math.log(0.7)) / (math.log(1.2) - math.log(0.7))
    assert at == pytest.approx(low + share * (high - low), abs=0.2)
    assert "0.90, with a 95% interval from 0.70 to 1.20" in svg
    assert "interval" not in draw_ratio("Ratio", -0.3, None, None, (0.5, 2.0))


@pytest.mark.parametrize("low", [0.0, 0.001])
def test_distributions_are_drawn_on_one_axis(low: float) -> None:
    first = [low + 0.1 * place for place in range(11)]
    svg = draw_ranges("Sizes", [("<them>", first), ("us", [2 * value for value in first])])
    bars = {kind: (float(start), float(length)) for kind, start, length in SVG.findall(svg)}
    assert bars["plain-bar"][0] > bars["baseline"][0] and "&lt;them&gt;: from" in svg
    assert svg.count("<title>") == svg.count("<desc>") == 1
    assert draw_ranges("Sizes", [("same", [0.0] * 11)])


@pytest.mark.parametrize(
    ("low", "high"), [(0.03, 0.045), (2.1e-4, 4.9e-4), (2.1, 2.1), (1000.0, 1000.0 * (1 + 1e-16)), (0.9, 1.1), (-3, -2)]
)
def test_a_narrow_distribution_has_an_axis_with_numbers_on_it(low: float, high: float) -> None:
    svg = draw_ranges("Sizes", [("us", [low + (high - low) * place / 10 for place in range(11)])])
    numbers = [float(each) for each in re.findall(r'text-anchor="middle">([^<]+)<', svg)]
    assert 2 <= len(numbers) <= 6
    assert all(min(low, high) <= each <= max(high, 2 * low) for each in numbers)


def test_a_picture_has_its_pixels_from_black_to_white() -> None:
    import struct
    import zlib
    from base64 import b64decode

    content = b64decode(draw_picture([0, 4, 8, 16], 2, 0, 16).partition(",")[2])
    assert struct.unpack(">II", content[16:24]) == (2, 2)
    start = content.index(b"IDAT") + 4
    assert zlib.decompress(content[start:-16]) == bytes([0, 0, 64, 0, 128, 255])

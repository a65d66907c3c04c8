"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from tercet.telemetry.units import quantity


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0"),
        (999, "999"),
        (999.4, "999"),
        (999.7, "1k"),
        (12_345, "12.3k"),
        (999_400, "999k"),
        (999_700, "1M"),
        (-999_700, "-1M"),
        (-12_345, "-12.3k"),
        (999_999_999, "1G"),
        (1e21, "1000E"),
        (1.2345e22, "12345E"),
        (math.nan, "nan"),
    ],
)
def test_a_quantity_has_three_digits_and_the_prefix_that_suits_them(value, told):
    assert quantity(value) == told


def test_a_unit_follows_its_prefix():
    assert quantity(999_700, "FLOP") == "1 MFLOP"
    assert quantity(7, "FLOP") == "7 FLOP"

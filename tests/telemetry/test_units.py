"""Human-readable numbers."""

from __future__ import annotations

import math

import pytest

from tercet.telemetry.units import quantity


@pytest.mark.parametrize(
    ("value", "text"),
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
def test_quantities_have_three_digits_and_a_prefix(value, text):
    assert quantity(value) == text


def test_a_unit_follows_its_prefix():
    assert quantity(999_700, "FLOP") == "1 MFLOP"
    assert quantity(7, "FLOP") == "7 FLOP"

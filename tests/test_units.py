from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import QoffError
from qoff.units import counted, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512k", 512_000),
        ("512KB", 512_000),
        ("512KiB", 512 << 10),
        ("24MiB", 24 << 20),
        ("8GB", 8 * 10**9),
        (" 1.5 gib ", 3 << 29),
        ("0.1TB", 10**11),
        ("17b", 17),
        ("9007199254740993", 2**53 + 1),
        (4096, 4096),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e9", "12 parsecs", "1iB", "1.MiB", "0x10", "nan", "9" * 400, -1]
)
def test_anything_else_is_refused_with_an_example(text: str | int) -> None:
    with pytest.raises(QoffError, match=r"size"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_a_plain_number_is_exact(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_reads_back_within_its_digits(nbytes: int) -> None:
    back = parse_size(format_size(nbytes))
    step = max(abs(nbytes), 1 << 10) / 10  # one decimal of the smallest number of its unit
    assert abs(back - nbytes) <= (0 if nbytes < 1024 else step)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (24 << 20, "24.0 MiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_are_written_in_binary_units(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_one_of_a_thing_is_not_many() -> None:
    assert [counted(n, "window") for n in (0, 1, 2)] == ["0 windows", "1 window", "2 windows"]

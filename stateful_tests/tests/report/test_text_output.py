"""Listings and sizes as text."""

import io

from ci.report.text_output import console, listing, sizes


def test_a_listing_of_sentences_alone_keeps_its_first_column():
    out = io.StringIO()
    listing(console(out), [{"a": "x" * 50, "b": "y" * 90}], {"a": "A", "b": "B"})
    heading, row, *below = out.getvalue().splitlines()
    assert heading.split() == ["A"] and row == "x" * 50
    assert "".join(line.strip() for line in below) == "y" * 90


def test_sizes_without_settings_are_told():
    assert sizes({"page_size": 4, "window": None, "settings": None}) == "page_size 4, window none"

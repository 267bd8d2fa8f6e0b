"""Every measured number of README and docs is in the file of benchmarks/results that its text names.

A text with measurements has <!-- measured: FILE ... --> before it; one that only looks like it, such as an assumption or a
limit, has <!-- not measured: REASON -->.
"""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

import documents
from documents import PAGES, Text
from paths import ROOT

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")


def numbers(text: str) -> set[Decimal]:
    return {Decimal(found.replace(",", "")) for found in NUMBER.findall(text)}


def held(files: tuple[str, ...]) -> set[Decimal]:
    """The numbers in these files, and those that are fractions also in percent."""
    found = numbers("\n".join((ROOT / file).read_text("utf-8") for file in files))
    return found | {one * 100 for one in found if one < 10}


def missing(text: Text) -> list[str]:
    """The numbers that no file has, not even with more digits."""
    known = held(text.files)
    return [word for word in text.numbers if not any(round(one, places(word)) == value(word) for one in known)]


def value(word: str) -> Decimal:
    return Decimal(word.replace(",", ""))


def places(word: str) -> int:
    return len(word.partition(".")[2])


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_in_the_files_that_the_text_names(page):
    for text in documents.texts(page):
        for file in text.files:
            assert file.startswith("benchmarks/results/") and (ROOT / file).is_file(), f"{text.where}: {file}"
        if text.files:
            assert not missing(text), f"{text.where}: not in {' or '.join(text.files)}: {', '.join(missing(text))}"


@pytest.mark.parametrize("page", PAGES)
def test_measurements_name_their_file(page):
    unnamed = [text.where for text in documents.texts(page) if text.looks_measured and not text.files and not text.reason]
    assert not unnamed, f"add <!-- measured: FILE --> or <!-- not measured: REASON --> before {', '.join(unnamed)}"


def test_a_changed_number_is_found():
    text = Text("page:1", "98.89 % of 360 digits", ("benchmarks/results/digits/README.md",))
    assert missing(text) == []
    assert missing(Text("page:1", "98.98 % of 360 digits", text.files)) == ["98.98"]
    assert Text("page:1", "runs at 140 images/s").looks_measured

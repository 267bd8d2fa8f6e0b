"""Files that a command writes at its end."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from full_disk import files_up_to
from worldsize.config import output_files
from worldsize.errors import UserError


def test_no_part_of_a_file_stays_on_a_full_disk(tmp_path: Path):
    page = tmp_path / "page.html"
    with pytest.raises(UserError, match=r"page\.html: File too large"), output_files.written(page), files_up_to(100):
        page.write_text(1000 * "x")
    assert not page.exists()


def test_a_file_that_may_not_be_written_stays(tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(UserError, match="Permission denied"), output_files.written(page):
        raise PermissionError(errno.EACCES, "Permission denied", str(page))
    assert page.read_text() == "mine"

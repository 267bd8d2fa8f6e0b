"""Files that a command writes at its end."""

from __future__ import annotations

import errno
import os
import tempfile
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


# Where even root cannot write, on every Linux.
CLOSED = Path("/sys")
CLOSED_FILE = Path("/proc/sys/kernel/ostype")


@pytest.mark.parametrize("path", [CLOSED / "page.html", CLOSED_FILE])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(path: Path):
    with pytest.raises(UserError, match=rf"^--out {path}: cannot write there: "):
        output_files.check("--out", path)


def test_a_link_is_checked_where_it_leads(tmp_path: Path):
    (tmp_path / "page.html").symlink_to(CLOSED / "page.html")
    with pytest.raises(UserError, match="cannot write there"):
        output_files.check("--out", tmp_path / "page.html")
    (tmp_path / "good.html").symlink_to(tmp_path / "target.html")
    output_files.check("--out", tmp_path / "good.html")
    assert not (tmp_path / "target.html").exists()


@pytest.mark.parametrize("has_files_without_names", [True, False])
def test_a_check_leaves_everything_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_files_without_names: bool):
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", has_files_without_names)
    page = tmp_path / "page.html"
    page.write_text("mine")
    os.utime(page, ns=(1, 2))
    output_files.check("--out", page)
    output_files.check("--out", tmp_path / "new.html")
    output_files.check_folder("--svg", tmp_path / "new" / "deep")
    output_files.check_folder("--svg", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "mine" and page.stat().st_mtime_ns == 2


def test_pipes_and_devices_are_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    output_files.check("--out", tmp_path / "pipe")  # to open it would wait for a reader
    output_files.check("--out", Path("/dev/null"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file", "is a file, not a folder"), ("file/charts", "Not a directory"), ("link/charts", "cannot write")],
)
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, name: str, reason: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(CLOSED)
    with pytest.raises(UserError, match=reason):
        output_files.check_folder("--svg", tmp_path / name)

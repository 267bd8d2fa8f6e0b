"""Files that are written completely or not at all."""

from __future__ import annotations

import pytest

from full_disk import files_up_to
from worldsize.runs.atomic import append, replacing, write_json


@pytest.mark.parametrize("durable", [False, True])
def test_the_new_content_replaces_the_old_at_the_end(tmp_path, durable):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path, durable=durable) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("disk"), KeyboardInterrupt("disk")])
def test_after_an_error_the_old_content_is_left_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise error

    with pytest.raises(type(error), match="disk"):
        interrupted()
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_value_that_is_no_json_changes_nothing(tmp_path):
    write_json(tmp_path / "file", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "file", object())
    assert (tmp_path / "file").read_text() == "1\n"


@pytest.mark.parametrize(("before", "after"), [("", ""), ("one\n", "one\n"), ("one\ntw", "one\ntw\n"), ("on", "on\n")])
def test_a_line_is_not_appended_to_one_that_was_cut(tmp_path, before, after):
    (tmp_path / "file").write_text(before)
    append(tmp_path / "file", "new\n")
    append(tmp_path / "file", "newer\n")
    assert (tmp_path / "file").read_text() == f"{after}new\nnewer\n"


@pytest.mark.parametrize("write", [append, write_json])
def test_the_error_of_a_full_disk_names_the_file(tmp_path, write):
    write(tmp_path / "file", "old")
    before = (tmp_path / "file").read_text()
    with files_up_to(8), pytest.raises(OSError, match="File too large") as error:
        write(tmp_path / "file", "longer than that")
    assert error.value.filename == str(tmp_path / "file")
    assert (tmp_path / "file").read_text() == before
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]

"""Numbers on the command lines of replay and audit that are none."""

from __future__ import annotations

import pytest

from worldsize import cli
from worldsize.config import recipe_files


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("audit", "--windows", "-1"), "--windows -1: must be at least 0"),
        (("audit", "--procs", "0"), "--procs 0: must be at least 1"),
        (("replay", "--step", "9", "--procs", "0"), "--procs 0: must be at least 1"),
    ],
)
def test_they_are_refused_before_the_run_is_read(tmp_path, capfd, words, message):
    (tmp_path / "recipe.yaml").write_text(recipe_files.to_yaml(recipe_files.load("digits")))
    assert cli.main([words[0], str(tmp_path), *words[1:]]) == 64
    assert message in capfd.readouterr().err

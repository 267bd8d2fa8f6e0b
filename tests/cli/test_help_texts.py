"""What ``--help`` says agrees with the code and with docs."""

from __future__ import annotations

import re

import pytest

from paths import ROOT
from worldsize.cli import main, usage
from worldsize.cli.commands import COMMANDS
from worldsize.parallel.base import LAUNCHERS

# Commands that print options of their own without a recipe.
WITH_OPTIONS = [command.words for command in COMMANDS if command.options]


@pytest.mark.parametrize("words", WITH_OPTIONS)
def test_no_default_is_shown_where_it_is_empty(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([*words.split(), "--help"]))
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert not re.search(r"\(default: (''|)\)", shown)


def test_the_help_names_the_exit_codes_of_the_page():
    first_table = (ROOT / "docs/exit-codes.md").read_text().partition("\n## Following")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", first_table, re.MULTILINE)}
    text = usage.complete_help()
    named = {int(code) for code in re.findall(r"\b\d+\b", text[text.index("Exit codes:") : text.index("Following a job")])}
    assert len(codes) > 15
    assert codes <= named


def test_the_page_of_strategies_has_the_launchers_that_the_command_shows():
    text = (ROOT / "docs/strategies.md").read_text()
    [header] = re.findall(r"^\| \| (`--procs N` .*) \|$", text, re.MULTILINE)
    names = [re.sub(r"`| N|\s*\(.*\)", "", cell).strip() for cell in header.split("|")]
    assert names == [*LAUNCHERS]

"""Names and values in tables are whole, wherever the table goes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from reported import make
from worldsize import cli
from worldsize.config import tables

LONG = "a-run-with-a-name-that-says-which-dataset-network-and-learning-rate-it-has-"


def test_what_is_no_terminal_gets_one_line_per_row_with_whole_names(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    first, second = (make(tmp_path, f"{LONG}{number}", seed=number) for number in (1, 2))
    assert cli.main(["compare", str(first), str(second)]) == 1
    assert capsys.readouterr().out.splitlines()[0].split() == [str(first), str(second)]
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == {first.name, second.name}


def test_a_file_gets_whole_names(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    written = io.StringIO()
    table = tables.table("image", "class")
    table.add_row(5 * LONG, "cat")
    tables.console(written).print(table)
    assert written.getvalue().splitlines()[1].split() == [5 * LONG, "cat"]


@pytest.mark.parametrize("columns", ["20", "40"])
def test_a_narrow_terminal_folds_names(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    written = io.StringIO()
    table = tables.table("setting", LONG)
    table.add_row("optimizer.no-weight-decay-on", "x")
    tables.console(written).print(table)
    lines = written.getvalue().splitlines()
    assert all(len(line) <= int(columns) for line in lines)
    assert sorted("".join("".join(lines).split())) == sorted(f"setting{LONG}optimizer.no-weight-decay-onx")


def test_brackets_and_all_digits_of_a_value_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("m[a].yaml").write_text('base: digits\nmodel: {weights: "runs/[v2]/w.pth"}\noptimizer: {lr: 0.0300000001}\n')
    assert cli.main(["recipes", "m[a].yaml", "--against", "digits"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["setting", "m[a].yaml", "digits"],
        ["model.weights", "runs/[v2]/w.pth", "None"],
        ["optimizer.lr", "0.0300000001", "0.03"],
    ]
    old, new = (make(tmp_path, name, model={"weights": f"{name}/w.pth"}) for name in ("[old]", "[new]"))
    assert cli.main(["compare", str(old), str(new)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [[str(old), str(new)], ["model.weights", "[old]/w.pth", "[new]/w.pth"]]

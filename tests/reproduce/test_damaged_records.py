"""What commands say about a run whose records are damaged: that they are, and never that there is a mistake in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eight_steps import EIGHT_STEPS
from worldsize import cli

SETTINGS = (*EIGHT_STEPS, "--epochs", "1")


@pytest.fixture(scope="module")
def finished(ranks) -> Path:
    """A finished run of eight steps; do not modify."""
    ranks(1).run("train", "digits", *SETTINGS, "--name", "finished")
    return ranks.cwd / "runs" / "finished"


@pytest.mark.parametrize("text", ["", '{"steps": 8, "top', "\N{POUND SIGN}", "[]", "{}", '{"steps": "8"}'])
def test_an_audit_reports_a_damaged_result(run, capsys, text):
    (run / "result.json").write_text(text, "latin-1")
    assert cli.main(["audit", str(run), "--windows", "0"]) == 1
    assert "INCONSISTENT: result.json is damaged: it " in capsys.readouterr().out


def test_an_audit_needs_no_result(run, capsys):
    (run / "result.json").unlink()
    assert cli.main(["audit", str(run), "--windows", "0"]) == 0
    assert "\nCONSISTENT" in capsys.readouterr().out


COMMANDS = [("audit", "--windows", "0"), ("replay", "--step", "2", "--from-start")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("line", ['{"step": 2}', "[]", "7", '{"kind": "epoch"}', '{"kind": "step", "step": "2"}'])
def test_damaged_metrics_are_named(run, fails, line, command):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert "metrics.jsonl is damaged: line 10 does not have the kind and the step" in fails(command[0], run, *command[1:])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"world_size": "1"}'])
def test_a_damaged_environment_is_named(run, fails, text, command):
    (run / "environment.json").write_text(text)
    assert "environment.json is damaged: " in fails(command[0], run, *command[1:])


@pytest.mark.parametrize("name", ["device", "versions", "precision", "strategy", "hardware"])
def test_an_environment_with_a_wrong_entry_is_damaged(run, fails, name):
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(environment | {name: 1}))
    assert f"environment.json is damaged: '{name}' is " in fails("audit", run, "--windows", "0")


def test_an_accuracy_that_is_no_number_is_inconsistent(run, capsys):
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "epoch", "step": 1, "val_top1": "high"}\n')
    assert cli.main(["audit", str(run), "--windows", "0"]) == 1
    assert "INCONSISTENT: val_top1 after step 1 is no number in metrics.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "null", '{"data": "none"}', '{"world_size": "many"}'])
def test_a_report_does_without_a_damaged_environment(run, tmp_path, text):
    (run / "environment.json").write_text(text)
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize("text", ["[]", "null", '{"world_size": "many"}'])
def test_explain_names_a_damaged_environment(run, fails, text):
    (run / "environment.json").write_text(text)
    assert "environment.json is damaged: " in fails("explain", run)


@pytest.mark.parametrize("command", [("audit", "--windows", "0"), ("replay", "--step", "1")])
def test_what_a_terminal_would_obey_is_printed_as_escapes(run, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    environment = json.loads((run / "environment.json").read_text())
    environment["versions"]["torch"] += "\x1b]0;title\x07"
    (run / "environment.json").write_text(json.dumps(environment))
    assert cli.main([command[0], str(run), *command[1:]]) in (0, 1)  # other threads may round differently
    printed = capsys.readouterr().out
    assert r"\x1b]0;title\x07" in printed and "\x1b" not in printed

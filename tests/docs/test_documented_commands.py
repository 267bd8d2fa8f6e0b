"""Every command line of README, docs and the help texts works: copied, with names for the words in capitals.

So do the programs and recipes in README and docs, and every flag and setting that they name exists.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

import documents
import workshop
from documents import PAGES
from paths import ROOT
from workshop import Shell
from worldsize import cli

FAKE_CLUSTER = workshop.Cluster


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workshop.furnish(tmp_path_factory.mktemp("workshop"))


@pytest.fixture
def shell(furnished, tmp_path, monkeypatch, request) -> Shell:
    """A shell in a copy of the workshop. With the parameter True, commands only read their arguments."""
    monkeypatch.chdir(shutil.copytree(furnished, tmp_path / "workshop"))

    def connect() -> None:
        request.getfixturevalue("fake_cluster").has_job()
        path = tmp_path / "kubeconfig"
        config = yaml.safe_load(path.read_text())
        config["contexts"][0]["context"]["namespace"] = "team"
        path.write_text(yaml.safe_dump(config))

    return Shell(monkeypatch, connect, only_parse=getattr(request, "param", False))


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(page, shell):
    for block in documents.blocks(page):
        shell.run_block(block)
    for line in documents.inline(page):
        shell.run(line)
    assert not shell.problems, "\n".join(["", *shell.problems])


@pytest.mark.parametrize("shell", [True], ids=["parsed"], indirect=True)
def test_the_commands_of_the_help_texts_can_be_read(shell):
    for line in documents.of_help():
        shell.run(line)
    assert not shell.problems, "\n".join(["", *shell.problems])


def test_blocks_have_a_language_and_few_are_not_run():
    found = [block for page in PAGES for block in documents.blocks(page)]
    assert not [f"{block.page}:{block.line}" for block in found if block.language not in documents.LANGUAGES]
    reasons = {block.reason for block in found if block.reason}
    assert len(reasons) <= 6, reasons


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/migrate.md"])  # names flags of others
def test_flags_and_settings_exist(page):
    named = documents.flags(page)
    known = documents.known_flags()
    assert not {flag for flag in named if flag not in known}


def test_settings_in_tables_of_other_trainers_exist():
    rows = [line for line in (ROOT / "docs/migrate.md").read_text().splitlines() if line.startswith("| ")]
    ours = re.findall(r"--[a-z][\w.-]*\.[\w-]+", "\n".join(row.split(" | ")[1] for row in rows))
    assert len(ours) > 50
    assert not {*ours} - documents.known_flags()


def test_the_prediction_that_is_shown_is_what_plan_prints(capsys):
    """Its numbers are those of the model; other pages show output that depends on the machine."""
    block, shown = (block for block in documents.blocks("docs/scaling.md") if block.line < 20)
    [line] = documents.commands(block)
    assert cli.main(line.text.split()[1:]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for row in shown.text.splitlines():
        assert " ".join(row.split()) in printed

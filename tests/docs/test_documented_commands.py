"""Every command line of README, docs and the help texts works: copied, with names for the words in capitals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

import documents
import workshop
from documents import PAGES
from workshop import Shell

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
        if block.language == "sh" and not block.reason:
            for line in documents.commands(block):
                shell.run(line)
    for line in documents.inline(page):
        shell.run(line)
    assert not shell.problems, "\n".join(["", *shell.problems])


@pytest.mark.parametrize("shell", [True], ids=["parsed"], indirect=True)
def test_the_commands_of_the_help_texts_can_be_read(shell):
    for line in documents.of_help():
        shell.run(line)
    assert not shell.problems, "\n".join(["", *shell.problems])

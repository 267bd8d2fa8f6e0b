"""What environment.json archives: commit, command, packages, container."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions, version
from types import SimpleNamespace

import pytest

from paths import ROOT
from worldsize.training import provenance


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose package is ``tmp_path/package``."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    monkeypatch.setattr(provenance, "worldsize", SimpleNamespace(__file__=str(package / "__init__.py")))
    return package


def test_the_commit_of_a_checkout(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert provenance.describe("x")["commit"] == head
    (checkout / "__init__.py").write_text("changed")
    assert provenance.describe("x")["commit"] == f"{head}+changes"


def test_the_repository_of_another_project_around_it_does_not_count(checkout):
    git(checkout, "rm", "-q", "--cached", "__init__.py")
    git(checkout, "commit", "-qm", "an environment inside a repository")
    assert provenance._commit() is None


def test_the_commit_that_pip_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "worldsize", SimpleNamespace(__file__=str(tmp_path / "__init__.py")))
    installed = '{"url": "https://example.org/worldsize", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}'
    monkeypatch.setattr(provenance, "distribution", lambda name: SimpleNamespace(read_text=lambda file: installed))
    assert provenance._commit() == "abc123"


def test_without_git_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "worldsize", SimpleNamespace(__file__=str(tmp_path / "__init__.py")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance._commit() is None


def test_command_packages_and_container(monkeypatch):
    monkeypatch.setenv(provenance.CONTENT, "0123abcd")
    described = provenance.describe("worldsize train digits")
    assert described["command"] == "worldsize train digits"
    assert described["container"] == "0123abcd"
    names = {one.metadata["Name"] for one in distributions()}
    assert described["packages"] == {name: version(name) for name in names}
    assert "torch" in names and list(described["packages"]) == sorted(names)


def test_of_several_versions_the_first_on_the_path_is_recorded(tmp_path, monkeypatch):
    """As with setuptools, which puts copies of other packages last on the path."""
    (tmp_path / "torch-99.0.dist-info").mkdir()
    (tmp_path / "torch-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert provenance.describe("x")["packages"]["torch"] == version("torch") != "99.0"
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert provenance.describe("x")["packages"]["torch"] == "99.0"


def test_the_images_say_what_they_contain():
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert dockerfile.count("LABEL worldsize.content=$CONTENT") == dockerfile.count(f"ENV {provenance.CONTENT}=$CONTENT")

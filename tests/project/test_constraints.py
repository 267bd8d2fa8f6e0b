"""constraints.txt can be installed with every Python that worldsize supports, not only with the one that runs the tests."""

from __future__ import annotations

import sys
from importlib.metadata import distributions

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from paths import ROOT

SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
# The first and the last of each; Debian 12 has 3.11.2.
RELEASES = [f"{python}.{micro}" for python in SUPPORTED for micro in (0, 99)]


def pins(release: str) -> dict[str, str]:
    """The version of each package that pip would install with this release of Python."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    python = {"python_version": release.rpartition(".")[0], "python_full_version": release}
    apply = [each for each in requirements if each.marker is None or each.marker.evaluate(python)]
    names = [canonicalize_name(each.name) for each in apply]
    assert sorted(names) == sorted(set(names)), "a package has two versions"
    return {name: str(each.specifier).removeprefix("==") for name, each in zip(names, apply, strict=True)}


@pytest.mark.parametrize("release", RELEASES)
def test_no_pinned_version_requires_another_python(release: str) -> None:
    """Of each pinned version that is installed here, its metadata says which Pythons it supports."""
    chosen = pins(release)
    unfit, looked_at = [], 0
    for found in distributions():
        metadata = found.metadata
        if chosen.get(canonicalize_name(metadata["Name"])) != found.version:
            continue
        looked_at += 1
        requires = metadata.get("Requires-Python", "")
        if release not in SpecifierSet(requires):
            unfit.append(f"{metadata['Name']}=={found.version} requires Python {requires}")
    assert looked_at > 20
    assert not unfit, f"give these another version for Python {release}, with a marker"


def test_the_supported_pythons_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={SUPPORTED[0]},<3.{int(SUPPORTED[-1][2:]) + 1}"' in text
    assert all(f'"Programming Language :: Python :: {python}"' in text for python in SUPPORTED)
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in SUPPORTED

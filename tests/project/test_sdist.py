"""The source distribution: contains the C sources, and installs without a C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from paths import ROOT

FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a checkout")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    checkout = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        shutil.copy(ROOT / name, checkout)
    ignored = shutil.ignore_patterns("build", "__pycache__", "*.so", "*.egg-info")
    for folder in ("native", "src"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=ignored)
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=checkout, check=True, capture_output=True)
    (archive,) = (checkout / "dist").iterdir()
    return archive


def test_the_sdist_contains_the_sources_of_the_native_decoder(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "native" / "src").iterdir()}
    assert any(name.endswith(".c") for name in sources) and any(name.endswith(".h") for name in sources)
    assert sources <= names
    assert {"pyproject.toml", "setup.py", "src/worldsize/py.typed"} <= names
    pages = [path for path in (ROOT / "src/worldsize/pages").rglob("*.*") if path.suffix != ".pyc"]
    assert len(pages) > 10 and {str(path.relative_to(ROOT)) for path in pages} <= names


@pytest.mark.slow
def test_the_sdist_installs_without_a_compiler_and_env_shows_why_there_is_no_native_decoder(sdist, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-cache-dir", "--no-deps"]
    environment = {key: value for key, value in os.environ.items() if key != "WORLDSIZE_DECODER"}
    installed = subprocess.run(
        [*pip, "--no-build-isolation", "--no-index", "--target", tmp_path / "site", sdist],
        env=environment | {"CC": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert installed.returncode == 0, installed.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "worldsize", "env"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    (decoder,) = (line for line in shown.stdout.splitlines() if line.startswith("decoder"))
    assert "no native decoder" in decoder
    assert "C compiler" in decoder

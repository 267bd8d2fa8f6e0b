"""The site of the documents builds without a warning, has every page in its navigation, and needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from browser import browse
from documents import PAGES
from paths import ROOT

pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, ROOT / "docs" / "make_site.py", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_built(site):
    built = {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")}
    names = {str(Path(page).with_suffix("")).replace("README", "index") for page in PAGES}
    assert names | {"docs/api", "docs/commands"} <= built


def test_pages_load_nothing_from_the_network(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text("utf-8")
        loaded = re.findall(r"""<(?:script|img|iframe|source)[^>]+?src=["']?([^"'\s>]+)""", text)
        loaded += re.findall(r"""<link[^>]+?rel=["']?stylesheet[^>]+?href=["']?([^"'\s>]+)""", text)
        loaded += re.findall(r"url\(([^)]+)\)|@import\s+(\S+)", text) if path.suffix == ".css" else []
        assert not [url for url in loaded if str(url).lstrip("\"'(").startswith(("http", "//"))], path


def test_the_search_works_in_a_page_that_is_opened_as_a_file(site, tmp_path):
    class Searched(type(site)):
        def as_uri(self) -> str:
            return f"{super().as_uri()}?q=certificate"

    dom, console = browse(Searched(site / "docs" / "prove.html"), tmp_path)
    assert re.search(r"[1-9]\d* matching documents", dom)
    assert console == []

"""Pages in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(page: Path, tmp_path: Path, *options: str) -> tuple[str, list[str]]:
    """The page's elements after its scripts have run, and what it wrote to the console."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-component-update"
    command = [CHROMIUM, *flags.split(), "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", *options]
    command += ["--disable-background-networking", "--virtual-time-budget=10000", "--enable-logging=stderr"]
    command += ["--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=os.environ | {"LANG": "C"})
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]


def figures(dom: str) -> dict[str, str]:
    """The SVG of each chart by name."""
    return dict(re.findall(r'id="chart-(\w+)".*?(<svg.*?</svg>)', dom, re.S))


def marks(svg: str, kind: str) -> int:
    """How many marks of this kind, such as lines, the chart has."""
    groups = re.findall(rf'<g class="mark-{kind} role-mark[^>]*>(.*?)</g>', svg, re.S)
    return sum(len(re.findall(r"<path", group)) for group in groups)

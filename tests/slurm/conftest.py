from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Callable[[str, str], None]:
    """stand_in(name, lines) puts a program of these lines of bash first on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def write(name: str, lines: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return write

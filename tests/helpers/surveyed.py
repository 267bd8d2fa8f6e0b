"""Helpers of the tests that survey datasets."""

from __future__ import annotations

from pathlib import Path

from worldsize import cli


def data(*arguments: str | Path) -> int:
    return cli.main(["data", *map(str, arguments)])

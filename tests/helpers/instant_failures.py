"""A plugin of pytest that prints why a test failed at once: a run that is ended early has no summary."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} failed:\n{report.longreprtext}", flush=True)

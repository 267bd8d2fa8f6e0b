"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data sets for development that lie beside the repository; tests that need one skip where it is absent."""
    return Path(__file__).resolve().parents[2] / "shared" / "data"

"""A clock that does not wait."""

from __future__ import annotations

import pytest

from followed import Clock
from worldsize.cluster.jobs import follow


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr(follow, "time", one)
    return one

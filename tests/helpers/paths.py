"""Where this checkout is, and what lies next to it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"  # data, test beds and collections of files that some tests use, where they exist
# Values of model.name.
SMALL_NETWORK = f"{ROOT}/tests/helpers/small_network.py:residual"
ENDED_NETWORK = f"{ROOT}/tests/helpers/ended_network.py:build"

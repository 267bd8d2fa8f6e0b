"""Changing a run's files as a forger would, who also makes their manifests valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def rewrite_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json, with a valid manifest."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    seal(checkpoint)


def seal(checkpoint: Path) -> None:
    """Let the manifest list the files that the checkpoint has now."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    present = [name for name in manifest["files"] if (checkpoint / name).exists()]
    manifest["files"] = {}
    for name in present:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def rewrite_metrics(run: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Replace each line of metrics.jsonl, or drop it where ``change`` returns None."""
    lines = [change(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))

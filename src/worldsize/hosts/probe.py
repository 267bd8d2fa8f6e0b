"""What a host is like, as one line of JSON: started on the host before a job. Reads a JSON object from stdin.

Keys of the input: ``out`` (folder of the runs), ``port`` (0: do not check), ``gpus`` (whether to count them), ``recipe``
(YAML), ``peers`` (names of other hosts).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from worldsize import __version__
from worldsize.config import recipe_files
from worldsize.errors import WorldsizeError
from worldsize.launch import route


def describe(asked: dict[str, Any]) -> dict[str, Any]:
    """The facts that the launcher compares. ``data`` and ``problem`` are None if there is nothing to say."""
    facts: dict[str, Any] = {"version": __version__, "time": time.time(), "problem": None}
    facts["port_free"] = not asked["port"] or _is_free(asked["port"])
    facts["routes"] = {peer: route.to(peer) for peer in asked["peers"]}
    facts["writable"] = _is_writable(Path(asked["out"]))
    import torch

    facts["torch"] = torch.__version__
    facts["gpus"] = torch.cuda.device_count() if asked["gpus"] else 0
    try:
        facts["data"] = _fingerprint(asked["recipe"], Path(asked["out"]))
    except WorldsizeError as error:
        facts["data"], facts["problem"] = None, str(error)
    return facts


def _is_free(port: int) -> bool:
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            probe = socket.socket(family)
        except OSError:  # no IPv6 on this machine
            continue
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True


def _is_writable(out: Path) -> bool:
    existing = next((path for path in (out, *out.absolute().parents) if path.exists()), Path("/"))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _fingerprint(recipe: str, out: Path) -> dict[str, Any]:
    from worldsize.data import open_dataset

    return dict(open_dataset(recipe_files.validate(yaml.safe_load(recipe), "the recipe").data, out / ".cache").fingerprint)


def main(_: Sequence[str]) -> None:
    """Answer on stdout."""
    print(json.dumps(describe(json.load(sys.stdin))))

"""Renders a job as a self-contained shell script for one machine: ``worldsize render --on local`` (pure)."""

from __future__ import annotations

import shlex
from pathlib import Path

_END = "END_OF_RECIPE"


def render(recipe: str, name: str, procs: int, out: Path, retries: int) -> str:
    """A POSIX shell script that trains ``recipe`` (YAML) with ``procs`` processes.

    Started again, it resumes the run OUT/NAME. A signal to the script alone, such as that of timeout or of a service
    manager, reaches the training, which saves.
    """
    options = ["--name", name, "--procs", str(procs), "--out", str(out), "--autoresume", "--retries", str(retries)]
    return f"""\
#!/bin/sh
set -eu
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
cat > "$folder/recipe.yaml" <<'{_END}'
{recipe}{_END}
worldsize train "$folder/recipe.yaml" {shlex.join(options)} &
training=$!
trap 'signalled=yes; kill -TERM "$training" || true' HUP INT TERM
signalled=yes
while [ $signalled = yes ]; do   # a signal ends the wait, not the training
    signalled=no
    wait "$training" && code=0 || code=$?
done
exit "$code"
"""

"""Folders of images that do not exist, and in the pods of a job, how they come onto its volume."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from worldsize.config import job_pod
from worldsize.config.wording import quoted
from worldsize.data.fetch.known import KNOWN, Name
from worldsize.errors import UserError

_FETCHED = tuple(name for name in get_args(Name) if KNOWN[name].source is not None)


def error(path: Path, named: Path | None = None) -> UserError:
    """The error that ``path`` is missing.

    Args:
        named: how the user named it, if that is another path.
    """
    # Commands name it by different flags. A run may be resumed from another folder than the one that it began in.
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    return UserError(f"{named or path}: no such folder{where}{on_volume(path)}")


def on_volume(path: Path) -> str:
    """In the pods of a job, the command that brings it onto their volume, else nothing."""
    if not job_pod.inside() or not path.is_relative_to(job_pod.VOLUMES) or len(path.relative_to(job_pod.VOLUMES).parts) < 2:
        return ""
    volume, *parts = path.relative_to(job_pod.VOLUMES).parts
    if parts[0] == "data" and parts[1:2] and parts[1] in _FETCHED:
        fetch = f"worldsize cluster data fetch {parts[1]} --volume {volume} --image IMAGE"
        return f". To download the dataset onto the volume: {fetch}"
    put = f"worldsize cluster files put FOLDER {quoted(volume + ':/' + '/'.join(parts))} --image IMAGE"
    return f". To copy a folder of your machine onto the volume: {put}"

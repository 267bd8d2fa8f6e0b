"""What the pods of a job are told apart by, and what they say instead of paths that their user's machine does not have."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from worldsize.config.wording import quoted

# Paths inside a pod, shared by the container image and the manifests. The pods of training jobs, and nothing else, have the
# file; its existence also tells the ranks that mpirun starts, which do not get Kubernetes' environment variables.
VOLUMES = PurePosixPath("/mnt")
RECIPE = PurePosixPath("/run/worldsize/recipe.yaml")
AGAIN = "the same `worldsize train --on ...` command"


def inside() -> bool:
    """Whether this process belongs to a training job in pods, so that nobody types commands where it runs."""
    return Path(RECIPE).is_file()


def continuing(run: Path) -> str:
    """The command that continues the run."""
    return AGAIN if inside() else f"worldsize train --resume {quoted(run)}"

"""Names of runs that follow from what is run (pure)."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from worldsize.config.recipe import Recipe


def run_name(stem: str, recipe: Recipe, *shape: Any) -> str:
    """STEM-HASH; the hash covers the recipe and the job's shape, so the same command names the same run.

    Args:
        stem: name of the recipe; what is not valid in a host name is replaced.
        shape: JSON values.
    """
    identity = json.dumps([recipe.model_dump(mode="json"), *shape], sort_keys=True)
    slug = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:30].strip("-") or "run"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return f"{slug if slug[0].isalpha() else 'run-' + slug}-{digest[:6]}"

"""A checkpoint whose state was written by somebody else: what a resume says about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from worldsize import checkpoint
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.training.resume import _check_unchanged

FACTS = {"identity": Recipe().identity(), "data": {}, "classes": ["a"], "precision": "fp32", "global_batch": 64}


@pytest.mark.parametrize("value", [3, "resnet50", []])
def test_a_section_of_the_identity_that_is_none_is_a_change(value):
    state = FACTS | {"identity": FACTS["identity"] | {"model": value}}
    snapshot = checkpoint.Snapshot({}, {}, {}, state, "")
    request = SimpleNamespace(allow_changes=False, recipe=Recipe())
    with pytest.raises(UserError, match=r"settings or data changed:\s+model: was "):
        _check_unchanged(request, snapshot, FACTS)

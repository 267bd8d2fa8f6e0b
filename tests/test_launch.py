"""The reported cause of a failure: the first failure, not the failures that follow from it."""

from __future__ import annotations

import pytest

from worldsize.launch.local import Outcome, cause

EXPECTED, INTERNAL = Outcome(64, "wrong"), Outcome(70, "lost a peer")


@pytest.mark.parametrize(
    ("exit_codes", "reports", "code"),
    [
        ({0: 64, 1: -15}, [(99.0, EXPECTED)], 64),
        ({0: 64, 1: 64}, [(98.0, EXPECTED), (99.0, INTERNAL)], 64),
        ({0: 64, 1: -9}, [(99.0, EXPECTED)], 64),
        ({0: 70, 1: -9}, [(99.0, INTERNAL)], 137),
        ({0: 70, 1: -9}, [(60.0, INTERNAL)], 70),
        ({0: -15, 1: -11}, [], 139),
        ({0: -15, 1: 3}, [], 3),
    ],
)
def test_the_cause_of_a_failure(exit_codes, reports, code):
    assert cause(exit_codes, reports, now=100.0).code == code

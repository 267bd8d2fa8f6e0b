"""What pytest-timeout does not do when a test has used up its time: show and end the processes that the test has started.

Without that, a test that waits for a child would go on waiting, and what a killed test leaves behind would keep pipes open.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from process_tree import end_descendants, show_stacks

SLOW = 1800  # seconds for a test marked slow; others have the limit in pyproject.toml
# Seconds after which a process whose main thread never comes back to Python, and so ignores pytest-timeout, ends itself.
GRACE = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout") or 0)
    timers = [threading.Timer(limit, _end_children, (item.nodeid,)), threading.Timer(limit + GRACE, _end_this_process)]
    for timer in timers if limit else ():
        timer.daemon = True
        timer.start()
    try:
        return (yield)
    finally:
        for timer in timers:
            timer.cancel()


def _end_children(test: str) -> None:
    print(f"\n{test} has used up its time; its processes:", flush=True)
    show_stacks(sys.executable)
    end_descendants()


def _end_this_process() -> None:
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    os._exit(1)

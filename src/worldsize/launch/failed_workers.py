"""Names the process whose end makes torch's agent start its node's processes again; the agent itself prints nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worldsize.launch.local import AGENT_KILL_S, EFFECTS, cause, reports

# In a worker: how the process of its node ended for which the agent started this one. Empty or missing if none did.
LAST_FAILURE = "WORLDSIZE_LAST_FAILURE"


@contextmanager
def named() -> Iterator[None]:
    """Within this context, torch's agents name such a process on stderr, and in `LAST_FAILURE` of the next workers.

    A process that has reported its error has printed it, too, and is not named again.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    of_workers: Any = SubprocessContext
    of_agent: Any = LocalElasticAgent
    close, initialize = of_workers._close, of_agent._initialize_workers
    ended: dict[Any, dict[int, int]] = {}  # exit codes by local rank, of the groups of workers that the agent has closed

    def close_and_look(workers: Any, *args: Any, **kwargs: Any) -> None:
        failed = {rank: failure.exitcode for rank, failure in workers._failures.items()}
        began = time.monotonic()
        close(workers, *args, **kwargs)
        if workers not in ended:  # the agent closes them twice
            dying = _dying(workers) if time.monotonic() - began < AGENT_KILL_S else {}
            ended[workers] = _unreported(failed | dying, workers.error_files)

    def name_and_initialize(agent: Any, group: Any) -> None:
        ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
        codes = {ranks[local]: code for exit_codes in ended.values() for local, code in exit_codes.items()}
        ended.clear()
        os.environ[LAST_FAILURE] = failure = cause(codes, [], time.time()).message if codes else ""
        if failure:
            print(f"worldsize: {failure}", file=sys.stderr, flush=True)
        initialize(agent, group)

    of_workers._close, of_agent._initialize_workers = close_and_look, name_and_initialize
    try:
        yield
    finally:
        of_workers._close, of_agent._initialize_workers = close, initialize


def _dying(workers: Any) -> dict[int, int]:
    """Exit codes of those that a signal was ending already when the agent sent SIGTERM.

    A large process takes a while to end, and the others notice before its agent does. They may abort because of it.
    """
    found = {rank: handler.proc.poll() for rank, handler in workers.subprocess_handlers.items()}
    effects = (-signal.SIGTERM, -signal.SIGABRT)
    return {rank: code for rank, code in found.items() if code is not None and code < 0 and code not in effects}


def _unreported(exit_codes: dict[int, int], error_files: dict[int, str]) -> dict[int, int]:
    """Those without a report; none if a process reported what explains the end of all."""
    if not exit_codes or any(found.code not in EFFECTS for _, found in reports(Path(error_files[0]).parents[1])):
        return {}
    return {rank: code for rank, code in exit_codes.items() if not Path(error_files[rank]).exists()}

"""Notices a process that makes no progress, names it, and ends the run so that it can be started again.

Each process of a run writes its `heartbeat` to memory that a small process beside it reads, the `watcher`. The watchers
tell rank 0's what they see, which decides (`judgement`, pure functions). `watched` starts all this. Nothing here imports
torch. Read `heartbeat` first.
"""

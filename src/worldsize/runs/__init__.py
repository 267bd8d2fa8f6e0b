"""The run folder: its files, the lock of a run that is in progress, and the hash chain of its steps.

What can be known about a run without torch; its tensors are in `checkpoint`. Read `run_folder` first.
"""

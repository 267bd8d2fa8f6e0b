"""Asynchronous SGD with a parameter server. Read `server` first: it has the algorithm.

The loop of the workers is in `training.asynchronous`.
"""

"""Asynchronous training, in which no worker waits for another: the loop, and one worker's part of it.

The parameter server is in `parallel.async_sgd`. Read `trainer` first.
"""

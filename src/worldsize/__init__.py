"""Train image classifiers at any world size: one command, the same results."""

__version__ = "0.1.0"

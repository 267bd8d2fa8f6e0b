"""Train image classifiers at any world size: one command, the same numbers."""

__version__ = "0.1.0"

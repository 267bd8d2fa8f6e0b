"""Optimizers, learning rates and averaged weights.

`optimizers` builds the optimizer of a recipe; one that torch does not have is a module of its own. Read `optimizers` first.
"""

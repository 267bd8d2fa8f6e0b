"""This process and its peers: rank and world size, the process group, and which rank computes which samples.

What every strategy and launcher needs to know about processes; how gradients are combined is in `parallel`. Imports torch
only inside functions where it can. Read `rank` and `batch_plan` first.
"""

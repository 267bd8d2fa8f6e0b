"""Networks: building them by name, their initial weights, and the BatchNorm handling that data parallelism needs.

A library of networks is one module of `networks`. Nothing here knows about processes except the averaging of BatchNorm's
statistics. Read `factory` first.
"""

"""Benchmarks that interleave the compared programs in rounds, so that changes of the machine's speed cancel out."""

"""Local SGD: each rank takes several steps alone, then all ranks average their weights."""

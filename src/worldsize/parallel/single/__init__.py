"""One process, one device: the reference for all other strategies."""

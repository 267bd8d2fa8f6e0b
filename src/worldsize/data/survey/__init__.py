"""Inspect a dataset: `verify` checks every image, `info` describes the dataset, `sheet` shows some images."""

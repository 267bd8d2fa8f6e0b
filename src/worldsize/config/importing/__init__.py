"""Recipes from the files of other trainers. A new format is one module with a table of keys, and one line in `convert`."""

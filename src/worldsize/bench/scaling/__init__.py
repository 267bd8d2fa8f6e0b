"""``worldsize bench scaling``: how a recipe scales, measured in real runs here or on a cluster."""

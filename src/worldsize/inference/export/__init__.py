"""``worldsize export``: a trained network as a file for other programs, checked to give the same answers."""

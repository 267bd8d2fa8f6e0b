"""``worldsize predict`` and `worldsize.load`: a trained network's answers about images."""

"""What a trained network is for: predictions, and what it gets right and wrong."""

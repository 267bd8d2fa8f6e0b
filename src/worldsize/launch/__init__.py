"""Ways to start the processes of a run. A target is one module of this package."""

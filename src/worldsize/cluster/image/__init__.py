"""Building and looking up the container image that pods run."""

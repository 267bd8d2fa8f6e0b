"""A list of hosts, reached by ssh: the same runs without a scheduler."""

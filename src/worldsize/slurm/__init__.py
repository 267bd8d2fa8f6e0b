"""Slurm: the same runs as batch jobs. `script` renders (pure), `api` talks to Slurm."""

"""Volumes, secrets and files on a cluster."""

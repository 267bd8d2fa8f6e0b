"""Checks before a job is submitted."""

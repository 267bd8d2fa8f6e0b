"""Kubernetes API access: the only package that connects to an API server."""

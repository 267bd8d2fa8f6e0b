"""Kubernetes with Kubeflow: the same runs as jobs on a cluster."""

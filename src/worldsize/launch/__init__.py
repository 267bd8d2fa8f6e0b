"""Launchers: start a run's processes on this node. Each module is independent of any cluster manager."""

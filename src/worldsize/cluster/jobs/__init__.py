"""Jobs on a cluster: submit, follow, list, stop, delete."""

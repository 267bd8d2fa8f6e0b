"""Jobs on any scheduler: what a job is, how to follow it, and the commands that do not depend on the scheduler."""

"""Computing parts of a run again, to prove, inspect or verify it. Never changes the run."""

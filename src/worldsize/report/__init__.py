"""Shows runs and benchmarks that have been measured: as one page, as a list, and next to each other. Changes no run."""

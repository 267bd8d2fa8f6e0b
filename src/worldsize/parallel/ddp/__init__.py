"""Synchronous data parallelism through torch's DistributedDataParallel. Read `strategy` first."""

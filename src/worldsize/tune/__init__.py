"""``worldsize tune``: find a learning rate, and measure the speed of micro-batches."""

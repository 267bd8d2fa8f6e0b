"""Optimizers that torch does not have, or not in this form."""

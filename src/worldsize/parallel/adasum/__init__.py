"""Adasum: adds steps as far as they point in different directions. Read `strategy` first."""

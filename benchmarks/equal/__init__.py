"""Runs that two checkouts do, to be compared. See ../equal_weights.py."""

"""Fault drills: a run with a fault is compared with an undisturbed run."""

"""Fault drills: a fault from outside, and the proof that the run ends as if nothing was."""

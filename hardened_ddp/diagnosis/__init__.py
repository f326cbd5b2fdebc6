"""Diagnosis when something is wrong: doctor."""

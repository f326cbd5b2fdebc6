"""Diagnosis when something is wrong: doctor, and audit of any DDP program."""

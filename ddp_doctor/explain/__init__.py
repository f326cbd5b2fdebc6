"""Explain the log of any DDP job: which rank failed, why, and what to do."""

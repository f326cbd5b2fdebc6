"""Audit: what is silently wrong in somebody's DDP program, from its behaviour or its source."""

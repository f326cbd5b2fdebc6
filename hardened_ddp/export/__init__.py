"""Weights and whole models for other programs."""

"""Trials of model, task, optimizer and test set before the first step; they change nothing."""

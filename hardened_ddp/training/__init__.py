"""A run around its steps: evaluation, saving, resume, rollback, reports."""

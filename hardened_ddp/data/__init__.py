"""Which samples each step takes, and how they get into memory."""

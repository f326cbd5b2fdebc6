"""State on disk: complete or absent, verified, never executed."""

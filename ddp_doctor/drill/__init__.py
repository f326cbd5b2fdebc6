"""The command drill: gives faults to any DDP program, unchanged, and says what it lost."""

"""What the project costs and gains, measured. See benchmarks/README.md."""

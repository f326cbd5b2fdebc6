"""The same work, written for each contender. See benchmarks/README.md."""

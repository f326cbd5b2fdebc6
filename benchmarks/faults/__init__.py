"""The same faults for each contender. See docs/PEERS_ON_FAULTS.md."""

"""Guards of a run: stop signals, hangs, slow ranks, replicas that differ."""

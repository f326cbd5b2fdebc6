"""This process among the ranks: the launcher, the process group, the seeds."""

"""Who am I, who are we: the launcher, the process group, the seeds."""

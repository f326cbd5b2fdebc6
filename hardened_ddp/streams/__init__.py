"""Datasets that are read in order, in shards: what users write, how it is read and dealt."""

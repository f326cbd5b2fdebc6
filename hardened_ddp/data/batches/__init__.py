"""The batches of a rank: which samples, read by whom, in which order; and the ledger."""

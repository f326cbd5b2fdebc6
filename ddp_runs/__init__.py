"""Looks at runs: doctor, watch, report, verify-ledger. The trainer imports nothing of it."""

"""One optimizer step, and what happens when a rank fails in it."""

"""Programs in the styles that people write, for counting what audit finds: run.py runs them."""

"""One optimizer step, one evaluation, one resume: what the script calls in its loop."""

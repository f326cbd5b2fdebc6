"""What watches over a step: signals, hangs, slow ranks."""

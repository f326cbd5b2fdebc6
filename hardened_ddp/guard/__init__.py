"""What watches over a step: signals now, failing ranks and hangs later."""

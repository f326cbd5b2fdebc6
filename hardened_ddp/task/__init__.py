"""What is trained: what the model's output on a batch is worth."""

"""The task of a run: the loss and the metrics of a model's output on a batch."""

"""Reports of the run: logs, progress, metrics, TensorBoard, resources. Never stops training."""

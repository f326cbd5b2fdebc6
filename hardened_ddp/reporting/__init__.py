"""What the run says: logs, progress, metrics, TensorBoard, resources. Never stops training."""

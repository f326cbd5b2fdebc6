"""The parts of gpu_report.py."""

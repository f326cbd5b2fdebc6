"""Helps any DDP program, whatever trained it: explain reads its logs, audit observes its ranks.

    python -m ddp_doctor explain LOG ...
    python -m ddp_doctor audit -- torchrun --nproc_per_node=2 train.py

This folder works alone, wherever it is copied to, with the standard library. torch is imported
only inside an observed program, which has imported it itself.
"""

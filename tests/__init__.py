"""The tests of the layers and of the architecture. Ranks, commands, the check for leftovers:
ranks.py, commands.py, leftovers.py. The user-level contract is ../test_ddp_training.py."""

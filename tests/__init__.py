"""The tests of the rooms and of the house. Ranks, commands and the check for leftovers: ranks.py,
commands.py, leftovers.py. The user-level contract is ../test_ddp_training.py."""

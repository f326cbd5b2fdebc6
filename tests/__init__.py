"""Tests, in folders by what they test: a layer of the trainer, a product, a promise, the documents.

harness/ has ranks, commands and the check for leftovers. What users meet: ../test_ddp_training.py.
"""

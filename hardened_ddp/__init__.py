"""The rooms behind ddp_training.py, lowest first: errors, settings, ranks, reporting, data, model,
checkpoint, guard, training, diagnosis. A room imports only from rooms before it in that list."""

"""The layers behind ddp_training.py, lowest first: errors, settings, ranks, reporting,
data/batches, streams, data, task, model, gradients, checkpoint, guard, step, preflight, training,
export. A layer imports only from layers before it in that list."""

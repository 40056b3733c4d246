"""Training time: a task and its sources become imprints."""

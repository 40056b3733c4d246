"""Ready-made experiments: data, model and training, so that a claim can be checked with one call."""

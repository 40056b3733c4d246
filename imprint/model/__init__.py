"""The user's model: a copy that is safe to run on, what of it is supported, and its dropout."""

"""The process and its machine: whose turn it is, memory, progress, and warnings that are kept."""

"""Stacks of parameters with a row for each source, dense or factored."""

"""Forward-only scores of queries from a store."""

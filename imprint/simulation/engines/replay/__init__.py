"""The replay engine: the recorded run itself, once per source, with that source at weight 0."""

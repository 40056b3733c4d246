"""These tests need the extra `language`."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("transformers") and find_spec("peft") else ["test_*.py", "models.py", "adapters.py"]
)

"""These tests need the extra `language`."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if all(map(find_spec, ("transformers", "peft", "onnxruntime", "onnxscript"))) else ["test_*.py"]
)

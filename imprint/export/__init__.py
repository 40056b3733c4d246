"""Imprints for where only inference exists: LoRA adapters for serving engines, and an ONNX graph.

`to_peft`, `to_vllm` and `to_onnx` write a folder and test it; `read` turns the log-likelihoods an engine found into
scores, `read_peft`, `read_remote` and `read_onnx` find them themselves.
"""

from imprint.export.onnx import OnnxReader, read_onnx, to_onnx
from imprint.export.peft import read_peft, to_peft
from imprint.export.reading import Scores, read
from imprint.export.record import Export, Exported, SelfTest
from imprint.export.remote import EngineCheck, RemoteReader, read_remote
from imprint.export.vllm import to_vllm

__all__ = [
    "EngineCheck",
    "Export",
    "Exported",
    "OnnxReader",
    "RemoteReader",
    "Scores",
    "SelfTest",
    "read",
    "read_onnx",
    "read_peft",
    "read_remote",
    "to_onnx",
    "to_peft",
    "to_vllm",
]

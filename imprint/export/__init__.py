"""Imprints for where only inference exists: LoRA adapters for serving engines, and an ONNX graph.

`to_peft` and `to_onnx` write a folder and test it; `read` turns the log-likelihoods an engine found into scores,
`read_peft` and `read_onnx` find them themselves.
"""

from imprint.export.onnx import OnnxReader, read_onnx, to_onnx
from imprint.export.peft import read_peft, to_peft
from imprint.export.reading import Scores, read
from imprint.export.record import Export, Exported, SelfTest

__all__ = [
    "Export",
    "Exported",
    "OnnxReader",
    "Scores",
    "SelfTest",
    "read",
    "read_onnx",
    "read_peft",
    "to_onnx",
    "to_peft",
]

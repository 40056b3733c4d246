"""Private interfaces of torch are used in one file, and most of them can be missed."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

import imprint
from imprint import compat

PACKAGE = Path(imprint.__file__).parent
TABLES = {name for name in vars(nn.Module()) if name.startswith("_")} | {"_version", "_backward_hooks"}


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` as it is written; "" for the value of anything but a name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _private(tree: ast.AST) -> list[str]:
    """Names of torch with a leading underscore that some code imports or reads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found += [name for alias in node.names if re.search(r"\._", name := f"{node.module}.{alias.name}")]
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            path = _dotted(node)
            if path.startswith(("torch.", "nn.")) or (node.attr in TABLES and not path.startswith(("self.", "cls."))):
                found.append(path)
    return found


def test_private_interfaces_of_torch_are_used_in_one_file() -> None:
    users = {path.name: found for path in PACKAGE.rglob("*.py") if (found := _private(ast.parse(path.read_text())))}
    assert users.pop("compat.py")
    assert not users


def test_attention_is_set_back_as_it_was() -> None:
    with compat.math_attention():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_numbers_cannot_be_read_under_a_transform() -> None:
    assert compat.has_values(torch.ones(3))
    seen: list[bool] = []
    torch.func.vmap(lambda row: seen.append(compat.has_values(row)) or row)(torch.ones(2, 3))  # type: ignore[func-returns-value]
    assert seen == [False]


def test_numbers_are_not_read_for_a_while_by_this_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def look() -> tuple[bool, bool]:
        return compat.has_values(torch.ones(3)), torch.cuda.is_current_stream_capturing()

    with compat.without_values(), ThreadPoolExecutor(1) as pool:
        assert look() == (False, True)
        assert pool.submit(look).result() == (True, False)
    assert look() == (True, False)


def test_a_torch_without_its_counters_is_taken_to_be_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(forward_ad, "_current_level")
    monkeypatch.delattr(eager_transforms, "JVP_NESTING")
    compat.leave_forward_mode()
    assert compat.is_in_forward_mode() and compat.jvp_depth(3) == 3


def test_a_torch_that_does_not_tell_transformed_tensors_reads_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._functorch, "is_functorch_wrapped_tensor")
    assert not compat.has_values(torch.ones(3))

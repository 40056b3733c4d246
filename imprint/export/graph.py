"""A language model as one computation from tokens and stacked displacements to the scores of all sources.

Rows are the 2·sources points θ ± c_b·u_b. An adapted layer multiplies each row with its own B and A, as plain batched
matrix products; what lies before the first adapted block is computed once for each query.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from imprint.export.likelihood import of_logits
from imprint.export.lora import Adapted, adapter_tensors


class _Rows:
    """The factors of the adapted layers for the rows of one call; the layers look them up here."""

    def __init__(self) -> None:
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        self.count: Any = 1
        self.queries: Any = 1
        self.tokens: Any = 1


class RowLinear(nn.Module):
    """A linear layer with an adapter for each row: W x + B_row A_row x."""

    def __init__(self, linear: nn.Module, path: str, rows: _Rows) -> None:
        super().__init__()
        self.linear, self._path, self._rows = linear, path, rows

    def forward(self, x: Tensor) -> Tensor:
        rows = self._rows
        down, up = rows.factors[self._path]
        together = x.reshape(rows.count, rows.queries * rows.tokens, x.shape[-1])
        moved = together @ down.transpose(-1, -2) @ up.transpose(-1, -2)
        y: Tensor = self.linear(x)
        return y + moved.reshape(rows.count * rows.queries, rows.tokens, moved.shape[-1])


class Graph(nn.Module):
    """scores(input_ids, weights, gains, displacements) of a plain model around the adapters `parameters`.

    displacements: one stack (sources, *shape) for each name in `moved`, the selected parameters; those of B carry the
    adapter's scale.
    """

    def __init__(self, model: Any, layers: list[Adapted], parameters: dict[str, Tensor], moved: Sequence[str]) -> None:
        super().__init__()
        self.model, self._rows, self._layers, self._moved = model, _Rows(), layers, tuple(moved)
        for index, (layer, (down, up)) in enumerate(
            zip(layers, adapter_tensors(layers, parameters).values(), strict=True)
        ):
            self.register_buffer(f"down_{index}", down.clone())
            self.register_buffer(f"up_{index}", up.clone())
            model.set_submodule(layer.path, RowLinear(model.get_submodule(layer.path), layer.path, self._rows))
        self._shares_trunk = self._widen_from_first_block()

    def _widen_from_first_block(self) -> bool:
        """Have the first adapted block get every query once per row; False where there is no such block."""
        parts = [_outermost_list(self.model, layer.path) for layer in self._layers]
        lists = {part[0] if part else None for part in parts}
        if len(lists) != 1 or None in lists:
            return False  # some layer is outside of the blocks: the rows run through the whole model
        numbers = [part[1] for part in parts if part]
        blocks: Any = self.model.get_submodule(str(lists.pop()))
        first, *others = blocks[min(numbers) :]
        first.register_forward_pre_hook(lambda _, args, named: self._inputs(args, named, widen=True), with_kwargs=True)
        for block in others:
            block.register_forward_pre_hook(lambda _, args, named: self._inputs(args, named), with_kwargs=True)
        return True

    def _inputs(self, args: tuple[Any, ...], named: dict[str, Any], *, widen: bool = False) -> tuple[Any, Any]:
        """The inputs of a block: hidden states for every row; masks and positions are the same for all rows."""
        if args:
            args = (self._repeated(args[0]) if widen else args[0], *map(_single, args[1:]))
            return args, {name: _single(value) for name, value in named.items()}
        hidden = named["hidden_states"]
        rest = {name: _single(value) for name, value in named.items() if name != "hidden_states"}
        return (), {**rest, "hidden_states": self._repeated(hidden) if widen else hidden}

    def _repeated(self, x: Tensor) -> Tensor:
        rows = self._rows.count
        return x.unsqueeze(0).expand(rows, *x.shape).reshape(rows * x.shape[0], *x.shape[1:])

    def forward(self, input_ids: Tensor, weights: Tensor, gains: Tensor, displacements: list[Tensor]) -> Tensor:
        """Scores (queries, sources)."""
        rows, sources = self._rows, gains.shape[0]
        rows.count, rows.queries, rows.tokens = 2 * sources, input_ids.shape[0], input_ids.shape[1]
        signed = torch.cat([gains, -gains]).reshape(-1, 1, 1)
        shifts = {name: signed * torch.cat([u, u]) for name, u in zip(self._moved, displacements, strict=True)}
        for index, layer in enumerate(self._layers):
            down, up = self.get_buffer(f"down_{index}"), self.get_buffer(f"up_{index}")
            rows.factors[layer.path] = (
                down + shifts[layer.down] if layer.down in shifts else down,
                up + shifts[layer.up] if layer.up in shifts else up,
            )
        asked = input_ids if self._shares_trunk else self._repeated(input_ids)
        logits = self.model(input_ids=asked, use_cache=False).logits
        values = of_logits(logits, self._repeated(input_ids), self._repeated(weights))
        values = values.reshape(2, sources, input_ids.shape[0])
        return ((values[0] - values[1]) / (2 * gains.unsqueeze(1))).T


def _single(value: Any) -> Any:
    """A tensor that is the same for all rows, once; in it the batch of queries comes first."""
    if isinstance(value, Tensor):
        return value[:1] if value.dim() > 1 else value
    return tuple(map(_single, value)) if isinstance(value, tuple) else value


def _outermost_list(model: Any, path: str) -> tuple[str, int] | None:
    """The list of blocks that a layer lies in, and the number of its block."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[:end]), int(parts[end])
    return None

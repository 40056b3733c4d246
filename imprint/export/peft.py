"""Imprints as ordinary LoRA adapters: θ + c_b·u_b and θ − c_b·u_b for every source, and θ itself.

Of a replay the adapters *without* each source, θ₋b = θ − u_b/N, and θ, which is the deployed one.

export.json                          sources, gains, noise floors, the outcome of the self-test
probes.safetensors                   a few queries, to recognise the model
adapters/base/                       θ: the adapter at the checkpoint
adapters/0000-plus/, 0000-minus/     adapter_config.json and adapter_model.safetensors; of a replay 0000-without/
model/                               the plain model, unless another place of it is named

`imprint.export.vllm` writes the same with what that engine needs besides.
"""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from imprint.errors import ReadoutError, StoreError, first_line
from imprint.export.gains import DTYPES, choose_gains
from imprint.export.likelihood import of_logits
from imprint.export.lora import Adapted, adapter_tensors, import_peft, plain_model
from imprint.export.point import Counted, Point
from imprint.export.reading import Scores, read
from imprint.export.record import ADAPTERS, BASE, MODEL, Export
from imprint.export.writing import prepare_export, write_export
from imprint.store.files import write_tensors
from imprint.store.reading import Store
from imprint.store.values import read_json
from imprint.task import Batch, Task

logger = logging.getLogger(__name__)

_LOGIT_VALUES = 1 << 26  # of a mixed batch: more of them at once only take memory
_SOURCES_AT_ONCE = 16  # adapters are loaded for so many sources at a time


class Engine(Protocol):
    """A serving engine that adapters are written for: what it refuses, and the files it is started with."""

    def pad_rank(self, model: Any, layers: list[Adapted]) -> int:
        """Return the rank to fill adapters up to with zeros; refuse layers that the engine does not serve."""

    def write(self, where: Path, model: str, adapters: list[str], layers: list[Adapted], rank: int) -> None:
        """Write what the engine needs besides the adapters into the folder of the export."""


def to_peft(
    task: Task,
    store: Store | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    queries: Any,
    *,
    sources: Sequence[str] | None = None,
    checkpoint: int | None = None,
    dtype: str = "float32",
    base: str | os.PathLike[str] | None = None,
) -> Export:
    """Write a pair of LoRA adapters for every source, and test them on `queries` through PEFT.

    A store of a repeated run is written as one adapter for every source: the one that the training led to without it.
    The log-likelihood with it, less that with the base adapter, is the effect of removing the source.

    queries: completions like those to be asked: gains are chosen and noise is measured on them.
    sources: ids, by default all. checkpoint: by default the one with the most weight.
    dtype: the precision they will be served in, "float32", "bfloat16" or "float16".
    base: the name or path of a model that has the weights under the adapter; by default they are written, to `model/`.
    """
    return export_adapters(task, store, folder, queries, sources, checkpoint, dtype, base, None)


def export_adapters(
    task: Task,
    store: Store | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    queries: Any,
    sources: Sequence[str] | None,
    checkpoint: int | None,
    dtype: str,
    base: str | os.PathLike[str] | None,
    engine: Engine | None,
) -> Export:
    """Write and test the adapters of `to_peft`, in the form that an engine needs, where one is given."""
    point, batches = prepare_export(task, store, folder, queries, sources, checkpoint)
    model = plain_model(task, point.state)
    rank = None if engine is None else engine.pad_rank(model, point.layers)
    if base is not None:
        base = str(Path(base).absolute() if Path(base).is_dir() else base)
        model = _base_model(base, model)
    if engine is None:
        _warn_of_head(model, point.layers)
    gains = choose_gains(point, batches, dtype)

    def fill(where: Path, place: Path) -> tuple[str, dict[str, tuple[str, ...]]]:
        if base is None:
            with _hide_bars():
                model.save_pretrained(where / MODEL)
        about = _configuration(point.layers, model, str(place / MODEL) if base is None else base, rank)
        _write_adapter(where / BASE, point.layers, point.state, about)
        pairs: dict[str, tuple[str, ...]] = {}
        for positions, imprints in point.chunks():
            for row, position in enumerate(positions):
                moves = _list_moves(point, position, float(gains.values[position]))
                for path, signed in moves.items():
                    moved = {key: point.state[key] + signed * u[row] for key, u in imprints.items()}
                    _write_adapter(where / path, point.layers, {**point.state, **moved}, about)
                pairs[point.ids[position]] = (BASE, *moves) if point.removes else tuple(moves)
        if engine is not None and rank is not None:
            every = list(dict.fromkeys([BASE, *(path for pair in pairs.values() for path in pair)]))
            engine.write(where, base or MODEL, every, point.layers, rank)
        return base or MODEL, pairs

    def tested(draft: Export) -> Tensor:
        plus, minus = _log_likelihoods(draft, model if _precision(model) == "float32" else model.float(), batches)
        return (plus - minus) / (2 * draft.gains)

    return write_export("peft", folder, point, batches, gains, dtype, fill, tested)


def read_peft(export: Export | str | os.PathLike[str], model: Any, queries: Any) -> Scores:
    """Score completions through the adapters of an export on the plain model, many of them in each batch.

    The model is as it was before when this returns.
    """
    found = Export.open(export, "peft")
    batches = found.batches(queries, model.get_input_embeddings().weight.device)
    return read(found, *_log_likelihoods(found, model, batches))


def _log_likelihoods(export: Export, model: Any, queries: list[Counted]) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods under the adapters `plus` and `minus` of every source, both (queries, sources)."""
    blocks = []
    for start in range(0, len(export.sources), _SOURCES_AT_ONCE):
        part = export.sources[start : start + _SOURCES_AT_ONCE]
        paths = [str(path) for source in part for path in (source.plus, source.minus)]
        once = list(dict.fromkeys(paths))  # the base adapter is that of many removals
        with _loaded(export, model, [path for path in once if path != BASE]) as adapted:
            if start == 0:
                _refuse_model(export, adapted)
            values = torch.cat([_mixed(adapted, once, batch) for _, batch in queries], 1)
            blocks.append(values[[once.index(path) for path in paths]])
    values = torch.cat(blocks)
    return values[0::2].T, values[1::2].T


def _list_moves(point: Point, position: int, gain: float) -> dict[str, float]:
    """Return the adapters of a source, by their folder, and how far along the imprint each one goes."""
    place = f"{ADAPTERS}/{position:04d}"
    if point.removes:
        return {f"{place}-without": -1 / point.store.n}
    return {f"{place}-plus": gain, f"{place}-minus": -gain}


def _warn_of_head(model: Any, layers: list[Adapted]) -> None:
    if head_layers(model, layers):
        logger.warning(
            "the output head has an adapter, which some engines leave out of the log-probabilities of prompts: in your "
            "engine, compare the base adapter with the probes of the export"
        )


def head_layers(model: Any, layers: list[Adapted]) -> list[str]:
    """Return the adapted layers that are the output head or the input embedding."""
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    return [layer.path for layer in layers if any(model.get_submodule(layer.path) is end for end in ends)]


@contextmanager
def _hide_bars() -> Iterator[None]:
    """Hide the progress bars that transformers draws for files it writes."""
    import transformers

    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _base_model(name: str, plain: Any) -> Any:
    """Load a model by its name; refuse it unless its weights are those of the plain one."""
    import transformers

    try:
        with _hide_bars():
            found: Any = transformers.AutoModelForCausalLM.from_pretrained(name)
    except (OSError, ValueError, RuntimeError) as error:
        raise ReadoutError(f"the base model {name!r} cannot be loaded: {first_line(error)}.") from error
    found = found.to(plain.device).eval().requires_grad_(False)
    own, other = plain.state_dict(), found.state_dict()
    for key in {**own, **other}:
        if not _same(own.get(key), other.get(key)):
            raise ReadoutError(
                f"the base model {name!r} is not the one under the adapter: {key!r} at the checkpoint is another. "
                "Leave base out, and the right one is written beside the adapters."
            )
    return found


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    """Return whether tensors are equal in the wider of their precisions: rounded weights are others."""
    return left is not None and right is not None and left.shape == right.shape and bool((left == right).all())


def _precision(model: Any) -> str:
    """Return the half precision that a model has weights in, or "float32"."""
    held = {parameter.dtype for parameter in model.parameters()}
    return next((name for name in ("bfloat16", "float16") if DTYPES[name] in held), "float32")


def _write_adapter(folder: Path, layers: list[Adapted], parameters: Mapping[str, Tensor], about: Any) -> None:
    """Write one adapter as PEFT does, in float32 at least, with a scale of 1, filled with zeros up to its rank."""
    folder.mkdir(parents=True)
    tensors = {}
    for path, (down, up) in adapter_tensors(layers, parameters).items():
        if not about.rank_pattern:  # else layers have ranks of their own
            down, up = pad(down, (0, 0, 0, about.r - len(down))), pad(up, (0, about.r - up.shape[1]))
        for part, tensor in (("lora_A", down), ("lora_B", up)):
            tensors[f"base_model.model.{path}.{part}.weight"] = tensor.detach().cpu().contiguous()
    write_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    about.save_pretrained(str(folder))


def _configuration(layers: list[Adapted], model: Any, name: str, padded: int | None) -> Any:
    """Return the adapter_config.json of these layers, by their last names, as serving engines prefer."""
    paths = {layer.path for layer in layers}
    last = {path.rsplit(".", 1)[-1] for path in paths}
    targets = last if {path for path, _ in model.named_modules() if path.rsplit(".", 1)[-1] in last} == paths else paths
    rank = padded or max(layer.rank for layer in layers)  # which is what engines make room for
    others = {} if padded else {re.escape(layer.path): layer.rank for layer in layers if layer.rank != rank}
    return import_peft().LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=name,
        inference_mode=True,
        r=rank,
        lora_alpha=rank,  # the scale is alpha / r
        rank_pattern=others,
        alpha_pattern=others,
        lora_dropout=0.0,
        fan_in_fan_out=all(layer.transposed for layer in layers),
        target_modules=sorted(targets),
    )


@contextmanager
def _loaded(export: Export, model: Any, paths: list[str]) -> Iterator[Any]:
    """Load the base adapter and those of `paths` into the plain model, by these names, for a while."""
    peft = import_peft()
    _refuse_layers(export, model)
    for path in (BASE, *paths):
        _refuse_configuration(export, path)
    mode = model.training
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT reports how layers store their weight
            base = str(export.folder / BASE)
            adapted: Any = peft.PeftModel.from_pretrained(model, base, adapter_name=adapter_name(BASE))
            for path in paths:
                adapted.load_adapter(str(export.folder / path), adapter_name=adapter_name(path))
    except (RuntimeError, ValueError, OSError) as error:
        raise StoreError(f"PEFT does not load the adapters of {export.folder}: {first_line(error)}.") from error
    try:
        yield adapted.eval()
    finally:
        adapted.unload()
        model.train(mode)


def _refuse_configuration(export: Export, path: str) -> None:
    """Refuse an adapter whose files the record does not know, or whose configuration has PEFT import a module."""
    files = [f"{path}/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")]
    if missing := [file for file in files if file not in export.files]:
        raise StoreError(f"{export.folder / missing[0]} is not a file of the export: its record does not name it.")
    about = read_json(export.folder / files[0]).mapping()
    wanted = {"peft_type": "LORA", "megatron_config": None, "auto_mapping": None}
    for name, expected in wanted.items():
        if name in about and about[name].content != expected:
            about[name].refuse(f"{expected!r}, as exports have it")


def adapter_name(path: str) -> str:
    """Return the name of an adapter, in PEFT and in a serving engine."""
    return path.rsplit("/", 1)[-1]


def _refuse_layers(export: Export, model: Any) -> None:
    """Refuse a model that lacks an adapted layer, or has it in another shape, or has adapters already."""
    if any(isinstance(module, import_peft().tuners.lora.LoraLayer) for module in model.modules()):
        raise ReadoutError("the model has adapters already: give the plain one, without any (model.unload() for PEFT).")
    for path, (_, width, height) in export.layers.items():
        try:
            weight = model.get_submodule(path).weight
        except AttributeError:
            raise ReadoutError(
                f"the model has no linear layer {path!r}, which the export has adapters for: it is another model, or "
                "not the plain one."
            ) from None
        if sorted(weight.shape) != sorted((width, height)):
            raise ReadoutError(
                f"the adapters of layer {path!r} are for a weight of {height} × {width}, the model's is "
                f"{' × '.join(map(str, weight.shape))}: it is another model."
            )


def _refuse_model(export: Export, adapted: Any) -> None:
    """Refuse a model whose log-likelihoods under the base adapter are not those at the checkpoint."""
    device = adapted.get_input_embeddings().weight.device
    batch = {name: column.to(device) for name, column in export.probe_batch().items()}
    export.refuse_values(_mixed(adapted, [BASE], batch)[0], _precision(adapted))


@torch.no_grad()
def _mixed(adapted: Any, paths: list[str], batch: Batch) -> Tensor:
    """Return the log-likelihoods of a batch under every adapter, (adapters, queries), several in each pass."""
    ids, weights = batch["input_ids"], batch["weights"]
    count = len(ids)
    at_once = max(1, _LOGIT_VALUES // (ids.numel() * adapted.get_input_embeddings().weight.shape[0]))
    blocks = []
    for start in range(0, len(paths), at_once):
        part = [adapter_name(path) for path in paths[start : start + at_once]]
        rows, names = ids.repeat(len(part), 1), [name for name in part for _ in range(count)]
        logits = adapted(input_ids=rows, use_cache=False, adapter_names=names).logits
        values = of_logits(logits, rows, weights.repeat(len(part), 1))
        blocks.append(values.double().cpu().reshape(len(part), count))
    return torch.cat(blocks)

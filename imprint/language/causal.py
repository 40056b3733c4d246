"""The task of a causal language model: the loss of documents, and the log-likelihood of completions."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint.compat import forward_hooks, has_values
from imprint.errors import TaskError
from imprint.language.checkpointing import checkpointing
from imprint.language.data import SEGMENTS, read_columns, segment_sums
from imprint.language.forms import CompletionForm
from imprint.language.head import in_full_precision, log_likelihoods, of_targets, token_log_probs, weighted_sum
from imprint.language.padding import pad_columns
from imprint.language.presets import Preset, adapter_names, blocks, causal, text_config, with_adapter
from imprint.task import Batch, Parameters, Task

logger = logging.getLogger(__name__)

Compute = Literal["bfloat16"] | None
_PROBE = 6  # tokens on which a model shows that it is causal, and what its head is


def task(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    parameters: str | Sequence[str] | None = None,
    regulariser: Callable[[nn.Module], Tensor] | None = None,
    compute: Compute = None,
) -> "LanguageTask":
    """Make the task of a causal language model of transformers, or of one with a PEFT adapter.

    Its examples are the windows of `Documents`, or what a Trainer of transformers learns from (`input_ids`, `labels`):
    the loss of one is Σ_t weight_t · (−log p(token_t | tokens before)), where tokens with a label have weight 1.
    Its queries are `Completions`: what is measured is the log-likelihood of the completion, in nats.

    tokenizer: where given, one that is not the model's is refused here and not in the middle of a simulation, and
        exports for serving engines contain it.
    parameters: what carries the imprint. None: everything that is trainable; of a model with an adapter, the adapter.
        "last:K": the last K blocks. "lora:R", "lora:R:last:K": an adapter on all or the last K blocks, with R numbers
        for each input of the layers that lead out of their wide inside (`language.presets`), made for this task in a
        twin of the model that shares its weights. Or globs of names.
    regulariser: r(model) -> scalar, as of any task; with "lora:R" it is given the twin.
    compute: "bfloat16" evaluates the model in half precision; parameters and imprints stay as they are.

    An adapter that was loaded for inference has `requires_grad` set on its parameters, and keeps it.
    """
    _refuse_model(model)
    _refuse_tokenizer(model, tokenizer)
    preset, under = Preset.read(parameters) if isinstance(parameters, str) else None, None
    if preset is not None and preset.per_input is not None:
        under = model
        model, adapter = with_adapter(model, preset.per_input, preset.last)
        globs = [name for name in adapter_names(model) if ".lora_B." in name]
    else:
        adapter = None
        for name in adapter_names(model):
            model.get_parameter(name).requires_grad_()
        globs = _globs(model, parameters)
    return LanguageTask(
        model, globs, adapter=adapter, under=under, regulariser=regulariser, compute=compute, tokenizer=tokenizer
    )


class LanguageTask(Task):
    """A `Task` on batches of tokens and weights; `language.task` makes it.

    adapter: the configuration of the adapter that was made for it by "lora:R", else None.
    under: the model that the adapter was made for, as the user gave it.
    tokenizer: the model's, where it was given: exports for serving engines write it beside the model.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[str],
        *,
        adapter: Any,
        under: nn.Module | None = None,
        regulariser: Callable[[nn.Module], Tensor] | None,
        compute: Compute,
        tokenizer: Any = None,
    ) -> None:
        if compute not in (None, "bfloat16"):
            raise TaskError(f'compute is None or "bfloat16", got {compute!r}.')
        self.adapter, self.tokenizer, self.compute = adapter, tokenizer, compute
        self._under, self._adapter_names = under, adapter_names(model)
        if adapter is None and self._adapter_names:
            self.fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        self._vocabulary = causal(model).get_input_embeddings().weight.shape[0]
        self._context = getattr(text_config(model), "max_position_embeddings", None)
        super().__init__(
            model,
            outputs=self._logits_before,
            output_loss=_weighted_loss,
            measure=self._log_likelihood,
            regulariser=regulariser,
            parameters=parameters,
        )
        self.measure_name, self.better, self.repeating = "log-likelihood", "higher", self.measure
        self.form = None if tokenizer is None else CompletionForm(tokenizer, self._context)
        self._contracts = self._probe()

    @cached_property
    def plain(self) -> "LanguageTask":
        """The task of the model without the adapter that "lora:R" made, which retraining trains and measures."""
        if self._under is None or not any(parameter.requires_grad for parameter in self._under.parameters()):
            return self
        return LanguageTask(
            self._under, ["*"], adapter=None, regulariser=None, compute=self.compute, tokenizer=self.tokenizer
        )

    def complete(self, state: Mapping[str, Tensor]) -> Parameters:
        """Return a checkpoint as a complete state; for models with adapters it need not hold everything.

        With an adapter made by "lora:R", a state of the plain model will do. With an adapter of the model's own, its
        tensors will do, as peft writes them, and those of what else is trainable: frozen ones are taken as they are.
        """
        if self._adapter_names:
            state = self._fill_in(dict(state))
        return super().complete(state)

    def _fill_in(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        own = self.tensors()
        for name in own:
            written = self._adapter_names.get(name, name.replace(".base_layer.", "."))
            if name not in state and written in state:
                state[name] = state.pop(written)
        adapter = {name: own[name] for name in self._adapter_names}
        lacking = [name for name in adapter if name not in state]
        if self.adapter is not None and len(lacking) == len(adapter):
            fresh = {name: torch.zeros_like(t) if name in self.names else t for name, t in adapter.items()}
            return {**fresh, **state}
        if lacking:
            some = ", ".join(lacking[:3]) + ", …" * (len(lacking) > 3)
            count = f"{len(lacking)} of the adapter's {len(adapter)} tensors"
            raise TaskError(f"a checkpoint does not fit the model: it lacks {count}: {some}.")
        if self.adapter is None:
            trainable = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
            return {**{name: t for name, t in own.items() if name not in trainable}, **state}
        return state

    @contextmanager
    def prepare(self, model: nn.Module) -> Iterator[None]:
        """Compute attention step by step, and recompute blocks if the model has gradient checkpointing on.

        Fused attention has no forward mode, and torch's own fallback takes no autocast under `vmap`.
        """
        with ExitStack() as stack:
            stack.enter_context(_eager_attention(model))
            stack.enter_context(_without_input_hooks(model))
            if getattr(causal(model), "is_gradient_checkpointing", False):
                stack.enter_context(checkpointing([block for _, block in blocks(model)]))
            yield

    def _precision(self) -> Any:
        if self.compute is None:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)  # cached casts outlive transforms

    def _logits_before(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the logits of each token but the first from those before it, (n, length − 1, vocabulary).

        The attention mask of a Trainer's batch says nothing new (`read_columns`), but in training mode, where a run
        is repeated, it may decide which kernel computes attention and draws its dropout.
        """
        ids, _ = self._read(batch)
        mask = batch.get("attention_mask") if model.training else None
        with self._precision():
            return in_full_precision(_logits(model, ids, mask)[:, :-1])

    def _log_likelihood(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return Σ_t weight_t · log p(token_t | tokens before), (n,)."""
        ids, weights = self._read(batch)
        if not self._contracts or SEGMENTS in batch:
            return -_weighted_loss(self._logits_before(model, batch), batch)
        first, last = _counted(weights)  # what comes after the last changes nothing before it
        with self._precision():
            hidden, head = _hidden(model, ids[:, :last])[:, first - 1 : -1], causal(model).get_output_embeddings()
            return log_likelihoods(hidden, head.weight, head.bias, ids[:, first:last], weights[:, first:last])

    def token_log_probs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return log p of each token from those before it, (n, length); 0 outside the tokens that count."""
        ids, weights = self._read(batch)
        first, last = _counted(weights)
        targets = ids[:, first:last]
        with self._precision():
            if self._contracts:
                hidden, head = _hidden(model, ids[:, :last])[:, first - 1 : -1], causal(model).get_output_embeddings()
                each = token_log_probs(hidden, head.weight, head.bias, targets)
            else:
                logits = in_full_precision(_logits(model, ids[:, :last])[:, first - 1 : -1])
                each = of_targets(logits.log_softmax(-1), targets)
        return F.pad(each, (first, ids.shape[1] - last))

    def _read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the columns of a batch, once they are known to fit the model."""
        ids, weights = read_columns(batch)
        length = ids.shape[-1]
        if self._context is not None and length > self._context:
            raise TaskError(
                f"rows of {length} tokens are {length - self._context} more than the model's context of "
                f"{self._context}: give length={self._context} to Documents or Completions."
            )
        if has_values(ids):
            highest = int(ids.max())
            if highest >= self._vocabulary:
                raise TaskError(
                    f"a token is {highest}, and the model knows tokens below {self._vocabulary}: the texts were "
                    "made with another tokenizer than the model's?"
                )
        return ids, weights

    def check_batch(self, batch: Batch) -> None:
        """Refuse columns that do not fit the model, or each other."""
        self._read(batch)

    def count_terms(self, batch: Batch) -> float:
        """Add up the weights of the tokens that are predicted: all but the first."""
        return float(self._read(batch)[1][:, 1:].sum())

    def pad_batch(self, batch: Batch) -> Batch:
        """Pad queries on the right, with weight 0, to one of few lengths: a causal model does not look ahead."""
        return pad_columns(batch, self._context)

    def _probe(self) -> bool:
        """Refuse a model that looks ahead; return whether its head is a matrix that can be contracted."""
        length = min(_PROBE, self._context or _PROBE)
        ids = torch.arange(1, length + 1, device=self.device).remainder(self._vocabulary).unsqueeze(0)  # 0 often pads
        with torch.no_grad(), self.evaluating():
            model = self.replica
            found = _logits(model, ids)
            if found.dim() != 3 or found.shape[:2] != ids.shape:
                raise TaskError(
                    f"{type(causal(self.model)).__name__} gives outputs of shape {tuple(found.shape)} for tokens of "
                    f"shape {tuple(ids.shape)}, not logits for each of them: a causal language model is needed."
                )
            if _looks_ahead(model, ids):
                raise TaskError(
                    f"{type(causal(self.model)).__name__} looks ahead: what it says of a token changes with the tokens "
                    "after it. A causal language model is needed, not a masked one."
                )
            reason = _why_not_contracted(model, ids)
        if reason:
            logger.warning("the output head is computed for every source, because %s", reason)
        return reason is None


def _globs(model: nn.Module, parameters: str | Sequence[str] | None) -> list[str]:
    """Return the chosen parameters as globs of the names of the model's own parameters."""
    if parameters is None:
        adapter = adapter_names(model)
        beside = [name for name, p in model.named_parameters() if p.requires_grad and name not in adapter]
        if adapter and beside:
            logger.warning(
                "%d trainable parameters beside the adapter carry no imprint, such as %s: "
                'parameters="*" takes everything that is trainable',
                *(len(beside), beside[0]),
            )
        return list(adapter) or ["*"]
    globs = []
    for glob in [parameters] if isinstance(parameters, str) else parameters:
        preset = Preset.read(glob)
        if preset is None:
            globs.append(glob)
        elif preset.per_input is not None:
            raise TaskError(f"parameters={glob!r} stands alone: an adapter carries the whole imprint.")
        else:
            globs += [f"{name}.*" for name, _ in blocks(model, preset.last)]
    return globs


def _counted(weights: Tensor) -> tuple[int, int]:
    """Return where tokens begin and end to count in any row; the first, which nothing predicts, never does."""
    if not has_values(weights):
        return 1, weights.shape[1]
    columns = weights[:, 1:].any(0).nonzero().flatten() + 1
    return (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (1, weights.shape[1])


def _weighted_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return Σ_t weight_t · (−log p(token_t)), (n,), from the logits before each token but the first."""
    ids, weights = (column[:, 1:] for column in read_columns(batch))
    each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
    if SEGMENTS in batch:  # packed rows, in which several examples have their tokens
        return segment_sums(weights.to(each.dtype) * each, batch)
    return weighted_sum(each, weights)


def _logits(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    masked = {} if mask is None else {"attention_mask": mask}
    found: Tensor | None = getattr(model(input_ids=ids, use_cache=False, **masked), "logits", None)
    if found is None:
        raise TaskError(
            f"{type(causal(model)).__name__} gives no logits: a model with a language-model head is needed, as "
            "AutoModelForCausalLM makes it."
        )
    return found


def _hidden(model: nn.Module, ids: Tensor) -> Tensor:
    """Return what the output head is applied to, (n, length, width)."""
    found: Tensor = causal(model).base_model(input_ids=ids, use_cache=False)[0]
    return found


def _looks_ahead(model: nn.Module, ids: Tensor) -> bool:
    """Return whether predictions have a derivative by a later token; in a causal model it is 0, however it rounds."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
        seen.append(embedded.detach().requires_grad_())
        return seen[-1]

    with torch.enable_grad(), causal(model).get_input_embeddings().register_forward_hook(hook):
        said = of_targets(_logits(model, ids)[:, :-1], ids[:, 1:]).sum()
        slopes = torch.autograd.grad(said, seen)
    return any(bool(slope[:, -1].nan_to_num().any()) for slope in slopes)  # 0 · ∞ says nothing


def _why_not_contracted(model: nn.Module, ids: Tensor) -> str | None:
    """Return why the head must run as the model runs it; None where it is its weight times the hidden states."""
    head = causal(model).get_output_embeddings()
    if type(head) is not nn.Linear:
        return "it has an adapter" if adapter_names(head) else f"it is a {type(head).__name__}"
    if causal(model).base_model is causal(model):
        return "the model has no part without it"
    calls: list[tuple[Tensor, Tensor]] = []
    with head.register_forward_hook(lambda module, given, output: calls.append((given[0], output))):
        logits = _logits(model, ids)
    if len(calls) != 1 or not _close(_hidden(model, ids), calls[0][0]):
        return "the hidden states before it are not those of the tokens"
    if not torch.equal(calls[0][1].to(logits.dtype), logits):  # to the bit: capping can be as small as rounding
        return "the model does more to the logits than a matrix"
    return None


def _close(left: Tensor, right: Tensor) -> bool:
    """Return whether tensors are equal up to the rounding of their dtype."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool((left - right).abs().max() <= 4 * torch.finfo(left.dtype).eps * right.abs().max())


@contextmanager
def _eager_attention(model: nn.Module) -> Iterator[None]:
    """Compute attention step by step for a while, in every part of a transformers model."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    before = {
        key: config._attn_implementation for key, config in found.items() if hasattr(config, "_attn_implementation")
    }
    try:
        for key in before:
            found[key]._attn_implementation = "eager"
        yield
    finally:
        for key, implementation in before.items():
            found[key]._attn_implementation = implementation


@contextmanager
def _without_input_hooks(model: nn.Module) -> Iterator[None]:
    """Remove, for a while, the hooks that make embeddings require gradients: torch.func refuses to run them."""
    removed: list[tuple[Any, int, Any]] = []
    for module in model.modules():
        hooks = forward_hooks(module)
        for key, hook in list(hooks.items()):
            if getattr(hook, "__name__", "").startswith("make_inputs_require_grad"):
                removed.append((hooks, key, hooks.pop(key)))
    try:
        yield
    finally:
        for hooks, key, hook in removed:
            hooks[key] = hook


def _refuse_model(model: object) -> None:
    inner = causal(model) if isinstance(model, nn.Module) else None
    if inner is None or not hasattr(inner, "config") or not hasattr(inner, "get_output_embeddings"):
        raise TaskError(
            f"language.task takes a causal language model of transformers, or one with a PEFT adapter, got a "
            f"{type(model).__name__}: for other models write an imprint.Task."
        )
    if getattr(inner.config, "is_encoder_decoder", False):
        raise TaskError(f"{type(inner).__name__} has an encoder and a decoder: a causal language model is needed.")


def _refuse_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Refuse another model's tokenizer; tokens added to the right one, such as one for padding, are fine."""
    known, rows = getattr(tokenizer, "vocab_size", 0), causal(model).get_input_embeddings().weight.shape[0]
    if known > rows:
        raise TaskError(
            f"the tokenizer has {known} tokens and the model knows {rows}: is it another model's tokenizer?"
        )

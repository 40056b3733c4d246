"""Log-probabilities of tokens, with the output head contracted once per query and not once per source.

Of a token y the derivative of log p(y) = z_y − log Σ_v exp z_v, with logits z = W h + b, is

    (e_y − p)ᵀ (W dh + dW h + db)  =  (W_y − Σ_v p_v W_v)·dh + (e_y − p)ᵀ (dW h + db).

The bracket before dh does not depend on the direction, so that in forward mode with many sources the vocabulary is met
twice per query, however many sources there are. `unpack_dual` and `make_dual` write this derivative down; everything
else about these functions is differentiated as it stands, in any mode and order.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn import functional as F


class _Head(NamedTuple):
    """The values of an output head's inputs, their forward-mode tangents where they have them, and what follows."""

    hidden: Tensor  # (n, length, width)
    weight: Tensor  # (vocabulary, width)
    along_hidden: Tensor | None
    along_weight: Tensor | None
    along_bias: Tensor | None
    targets: Tensor
    log_probs: Tensor  # of the targets, (n, length)
    probs: Tensor  # of every token, (n, length, vocabulary)

    @property
    def moves(self) -> bool:
        """Whether a forward-mode derivative is being taken."""
        return any(t is not None for t in (self.along_hidden, self.along_weight, self.along_bias))

    def through_hidden(self) -> Tensor:
        """Return the part of d log p(y) that hidden states contribute, (W_y − Σ_v p_v W_v)·dh, (n, length)."""
        if self.along_hidden is None:
            return torch.zeros_like(self.log_probs)
        weight = self.weight.to(self.hidden.dtype)
        slope = F.embedding(self.targets, weight) - self.probs.to(weight.dtype) @ weight  # (n, length, width)
        return (slope * self.along_hidden).sum(-1).to(self.log_probs.dtype)


def of_targets(of_each: Tensor, targets: Tensor) -> Tensor:
    """Return the value of the target in the last dimension."""
    return of_each.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def weighted_sum(of_each: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_t w_t times the value of each token, (n,), in the precision of the values."""
    total: Tensor = (weights.to(of_each.dtype) * of_each).sum(-1)
    return total


def in_full_precision(logits: Tensor) -> Tensor:
    """Return logits as float32 or wider: a log-likelihood in half precision is mostly rounding."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _evaluated(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> _Head:
    hidden, along_hidden = unpack_dual(hidden)
    weight, along_weight = unpack_dual(weight)
    bias, along_bias = unpack_dual(bias) if bias is not None else (None, None)
    everything = in_full_precision(F.linear(hidden, weight, bias)).log_softmax(-1)
    return _Head(
        *(hidden, weight, along_hidden, along_weight, along_bias, targets),
        log_probs=of_targets(everything, targets),
        probs=everything.exp(),
    )


def token_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Return log p of each target, (n, length), from the hidden states before it and the head's weight and bias."""
    head = _evaluated(hidden, weight, bias, targets)
    if not head.moves:
        return head.log_probs
    along = head.through_hidden()
    if head.along_weight is not None:
        logits = F.linear(head.hidden, head.along_weight).to(along.dtype)
        along = along + of_targets(logits, targets) - (head.probs * logits).sum(-1)
    if head.along_bias is not None:
        shift = head.along_bias.to(along.dtype)
        along = along + shift[targets] - head.probs @ shift
    dual: Tensor = make_dual(head.log_probs, along)
    return dual


def log_likelihoods(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_t w_t log p of the targets, (n,); the head's own tangents are contracted over the tokens first."""
    head = _evaluated(hidden, weight, bias, targets)
    total = weighted_sum(head.log_probs, weights)
    if not head.moves:
        return total
    along = weighted_sum(head.through_hidden(), weights)
    if head.along_weight is not None or head.along_bias is not None:
        right = F.one_hot(targets, len(head.weight)).to(head.probs)
        residual = weights.to(right.dtype).unsqueeze(-1) * (right - head.probs)  # w_t (e_y − p_t)
        if head.along_weight is not None:
            outer = residual.transpose(1, 2) @ head.hidden.to(residual.dtype)  # (n, vocabulary, width)
            along = along + outer.flatten(1) @ head.along_weight.to(residual.dtype).flatten()
        if head.along_bias is not None:
            along = along + residual.sum(1) @ head.along_bias.to(residual.dtype)
    dual: Tensor = make_dual(total, along)
    return dual

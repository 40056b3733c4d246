"""The models of the zoo that take more than a line to build."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x).tanh()
        out: Tensor = self.block(h)
        out += h
        return self.last(out)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Predicts a token from the one before it; the output head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(tokens)).tanh())  # type: ignore[no-any-return]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # GELU, since the layer's default is ReLU; dropout, since evaluation mode must turn it off
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.5, activation="gelu", batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """One causal attention block over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(5, 4), nn.Embedding(3, 4)
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens) + self.places(torch.arange(tokens.shape[-1], device=tokens.device))
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(-3, -2) for part in self.qkv(self.norm(h)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + self.out(mixed.transpose(-3, -2).flatten(-2)))  # type: ignore[no-any-return]


class Tempered(nn.Module):
    """A classifier with a temperature, which is a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.last = nn.Parameter(torch.tensor(1.5)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) / self.temperature  # type: ignore[no-any-return]


class MeanOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = (self.embedding(tokens) * mask.unsqueeze(-1)).sum(-2) / mask.sum(-1, keepdim=True)
        return self.head(h.tanh())  # type: ignore[no-any-return]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x).tanh()
        if h.detach().abs().max().item() > 2:  # never, but only a number can tell
            h = h / 2
        return self.last(h)  # type: ignore[no-any-return]


class Preallocating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), 3)
        out[:, :2] = self.last(self.first(x).tanh())[:, :2]
        out[:, 2] = 0
        return out


class Noisy(nn.Module):
    """The same noise in every call, from a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(5, generator=torch.Generator().manual_seed(7))
        return self.last(self.first(x).tanh() * noise.to(x))  # type: ignore[no-any-return]


class _Cubed(torch.autograd.Function):
    """x³ with a backward rule and no other."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 3 * x**2  # type: ignore[no-any-return]


class WithoutForwardMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Cubed.apply(self.first(x)))  # type: ignore[no-any-return, no-untyped-call]

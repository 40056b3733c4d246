"""Modules of every kind that users have: right scores, or a plain word why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.attacks.cases import CLASSES, QUERIES, WIDTH, Case, N, Table, columns, cross_entropy, judge, mlp, register
from tests.attacks.test_misused_models import TRAJECTORIES, Around, weight

KINDS: Table = {}
attack = register(KINDS)
LENGTH, WORDS = 4, 6


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_no_kind_of_module_is_silently_misread(name: str) -> None:
    judge(KINDS[name])


def sentences(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, WORDS, (n, LENGTH), generator=generator),
        torch.randint(0, CLASSES, (n,), generator=generator),
    )


class Reading(nn.Module):
    """Words, something over them, and a head on their mean."""

    def __init__(self, words: nn.Module, over: Callable[[Any, Tensor], Tensor], **modules: Any) -> None:
        super().__init__()
        self.words, self.over = words.double(), over
        self.head = nn.Linear(4, CLASSES).double()
        for name, module in modules.items():
            setattr(self, name, module.double() if isinstance(module, nn.Module) else module)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.over(self, self.words(x)))
        return out


def reading(words: nn.Module, over: Any = lambda self, h: h.mean(1).tanh(), **modules: Any) -> Case:
    return Case(Reading(words, over, **modules), data=sentences(N, 1), queries=sentences(QUERIES, 2))


def by_trajectories(case: Case) -> Case:
    case.plan = TRAJECTORIES
    return case


@attack("works")
def an_embedding() -> Case:
    return reading(nn.Embedding(WORDS, 4))


@attack("works")
def an_embedding_with_padding() -> Case:
    return reading(nn.Embedding(WORDS, 4, padding_idx=0))


@attack("honest", "norm|in place|chang|gradient")
def an_embedding_that_renormalises_itself() -> Case:
    """`max_norm` rewrites the weights in the forward."""
    return reading(nn.Embedding(WORDS, 4, max_norm=0.5))


@attack("honest", "norm|in place|chang|gradient")
def an_embedding_that_renormalises_itself_by_trajectories() -> Case:
    return by_trajectories(reading(nn.Embedding(WORDS, 4, max_norm=0.5)))


@attack("honest", "sparse")
def an_embedding_with_sparse_gradients() -> Case:
    return reading(nn.Embedding(WORDS, 4, sparse=True))


@attack("honest", "sparse")
def an_embedding_with_sparse_gradients_by_trajectories() -> Case:
    return by_trajectories(reading(nn.Embedding(WORDS, 4, sparse=True)))


@attack("speaks", "freq|batch|alone|depend|gradient")
def an_embedding_scaled_by_the_frequencies_of_the_batch() -> Case:
    return reading(nn.Embedding(WORDS, 4, scale_grad_by_freq=True))


@attack("works")
def a_bag_of_words_by_trajectories() -> Case:
    return by_trajectories(reading(nn.EmbeddingBag(WORDS, 4, mode="sum"), lambda self, h: h.tanh()))


@attack("honest")
def a_bag_of_words_by_mean() -> Case:
    return reading(nn.EmbeddingBag(WORDS, 4, mode="mean"), lambda self, h: h.tanh())


@attack("honest")
def a_bag_of_words_by_maximum() -> Case:
    return reading(nn.EmbeddingBag(WORDS, 4, mode="max"), lambda self, h: h.tanh())


@attack("works")
def words_tied_to_the_head() -> Case:
    model = Reading(nn.Embedding(WORDS, 4), lambda self, h: h.mean(1).tanh())
    model.head = nn.Linear(4, WORDS, bias=False).double()
    model.head.weight = model.words.weight  # type: ignore[assignment]
    return Case(model, data=sentences(N, 1), queries=sentences(QUERIES, 2))


@attack("honest")
def a_recurrent_network() -> Case:
    cell = nn.RNN(4, 4, batch_first=True)
    return reading(nn.Embedding(WORDS, 4), lambda self, h: self.cell(h)[0][:, -1], cell=cell)


@attack("honest")
def a_long_short_term_memory() -> Case:
    cell = nn.LSTM(4, 4, batch_first=True)
    return reading(nn.Embedding(WORDS, 4), lambda self, h: self.cell(h)[0][:, -1], cell=cell)


@attack("honest")
def a_gated_unit_in_both_directions() -> Case:
    cell = nn.GRU(4, 2, batch_first=True, bidirectional=True)
    return reading(nn.Embedding(WORDS, 4), lambda self, h: self.cell(h)[0].mean(1), cell=cell)


@attack("works")
def a_recurrent_network_by_trajectories() -> Case:
    cell = nn.LSTM(4, 4, num_layers=2, batch_first=True)
    over = lambda self, h: self.cell(h)[0][:, -1]  # noqa: E731
    return by_trajectories(reading(nn.Embedding(WORDS, 4), over, cell=cell))


@attack("works")
def a_cell_in_a_loop() -> Case:
    def over(self: Any, h: Tensor) -> Tensor:
        state = h.new_zeros(len(h), 4)
        for t in range(LENGTH):
            state = self.cell(h[:, t], state)
        return state

    return reading(nn.Embedding(WORDS, 4), over, cell=nn.GRUCell(4, 4))


@attack("works")
def attention_over_words() -> Case:
    mix = nn.MultiheadAttention(4, 2, batch_first=True)
    return reading(nn.Embedding(WORDS, 4), lambda self, h: self.mix(h, h, h)[0].mean(1), mix=mix)


@attack("works")
def a_layer_of_a_transformer() -> Case:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, activation="gelu", batch_first=True)
    return reading(nn.Embedding(WORDS, 4), lambda self, h: self.layer(h).mean(1), layer=layer)


@attack("works")
def a_transformer_in_training_mode() -> Case:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, activation="gelu", batch_first=True)
    case = reading(nn.Embedding(WORDS, 4), lambda self, h: self.layer(h).mean(1), layer=layer)
    case.model.train()
    return case


@attack("works")
def causal_attention() -> Case:
    return reading(
        nn.Embedding(WORDS, 4),
        lambda self, h: F.scaled_dot_product_attention(h, self.keys(h), h, is_causal=True).mean(1),
        keys=nn.Linear(4, 4),
    )


# --- pictures


def pictures(layers: nn.Module) -> Case:
    def shaped(n: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 1, 4, 4, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, CLASSES, (n,), generator=generator)

    model = nn.Sequential(layers, nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    model(shaped(2, 0)[0])
    return Case(model.double(), data=shaped(N, 1), queries=shaped(QUERIES, 2))


@attack("works")
def a_convolution() -> Case:
    return pictures(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)))


@attack("works")
def a_convolution_with_batch_norm() -> Case:
    return pictures(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh()))


@attack("works")
def a_transposed_convolution() -> Case:
    return pictures(nn.Sequential(nn.ConvTranspose2d(1, 2, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(2)))


@attack("works")
def a_convolution_by_channels() -> Case:
    return pictures(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 3, groups=2), nn.SiLU()))


@attack("works")
def an_upsampling() -> Case:
    return pictures(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.GELU()))


@attack("works")
def channels_that_come_last_in_memory() -> Case:
    case = pictures(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh()))
    case.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return case


@attack("works")
def pictures_pooled_by_maximum() -> Case:
    return pictures(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Softplus()))


# --- layers of other kinds


def between(**modules: Any) -> Case:
    """A case with one module between body and head."""
    ((name, module),) = modules.items()
    module = module.double() if isinstance(module, nn.Module) else module
    return Case(Around(lambda self, h: self.head(getattr(self, name)(h)), **{name: module}))


@attack("works")
def dropout_of_everything() -> Case:
    return between(dropout=nn.Dropout(1.0))


@attack("works")
def alpha_dropout() -> Case:
    return between(dropout=nn.AlphaDropout(0.5))


@attack("works")
def randomised_slopes() -> Case:
    return between(act=nn.RReLU())


@attack("works")
def slopes_that_are_learned() -> Case:
    return between(act=nn.PReLU(4))


@attack("works")
def an_activation_in_place() -> Case:
    return between(act=nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)))


@attack("honest")
def a_bilinear_layer() -> Case:
    return Case(Around(lambda self, h: self.mix(h, h), mix=nn.Bilinear(4, 4, CLASSES).double()))


@attack("honest")
def an_adaptive_softmax() -> Case:
    model = Around(lambda self, h: self.soft.log_prob(h))
    model.soft = nn.AdaptiveLogSoftmaxWithLoss(4, CLASSES, cutoffs=[1], div_value=1.0).double()
    return Case(model)


@attack("works")
def a_frozen_body() -> Case:
    model = mlp()
    model[0].requires_grad_(False)
    return Case(model)


@attack("works")
def a_frozen_head() -> Case:
    model = mlp()
    model[2].requires_grad_(False)
    return Case(model)


@attack("works")
def one_frozen_bias() -> Case:
    model = mlp()
    model[0].bias.requires_grad_(False)
    return Case(model)


@attack("honest", "gradient|unused|zero")
def a_layer_that_is_never_used() -> Case:
    return Case(Around(lambda self, h: self.head(h), spare=nn.Linear(4, 4).double()))


@attack("honest", "gradient|unused|zero")
def a_parameter_without_elements() -> Case:
    return Case(Around(lambda self, h: self.head(h), empty=nn.Parameter(torch.zeros(0, 4).double())))


@attack("works")
def a_parameter_that_is_a_number() -> Case:
    scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    return Case(Around(lambda self, h: self.head(h * self.scale), scale=scale))


@attack("works")
def modules_in_different_modes() -> Case:
    model = Around(lambda self, h: self.head(self.dropout(h)), dropout=nn.Dropout(0.5))
    model.eval()
    model.dropout.train()  # type: ignore[union-attr]
    return Case(model)


@attack("works")
def a_model_that_returns_a_dictionary() -> Case:
    class Named(Around):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x), "loss": None}

    return Case(
        Named(lambda self, h: self.head(h)),
        lambda model, batch: F.cross_entropy(model(batch[0])["logits"], batch[1], reduction="none"),
    )


@attack("works")
def a_dtype_for_each_layer() -> Case:
    model = Around(lambda self, h: self.head(h.float()).double())
    model.head.float()
    return Case(model)


@attack("honest")
def checkpointed_activations() -> Case:
    return Case(Around(lambda self, h: self.head(checkpoint(torch.tanh, h, use_reentrant=False))))


@attack("honest")
def checkpointed_activations_of_old() -> Case:
    return Case(Around(lambda self, h: self.head(checkpoint(torch.tanh, h, use_reentrant=True))))


@attack("honest")
def checkpointed_layers_by_trajectories() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.head, h, use_reentrant=False)
        return out

    return Case(Around(last), plan=TRAJECTORIES)


@attack("honest")
def an_energy_and_its_gradient() -> Case:
    """The prediction is the gradient of an energy, as in models of molecules."""

    def last(self: Any, h: Tensor) -> Tensor:
        with torch.enable_grad():
            z = self.head(h)
            force: Tensor = torch.autograd.grad((z.tanh().square()).sum(), z, create_graph=True)[0]
        return force

    return Case(Around(last))


@attack("honest")
def a_linear_solve() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        out: Tensor = torch.linalg.solve(self.square @ self.square.T + torch.eye(4), h.T).T
        return self.head(out)  # type: ignore[no-any-return]

    return Case(Around(last, square=nn.Parameter(weight(4, 4))))


@attack("honest")
def a_decomposition() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        basis = torch.linalg.qr(self.square)[0]
        return self.head(h @ basis)  # type: ignore[no-any-return]

    return Case(Around(last, square=nn.Parameter(weight(4, 4))))


@attack("honest")
def a_spectrum() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        out: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(h * self.window), 4))
        return out

    return Case(Around(last, window=nn.Parameter(weight(4))))


@attack("honest")
def a_loss_by_alignment() -> Case:
    """Connectionist temporal classification has no second derivative."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0]).log_softmax(-1).unsqueeze(0).repeat(3, 1, 1)
        n = len(batch[0])
        targets = 1 + batch[1].unsqueeze(1) % 2
        lengths = torch.full((n,), 3), torch.full((n,), 1)
        return F.ctc_loss(z, targets, *lengths, reduction="none")

    return Case(mlp(), loss)


@attack("works")
def half_the_squared_error() -> Case:
    x, _ = columns()
    asked, _ = columns(QUERIES, 2)
    loss = lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square() / 2  # noqa: E731
    return Case(mlp(), loss, data=(x, x.sum(1)), queries=(asked, asked.sum(1)))


@attack("works")
def a_regulariser() -> Case:
    def decay(model: nn.Module) -> Tensor:
        return 0.05 * torch.stack([p.square().sum() for p in model.parameters()]).sum()

    return Case(mlp(), task={"regulariser": decay})


@attack("honest", "regulariser|random|differ|twice")
def a_random_regulariser() -> Case:
    return Case(mlp(), task={"regulariser": lambda model: model[0].weight.square().sum() * torch.rand(())}, truth=False)


@attack("works")
def a_wide_input_that_is_not_used() -> Case:
    model = Around(lambda self, h: self.head(h))
    loss = lambda model, batch: cross_entropy(model, (batch[0][:, :WIDTH], batch[1]))  # noqa: E731
    x, y = columns()
    asked, right = columns(QUERIES, 2)

    def wide(t: Tensor) -> Tensor:
        return torch.cat([t, torch.full_like(t, torch.nan)], 1)

    return Case(model, loss, data=(wide(x), y), queries=(wide(asked), right))

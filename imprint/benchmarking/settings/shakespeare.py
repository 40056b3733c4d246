"""Loads tiny Shakespeare: 24 segments of the text as sources, held-out passages of each, a small GPT-2 for the rest.

Names of speakers are removed, because they would reveal which segment a passage comes from. The vocabulary of byte
pairs is learnt from the text: windows of as many characters would hold a third of the words at the same cost. F is the
log-likelihood of a held-out passage per token.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from imprint.benchmarking.settings.download import fetch
from imprint.data import Data
from imprint.errors import DataError, MissingExtra
from imprint.evaluation.together import Together
from imprint.evaluation.training import Training
from imprint.language.causal import Compute, task
from imprint.sources import Sources

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NAME = "shakespeare/tinyshakespeare.txt"
_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SEGMENTS = 24
Columns = dict[str, Tensor]
"""`input_ids` and `weights`, each (windows, length): the weight of predicting each token, 0 for the first."""


@dataclass(frozen=True)
class Size:
    """How large the experiment is.

    length: the tokens in a window or passage.
    windows: how many windows of each segment are used, from its beginning; None for all.
    passages: how many windows of each segment are held out.
    steps: the training steps after which checkpoints are kept.
    """

    vocabulary: int
    length: int
    windows: int | None
    passages: int
    layers: int
    width: int
    heads: int
    dropout: float
    training: Training
    steps: tuple[int, ...]

    def build(self) -> nn.Module:
        """Build a freshly initialised GPT-2 with plain attention, which supports all derivatives."""
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise MissingExtra("the Shakespeare setting", "language") from error
        options: dict[str, Any] = {
            **{"vocab_size": self.vocabulary, "n_positions": self.length},
            **{"n_embd": self.width, "n_layer": self.layers, "n_head": self.heads},
            "activation_function": "gelu_pytorch_tanh",  # the same function as one operation instead of eight
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout),
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
            **{"use_cache": False, "attn_implementation": "eager"},
        }
        gpt2: Callable[[GPT2Config], nn.Module] = GPT2LMHeadModel
        return gpt2(GPT2Config(**options))

    def together(
        self,
        columns: Columns,
        device: torch.device | str = "cpu",
        *,
        at_once: int | None = None,
        compute: Compute = None,
    ) -> Together:
        """Return what trains many of these models at once."""
        windows = Data(columns, device=torch.device(device))
        return Together(self.build, partial(task, compute=compute), windows, self.training, at_once)


FULL = Size(
    vocabulary=1024,
    length=128,
    windows=None,
    passages=10,
    layers=4,
    width=256,
    heads=4,
    dropout=0.2,
    training=Training(
        epochs=16,
        lr=1.5e-3,
        batch_size=32,
        optimiser="adamw",
        betas=(0.9, 0.99),
        weight_decay=0.01,
        schedule="cosine",
        warmup=50,
        drop_last=True,
    ),
    steps=(200, 330, 530),
)
SMALL = Size(
    vocabulary=256,
    length=32,
    windows=20,
    passages=2,
    layers=2,
    width=32,
    heads=2,
    dropout=0.1,
    training=Training(epochs=3, lr=3e-3, batch_size=16, optimiser="adamw", weight_decay=0.01, drop_last=True),
    steps=(10, 30, 81),
)


@dataclass(frozen=True)
class Windows:
    """The text split into segments, windows and passages.

    train, queries: windows to train on, and held-out passages; a window's loss is the mean over its tokens.
    owners, origins: the segment of each window, and of each passage.
    texts, passages: the training text of each segment, and the held-out passages, as strings.
    """

    train: Columns
    queries: Columns
    owners: Tensor
    origins: Tensor
    texts: tuple[str, ...]
    passages: tuple[str, ...]

    @property
    def sources(self) -> Sources:
        """The segments as sources."""
        return Sources.by_label(self.owners, names={index: f"segment {index + 1}" for index in range(SEGMENTS)})


@dataclass(frozen=True)
class Shakespeare(Windows):
    """The text in byte pairs, with their tokenizer."""

    tokenizer: "Tokenizer"


def load(size: Size = FULL, where: float = 0.5) -> Shakespeare:
    """Load the text as windows of each segment, with some windows held out at even distances.

    where: the position of a held-out window within its stretch, from 0 to 1; other values give other passages.
    """
    text = read_speeches()
    tokenizer = _learn_tokenizer(text, size.vocabulary)
    ids = torch.tensor(tokenizer.encode(text).ids)
    found = cut_windows(ids, tokenizer.decode_batch, size.length, size.passages, where, windows=size.windows)
    return Shakespeare(**vars(found), tokenizer=tokenizer)


def cut_windows(
    ids: Tensor,
    decode: Callable[[list[list[int]]], list[str]],
    length: int,
    passages: int,
    where: float = 0.5,
    *,
    windows: int | None = None,
) -> Windows:
    """Cut a text into segments, these into windows, and hold some windows of each out."""
    each = len(ids) // SEGMENTS // length
    segments = ids[: SEGMENTS * (len(ids) // SEGMENTS)].reshape(SEGMENTS, -1)
    taken = min(each, windows or each)
    parts = segments[:, : taken * length].reshape(SEGMENTS, taken, length)
    held_out = ((torch.arange(passages) + where) * taken / passages).long()
    kept = torch.ones(taken, dtype=torch.bool).index_fill(0, held_out, False)
    numbers = torch.arange(SEGMENTS)
    return Windows(
        train=make_columns(parts[:, kept].flatten(0, 1)),
        queries=make_columns(parts[:, held_out].flatten(0, 1)),
        owners=numbers.repeat_interleave(int(kept.sum())),
        origins=numbers.repeat_interleave(passages),
        texts=tuple("\n".join(decode(part[kept].tolist())) for part in parts),
        passages=tuple(decode(parts[:, held_out].flatten(0, 1).tolist())),
    )


def make_columns(ids: Tensor) -> Columns:
    """Return windows as a task takes them: every token but the first is predicted, with equal weights."""
    weights = torch.full(ids.shape, 1 / (ids.shape[1] - 1))
    weights[:, 0] = 0
    return {"input_ids": ids, "weights": weights}


def remove_speakers(text: str) -> str:
    r"""Remove the line with the speaker's name, such as "First Citizen:", that begins each speech.

    >>> remove_speakers("ALL:\nSpeak, speak.\n\nFirst Citizen:\nYou are resolved:\nto die?")
    'Speak, speak.\n\nYou are resolved:\nto die?'
    """
    speeches = (speech.lstrip("\n").partition("\n") for speech in text.split("\n\n"))
    said = (rest if first.endswith(":") else first + end + rest for first, end, rest in speeches)
    return "\n\n".join(filter(None, said))


def read_speeches() -> str:
    """Read the text, without the names of speakers."""
    return remove_speakers(_read())


def _read() -> str:
    place = fetch(_NAME, _URL, _SHA256)
    content = place.read_bytes()
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise DataError(f"{place} does not hold tiny Shakespeare: its checksum differs.")
    return content.decode()


def _learn_tokenizer(text: str, vocabulary: int) -> "Tokenizer":
    """Learn byte pairs that reproduce the text exactly."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingExtra("the Shakespeare setting", "language") from error
    found = Tokenizer(models.BPE())
    parts: Any = found
    parts.pre_tokenizer, parts.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.train_from_iterator(text.split("\n\n"), trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False))
    return found

"""Shows queries to a person: as a picture, as a text, by a label, or by their number alone.

What nobody declares is guessed from the queries themselves, with care: a sample with a tensor of the shape of an image
is a picture, and a whole number beside it is its label. A page shows nothing rather than something wrong.
"""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.batches import leaves
from imprint.data import as_tensors, is_columns, length_of
from imprint.display import shorten
from imprint.errors import DataError
from imprint.store.fingerprint import of_batches

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
_SMALLEST, _LARGEST = 8, 4096  # sides of what is taken for an image undeclared
_LONGEST = 4  # times its other side
_SHOWN = 320  # pixels of a side on the page; larger pictures are thinned out
_TEXT = 700  # characters of a text on the page


@dataclass(frozen=True)
class Illustrations:
    """What a report shows of the queries besides their numbers.

    pictures: shape (queries, height, width) or (queries, channels, height, width), with 1, 3 or 4 channels; a row of
        n² numbers is a square picture. Whole numbers run from 0 to 255, other pictures are stretched from their
        smallest to their largest value.
    texts, labels: one for each query.
    example_texts: one for each training example, for a guess by common words beside the scores.
    """

    pictures: Any = None
    texts: Sequence[str] | None = None
    labels: Sequence[Any] | None = None
    example_texts: Sequence[str] | None = None

    def check(self, queries: int, examples: int) -> None:
        """Refuse illustrations that are not of so many queries and training examples."""
        for name, given, count, what in (
            ("pictures of queries", self.pictures, queries, "queries"),
            ("texts of queries", self.texts, queries, "queries"),
            ("labels of queries", self.labels, queries, "queries"),
            ("texts of training examples", self.example_texts, examples, "training examples"),
        ):
            if given is None:
                continue
            if isinstance(given, str) or not hasattr(given, "__len__"):
                raise DataError(f"{name} must be a list with one entry each, got a {type(given).__name__}.")
            if len(given) != count:
                raise DataError(f"there are {len(given)} {name}, and {count} {what}: give one for each, in order.")
        for name, texts in (("queries", self.texts), ("training examples", self.example_texts)):
            if texts is not None and not all(isinstance(text, str) for text in texts):
                raise DataError(f"the texts of {name} must be strings.")
        if self.pictures is not None:
            _to_pixels(self.pictures[0])

    @property
    def words(self) -> tuple[list[str], list[str]] | None:
        """The texts of queries and training examples, where both are known."""
        if self.texts is None or self.example_texts is None:
            return None
        return list(self.texts), list(self.example_texts)

    def picture(self, query: int) -> str | None:
        """Return the picture of a query as an address that contains it; None if there is none."""
        return None if self.pictures is None else _embed(_to_pixels(self.pictures[query]))

    def text(self, query: int) -> list[str]:
        """Return the text of a query in lines, shortened if it is long; none if there is no text."""
        if self.texts is None:
            return []
        text = str(self.texts[query])
        return (text if len(text) <= _TEXT else f"{text[:_TEXT]} …").splitlines() or [""]

    def name_queries(self, queries: int, examples: int) -> list[str]:
        """Return a short name of each query: its label or the text of it; none if there are neither."""
        if self.labels is None and self.texts is None:
            return []
        self.check(queries, examples)
        return [shorten(self.label(query) or str(self.texts and self.texts[query])) for query in range(queries)]

    def label(self, query: int) -> str | None:
        """Return the label of a query; None if there is none."""
        if self.labels is None:
            return None
        label = self.labels[query]
        return str(label.item() if isinstance(label, Tensor | np.generic) else label)


def illustrate(queries: Any, known: str | None = None, **declared: Any) -> Illustrations:
    """Return what can be shown of queries: what is declared, and else what they look like themselves.

    queries: as `attribute` takes them; None shows only what is declared.
    known: the fingerprint of the right queries. Columns with another one are refused.
    declared: fields of `Illustrations`; None stands for undeclared.
    """
    given = {name: value for name, value in declared.items() if value is not None}
    found = {} if queries is None else _look_at(queries, known)
    return Illustrations(**{**found, **given})


def _look_at(queries: Any, known: str | None) -> dict[str, Any]:
    """Guess how queries are shown from what they are."""
    texts = getattr(queries, "texts", None)
    found: dict[str, Any] = {"texts": texts} if _are_texts(texts) else {}
    columns = as_tensors(queries)
    if is_columns(columns):
        count = length_of(columns)
        if known is not None and of_batches([(count, columns)]) != known:
            raise DataError(
                "the queries to show are not those of the scores, or are in another order: give the queries that were "
                "attributed."
            )
        every = leaves(columns)
        pictures = [leaf for leaf in every if len(leaf) == count and _looks_like_a_picture(leaf[0])]
        labels = [leaf for leaf in every if leaf.shape == (count,) and not leaf.is_floating_point()]
        return {**found, **_single("pictures", pictures), **_single("labels", labels)}
    if not (hasattr(queries, "__getitem__") and hasattr(queries, "__len__")):
        return found
    samples = _Samples(queries)
    first = samples.parts(0) if len(samples) else []
    pictures = [place for place, part in enumerate(first) if _looks_like_a_picture(part)]
    labels = [place for place, part in enumerate(first) if _looks_like_a_label(part)]
    return {
        **found,
        **_single("pictures", [_Part(samples, place) for place in pictures]),
        **_single("labels", [_Part(samples, place) for place in labels]),
    }


def _single(name: str, candidates: list[Any]) -> dict[str, Any]:
    """Return the one candidate under a name; nothing where there are several, and so a choice."""
    return {name: candidates[0]} if len(candidates) == 1 else {}


@dataclass(frozen=True)
class _Samples:
    """The samples of a dataset, each taken apart when it is asked for."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def parts(self, index: int) -> list[Any]:
        return leaves(self.dataset[index])


@dataclass(frozen=True)
class _Part:
    """One part of every sample, such as its image."""

    samples: _Samples
    place: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples.parts(index)[self.place]


def _are_texts(texts: Any) -> bool:
    return isinstance(texts, list | tuple) and len(texts) > 0 and all(isinstance(text, str) for text in texts)


def _looks_like_a_label(part: Any) -> bool:
    """Tell whether a part of a sample is a single whole number or a name."""
    if isinstance(part, Tensor):
        return part.dim() == 0 and not part.is_floating_point()
    return isinstance(part, int | str | np.integer) and not isinstance(part, bool)


def _looks_like_a_picture(part: Any) -> bool:
    """Tell whether a part of a sample has the shape and the kind of numbers of an image."""
    if not isinstance(part, Tensor) or not (part.is_floating_point() or part.dtype == torch.uint8):
        return False
    if part.dim() not in (2, 3) or (part.dim() == 3 and part.shape[0] not in (1, 3, 4)):
        return False
    short, long = sorted(part.shape[-2:])
    return short >= _SMALLEST and long <= min(_LARGEST, _LONGEST * short)


def _to_pixels(picture: Any) -> Pixels:
    """Return a picture as whole numbers from 0 to 255, shape (height, width) or (height, width, 3)."""
    values = torch.as_tensor(picture).detach().cpu()
    if values.dim() == 1 and math.isqrt(len(values)) ** 2 == len(values) > 0:
        values = values.reshape(math.isqrt(len(values)), -1)
    if values.dim() == 2:
        values = values[None]
    if values.dim() != 3 or values.shape[0] not in (1, 3, 4) or not values.numel():
        raise DataError(
            "a picture has the shape (height, width) or (1, 3 or 4 channels, height, width), or is a row of n² "
            f"numbers; got {tuple(torch.as_tensor(picture).shape)}."
        )
    step = math.ceil(max(values.shape[1:]) / _SHOWN)
    values = values[:3, ::step, ::step]
    if values.dtype != torch.uint8:
        values = torch.where(values.isfinite(), values.double(), 0.0)  # a missing pixel is no reason to show nothing
        low, high = float(values.min()), float(values.max())
        values = (255 * (values - low) / (high - low or 1.0)).round().to(torch.uint8)
    pixels: Pixels = values.permute(1, 2, 0).contiguous().numpy()
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def _embed(pixels: Pixels) -> str:
    """Return an image as an address that contains it."""
    return f"data:image/png;base64,{base64.b64encode(encode_png(pixels)).decode()}"


def encode_png(pixels: Pixels) -> bytes:
    """Encode an image, shape (height, width) or (height, width, 3), as PNG."""
    height, width = pixels.shape[:2]
    colour = 0 if pixels.ndim == 2 else 2
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")

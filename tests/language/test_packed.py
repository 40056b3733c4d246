"""In packed rows every document is credited for its own tokens, and a source at weight 0 is one that is not learnt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import default_data_collator

from imprint import DataError, Plan, RunRecorder, Store, attribute, simulate
from imprint.language import Completions, Packed, PackedRun, recording, task
from imprint.recording.records import micro_seed
from imprint.recording.seeding import seed_everything
from tests.language.models import LABELS, TEXTS, gpt2, tokenizer
from tests.language.trainings import make_trainer

LENGTH = 10


def pack(**options: Any) -> Packed:
    return Packed(TEXTS, tokenizer(eos_token="<end>"), **{"length": LENGTH, **options})


def owners(packed: Packed) -> Tensor:
    """The document of each token of each row, by hand; −1 for padding."""
    tokens = tokenizer(eos_token="<end>")
    stream = [index for index, text in enumerate(TEXTS) for _ in tokens(text)["input_ids"] + [0]]
    padded = stream + [-1] * (-len(stream) % LENGTH)
    return torch.tensor(padded).reshape(-1, LENGTH)


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """−log p of each token from those before it in its row; 0 for the first, (rows, length)."""
    logits = model(input_ids=ids).logits
    return F.pad(F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"), (1, 0))


def rows_of(packed: Packed) -> dict[str, Tensor]:
    return dict(default_data_collator(packed.rows))


def test_rows_hold_the_documents_one_after_the_other() -> None:
    packed, tokens = pack(), tokenizer(eos_token="<end>")
    ids, labels = rows_of(packed)["input_ids"], rows_of(packed)["labels"]
    stream = [token for text in TEXTS for token in tokens(text)["input_ids"] + [0]]
    assert ids.flatten()[: len(stream)].tolist() == stream
    assert bool((labels[:, 0] == -100).all())
    assert torch.equal(labels[:, 1:] != -100, owners(packed)[:, 1:] >= 0)
    assert torch.equal(labels[labels != -100], ids[labels != -100])
    last = packed.documents == len(TEXTS) - 1
    assert packed.texts[int(last.nonzero()[-1])].endswith("<end>")
    assert repr(packed) == f"Packed(5 in {len(ids)} rows of up to 10 tokens, {len(packed)} segments)"


def test_every_token_after_the_first_of_a_row_is_learnt_for_its_own_document() -> None:
    packed, whose = pack(), owners(pack())
    weights = packed.columns["weights"]
    for segment, document in enumerate(packed.documents.tolist()):
        row = int((packed.columns["input_ids"][segment] == rows_of(packed)["input_ids"]).all(1).nonzero()[0])
        expected = whose[row] == document
        expected[0] = False
        assert torch.equal(weights[segment] > 0, expected)
    learnt = int((whose[:, 1:] >= 0).sum())
    assert weights.sum() / len(packed) == pytest.approx(1)  # so that the mean of losses is the mean over tokens
    assert len(weights[weights > 0].unique()) == 1
    assert int((weights > 0).sum()) == learnt


def test_the_losses_of_segments_are_parts_of_the_mean_over_tokens() -> None:
    model, packed = gpt2().eval(), pack()
    each, whose = token_losses(model, rows_of(packed)["input_ids"]), owners(packed)
    learnt = whose >= 0
    learnt[:, 0] = False
    found = task(model).loss(model, packed.columns)
    torch.testing.assert_close(found.mean(), each[learnt].mean(), rtol=1e-6, atol=0)
    for document in range(len(TEXTS)):
        expected = each[learnt & (whose == document)].sum() * len(packed) / learnt.sum()
        torch.testing.assert_close(found[packed.documents == document].sum(), expected, rtol=1e-6, atol=0)


def descend(model: Any, packed: Packed, weights: Tensor, steps: int, lr: float) -> dict[str, Tensor]:
    """Plain gradient descent on the weighted sum of token losses over the number of tokens, by hand."""
    learnt = owners(packed) >= 0
    learnt[:, 0] = False
    for _ in range(steps):
        loss = (token_losses(model, rows_of(packed)["input_ids"])[learnt] * weights[learnt]).sum() / learnt.sum()
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= lr * slope
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("form", ["columns", "segments"])
def test_imprints_are_derivatives_by_the_weight_of_a_sources_tokens(form: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)  # or the weight of a token, which is no power of 2, is rounded
    try:
        packed = pack()
        columns = packed.columns
    finally:
        torch.set_default_dtype(torch.float32)
    sources, model = packed.sources(LABELS), gpt2().eval()
    if form == "columns":
        store = simulate(task(model), columns, sources, Plan(steps=3, lr=0.05), progress=False)
    else:  # rows that are computed once for all their segments; tokens have weight 1 there
        scale = len(packed) / int((columns["weights"] > 0).sum())
        by_token = record_by_hand(packed, tmp_path)
        store = simulate(
            task(model),
            by_token.segments,
            sources,
            Plan(steps=3, lr=0.05 * scale),
            collate_fn=by_token.collate_fn,
            progress=False,
        )
    whose = owners(packed)
    epsilon = 1e-4
    for source, name in enumerate(sources.ids):
        own = torch.isin(whose, torch.tensor([i for i, label in enumerate(LABELS) if label == name]))
        up, down = (descend(gpt2().eval(), packed, 1 + sign * epsilon * own.double(), 3, 0.05) for sign in (1, -1))
        found = store.imprints(0, source, source + 1, torch.device("cpu"))
        for parameter, row in found.items():
            expected = (up[parameter] - down[parameter]) / (2 * epsilon) * len(packed)
            torch.testing.assert_close(row[0], expected, rtol=1e-5, atol=1e-7)


def record_by_hand(packed: Packed, folder: Path) -> PackedRun:
    """A run of two steps in a loop of the user's own, whose loss is the mean over the tokens of a batch."""
    model = gpt2()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    columns = rows_of(packed)
    with RunRecorder(folder / "by-hand", model, optimiser, data=columns) as run:
        for indices in run.batches(len(packed.rows), 2, epochs=1):
            labels = columns["labels"][indices]
            count = int((labels[:, 1:] != -100).sum())
            with run.step(indices, normaliser=count) as step:
                optimiser.zero_grad()
                each = token_losses(model, columns["input_ids"][indices])
                step.backward(each[labels != -100].sum() / count)
                optimiser.step()
    return packed.follow(run)


def repeat_without(run: PackedRun, packed: Packed, model: Any, learnt: Tensor) -> dict[str, Tensor]:
    """Train again by hand, as the recording of rows says, on the tokens that are `learnt`."""
    rows, recorded = rows_of(packed), super(PackedRun, run).steps
    model.load_state_dict(run.state(0), strict=False)
    model.train()
    parameters = dict(model.named_parameters())
    kind: Any = run.optimiser
    optimiser = kind([{"params": [parameters[name] for name in group]} for group in run.groups], lr=1.0)
    for step in recorded:
        optimiser.zero_grad()
        for number, batch in enumerate(step.batches):
            seed_everything(micro_seed(step.seed, number))
            chosen = list(batch.examples)
            each = token_losses(model, rows["input_ids"][chosen])
            ((each * learnt[chosen]).sum() / batch.normaliser).backward()
        if step.clipping:
            nn.utils.clip_grad_norm_(parameters.values(), step.clipping.limit)
        for group, settings in zip(optimiser.param_groups, step.groups, strict=True):
            group.update(settings)
        optimiser.step()
    return {name: p.detach().clone() for name, p in parameters.items()}


def compare_with_retraining(store: Store, run: PackedRun, packed: Packed, make: Any, tolerance: float) -> None:
    """Compare θ₋b = θ − u_b/N with training without the tokens of b."""
    whose, sources = owners(packed), packed.sources(LABELS)
    learnt = torch.stack([row["labels"] for row in packed.rows]) != -100
    learnt[:, 0] = False
    end = run.state(len(run.steps))
    assert store.n == len(packed)
    for source, name in enumerate(sources.ids):
        own = torch.isin(whose, torch.tensor([i for i, label in enumerate(LABELS) if label == name]))
        without = repeat_without(run, packed, make(), learnt & ~own)
        rows = store.imprints(0, source, source + 1, torch.device("cpu"))
        moved = torch.cat([(without[n] - end[n]).flatten() for n in rows])
        missed = torch.cat([(without[n] - (end[n] - row[0] / len(packed))).flatten() for n, row in rows.items()])
        assert moved.norm() > 1e-3
        assert missed.norm() < tolerance * moved.norm()


@pytest.mark.parametrize("stacked", [True, False])
def test_a_trainers_run_is_replayed_without_the_tokens_of_a_source(stacked: bool, tmp_path: Path) -> None:
    packed, model = pack(), gpt2().float()  # with dropout, whose masks are those of the packed rows
    trainer = make_trainer(model, tmp_path, data=packed.rows, collate=default_data_collator)
    run = recording.attach(trainer, tmp_path / "run")
    trainer.train()
    by_token = packed.follow(run)
    plan, sources = Plan(engine="replay", stacked=stacked), packed.sources(LABELS)
    options: dict[str, Any] = {"collate_fn": by_token.collate_fn, "progress": False}
    store = simulate(task(model), by_token.segments, sources, plan, run=by_token, **options)
    measured = store.checkpoints[0].measured
    assert measured.deviation is not None and measured.deviation < 1e-4
    assert (measured.one_by_one is None) is stacked
    compare_with_retraining(store, by_token, packed, lambda: gpt2().float(), 1e-5)
    result = attribute(task(model), store, Completions(["the"], [" cat"], tokenizer()).columns)
    assert result.question == "this_run"


def test_a_loop_of_ones_own_is_replayed_in_float64(tmp_path: Path) -> None:
    packed = pack()
    by_token, model = record_by_hand(packed, tmp_path), gpt2()
    model.load_state_dict(by_token.state(len(by_token.steps)), strict=False)
    options: dict[str, Any] = {"collate_fn": by_token.collate_fn, "progress": False}
    store = simulate(task(model), by_token.segments, packed.sources(LABELS), run=by_token, **options)
    compare_with_retraining(store, by_token, packed, gpt2, 1e-10)


def test_rows_of_one_document_each_are_stacked_too(tmp_path: Path) -> None:
    packed = Packed.from_rows([[5, 6, 7], [4, 3, 2], [9, 8, 7], [6, 5, 4]], [[0] * 3, [1] * 3, [2] * 3, [3] * 3])
    by_token, model = record_by_hand(packed, tmp_path), gpt2()  # with dropout: a batch of fewer rows draws other masks
    model.load_state_dict(by_token.state(len(by_token.steps)), strict=False)
    options: dict[str, Any] = {"collate_fn": by_token.collate_fn, "progress": False}
    store = simulate(task(model), by_token.segments, packed.sources([*"abab"]), run=by_token, **options)
    assert store.checkpoints[0].measured.one_by_one is None


def test_rows_packed_elsewhere_are_taken_with_their_owners_and_labels() -> None:
    rows, whose = [[5, 6, 7, 8, 9], [4, 3, 2]], [[0, 0, 1, 1, -1], [2, 2, 0]]
    packed = Packed.from_rows(rows, whose, labels=[[5, 6, 7, -100, 9], [4, 3, 2]])
    assert packed.documents.tolist() == [0, 1, 2, 0]
    learnt = [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
    assert (packed.columns["weights"] > 0).int().tolist() == learnt
    assert [row["labels"].tolist() for row in packed.rows] == [[-100, 6, 7, -100, -100], [-100, 3, 2, -100, -100]]
    assert [members.tolist() for members in packed.sources(["a", "b", "a"]).members] == [[0, 2, 3], [1]]
    with pytest.raises(DataError, match="texts need a tokenizer"):
        _ = packed.texts


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "owners of other lengths": ({"rows": [[1, 2]], "owners": [[0]]}, "owners must have one number"),
    "labels that are no tokens": ({"rows": [[1, 2]], "owners": [[0, 0]], "labels": [[1, 3]]}, "are its tokens, or"),
    "nobody's": ({"rows": [[1, 2]], "owners": [[-1, -1]]}, "no token of the packed rows has an owner"),
    "below nobody": ({"rows": [[1, 2], [3, 4]], "owners": [[0, 1], [0, -2]]}, "position 1 of packed row 1 is -2"),
    "no whole number": ({"rows": [[1, 2]], "owners": [[0.5, 1]]}, r"position 0 of packed row 0 is 0\.5"),
    "no number": ({"rows": [[1, 2]], "owners": [[0, None]]}, "position 1 of packed row 0 is None: give the number"),
    "nothing to learn": ({"rows": [[1, 2], [3]], "owners": [[0, 0], [0]]}, "packed row 1 has no token to learn"),
    "no rows": ({"rows": [], "owners": []}, "must be lists of tokens"),
}


@pytest.mark.parametrize(("given", "reason"), REFUSED.values(), ids=REFUSED)
def test_rows_that_do_not_fit_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Packed.from_rows(**given)


def test_a_source_of_which_nothing_is_learnt_is_refused() -> None:
    packed = Packed.from_rows([[1, 2, 3]], [[0, 1, 1]])
    with pytest.raises(DataError, match="source 'a' has no token that is learnt"):
        packed.sources(["a", "b"])


def widen(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator that pads three tokens more, as one that pads to a multiple does."""
    batch = default_data_collator(samples)
    return {"input_ids": F.pad(batch["input_ids"], (0, 3)), "labels": F.pad(batch["labels"], (0, 3), value=-100)}


def test_a_collator_may_pad_rows_but_not_change_them() -> None:
    model, packed = gpt2().eval(), pack()
    chosen = [len(packed) - 1, 0, 0, 2]
    plain, wide = (task(model).loss(model, packed.collate(chosen, by)) for by in (default_data_collator, widen))
    torch.testing.assert_close(wide, plain)
    each, whose = token_losses(model, rows_of(packed)["input_ids"]), owners(packed)
    torch.testing.assert_close(plain[1], each[0][whose[0] == 0].sum())
    with pytest.raises(DataError, match="changes the tokens of packed rows"):
        packed.collate(chosen, lambda samples: {k: v.flip(1) for k, v in default_data_collator(samples).items()})
    with pytest.raises(DataError, match="has tokens learnt that packed rows leave out, such as padding"):
        packed.collate(chosen, lambda samples: {k: default_data_collator(samples)["input_ids"] for k in samples[0]})


def test_a_run_on_other_rows_is_refused(tmp_path: Path) -> None:
    by_token = record_by_hand(pack(), tmp_path)
    with pytest.raises(DataError, match="other training data"):
        Packed(TEXTS[::-1], tokenizer(eos_token="<end>"), length=LENGTH).follow(by_token.path)
    with pytest.raises(DataError, match="there are 3 packed rows"):
        pack(length=24).follow(by_token.path)

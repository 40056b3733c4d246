"""The rows of an aimed adapter are the directions in which gradients of the sources differ most; nothing else moves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from imprint import Plan, PlanError, Sources, SourcesError, Store, StoreError, Task, TaskError, export, simulate
from imprint.language import Completions, aim, task
from imprint.language.presets import blocks
from tests.language.adapters import fine_tuned
from tests.language.models import LABELS, MODELS, VOCABULARY, documents, gpt2, llama, tokenizer
from tests.language.test_task import close, imprints, scores

RANK = 3
PRECISION = {"gpt2": 1e-9, "llama": 1e-5}  # llama's norms are computed in float32, whatever the model is in
Rows = dict[str, Tensor]


def columns() -> dict[str, Tensor]:
    """Windows of a few tokens, so that every source has several."""
    return documents(length=6).columns


def labelled() -> Sources:
    return documents(length=6).sources(LABELS)


OVERLAPPING = Sources.groups({"first": [0, 1, 2, 3], "second": [2, 3, 4], "one": [3], "all": range(8)})


def aimed(model: nn.Module, sources: Sources, data: Any = None, **options: Any) -> Rows:
    """The A of every adapted layer after aiming, by the name of the layer."""
    language = task(model, parameters=f"lora:{RANK}")
    aim(language, data or columns(), sources, **{"progress": False, **options})
    return rows(language)


def flat(rows: Rows) -> Tensor:
    return torch.cat([a.flatten() for a in rows.values()])


def rows(language: Task) -> Rows:
    ending = ".lora_A.imprint.weight"
    return {name.removesuffix(ending): t for name, t in language.state().items() if name.endswith(ending)}


def slopes(model: Any, members: Any, data: Any = None) -> Rows:
    """The mean gradient of some windows by the weights of linear layers, (outputs, inputs), in a backward pass."""
    batch = {name: column[torch.as_tensor(np.array(members))] for name, column in (data or columns()).items()}
    ids, weights = batch["input_ids"], batch["weights"][:, 1:]
    model.eval().zero_grad()
    logits = model(input_ids=ids).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    (each * weights).sum().div(len(ids)).backward()
    layers = [(f"{prefix}.{name}", m) for prefix, block in blocks(model) for name, m in block.named_modules()]
    linear: Any = [(name, layer) for name, layer in layers if isinstance(layer, nn.Linear | Conv1D)]
    return {name: layer.weight.grad.T if isinstance(layer, Conv1D) else layer.weight.grad for name, layer in linear}


def differences(found: list[Rows]) -> Rows:
    """Σ_b (G_b − Ḡ)ᵀ(G_b − Ḡ) of every layer."""
    stacked = {name: torch.stack([slope[name] for slope in found]) for name in found[0]}
    return {name: torch.einsum("boi,boj->ij", g - g.mean(0), g - g.mean(0)) for name, g in stacked.items()}


def assert_leading(found: Rows, matrices: Rows, tolerance: float) -> None:
    """Rows are orthonormal and hold the leading eigenvectors, as far as these are told apart from the others."""
    assert len(found) == 2 and set(found) <= set(matrices)
    for name, a in found.items():
        torch.testing.assert_close(a @ a.T, torch.eye(len(a), dtype=a.dtype))
        values, vectors = torch.linalg.eigh(matrices[name])
        told = min(len(a), int((values > 1e-6 * values[-1]).sum()))
        assert told == len(values) or float(values[-told] / values[-told - 1].abs()) > 1.005, name
        leading = vectors[:, -told:]
        torch.testing.assert_close(a.T @ (a @ leading), leading, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sources", [labelled(), OVERLAPPING], ids=["labelled", "overlapping"])
@pytest.mark.parametrize("kind", MODELS)
def test_rows_span_where_gradients_of_the_sources_differ_most(kind: str, sources: Sources) -> None:
    expected = differences([slopes(MODELS[kind](), members) for members in sources.members])
    assert_leading(aimed(MODELS[kind](), sources), expected, PRECISION[kind])


@pytest.mark.parametrize("kind", MODELS)
def test_a_source_alone_is_aimed_at_by_its_own_gradient(kind: str) -> None:
    alone = Sources.groups({"alone": [1, 2, 5]})
    own = slopes(MODELS[kind](), alone.members[0])
    assert_leading(aimed(MODELS[kind](), alone), {name: g.T @ g for name, g in own.items()}, PRECISION[kind])


def test_small_differences_are_seen_beside_a_large_common_part() -> None:
    """In float32 the sum of squares and the square of the mean would be the same."""
    data = columns()
    data["weights"][0] *= 3000
    sources = Sources.groups({str(own): [0, own] for own in (1, 4, 6, 9)})
    expected = differences([slopes(gpt2(), members, data) for members in sources.members])
    found = {name: a.double() for name, a in aimed(gpt2().float(), sources, data).items()}
    assert_leading(found, expected, 0.02)


def test_layers_that_share_a_weight_share_their_rows() -> None:
    model = llama()
    one, other = (block.mlp.down_proj for block in model.model.layers)
    other.weight = one.weight
    first, second = aimed(model, labelled()).values()
    assert torch.equal(first, second)
    assert not torch.equal(first, next(iter(aimed(llama(), labelled()).values())))


def test_samples_depend_on_the_seed_alone() -> None:
    sources, model = labelled(), gpt2()
    assert min(sources.sizes) < 3 < max(sources.sizes)

    def drawn(seed: int, state: int, **options: Any) -> Tensor:
        np.random.seed(state)
        torch.manual_seed(state)
        return flat(aimed(model, sources, **{"sample": 3, **options}, seed=seed))

    first = drawn(0, 0)
    assert torch.equal(first, drawn(0, 1))
    torch.testing.assert_close(first, drawn(0, 0, batch_size=2))
    assert (first - drawn(1, 0)).abs().max() > 0.01
    everything = max(sources.sizes)
    assert torch.equal(drawn(0, 0, sample=everything), drawn(1, 0, sample=everything))


def test_everything_but_the_rows_stays_as_it_was() -> None:
    model = gpt2()
    model.transformer.h[0].eval()
    model.transformer.wte.requires_grad_(False)
    language = task(model, parameters="lora:2")
    modules = [*model.modules(), *language.model.modules()]
    parameters = [*model.named_parameters(), *language.model.named_parameters()]

    def surroundings() -> Any:
        flags = [(p.requires_grad, p.grad) for _, p in parameters]
        return flags, [module.training for module in modules], torch.random.get_rng_state().tolist()

    before, state = surroundings(), language.state()
    aim(language, columns(), labelled(), progress=False)
    assert surroundings() == before
    assert model.training and not model.transformer.h[0].training
    moved = {name for name, tensor in language.state().items() if not torch.equal(tensor, state[name])}
    assert moved == {name for name in state if ".lora_A." in name}


def test_progress_counts_sources() -> None:
    told: list[tuple[int, int]] = []
    aimed(gpt2(), labelled(), progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_taken_at_a_checkpoint_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    model, later = MODELS[kind](), MODELS[kind]()
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.mul_(1.5)
    there = flat(aimed(later, labelled()))
    state, file = {name: tensor.clone() for name, tensor in later.state_dict().items()}, tmp_path / "later.safetensors"
    save_file(state, file)
    given: list[Any] = [state, file, str(file), (state, {}), (file, {})]
    for checkpoint in given:
        assert torch.equal(flat(aimed(model, labelled(), checkpoint=checkpoint)), there)
    assert (flat(aimed(model, labelled())) - there).abs().max() > 0.01


def test_layers_that_a_window_does_not_reach_have_no_gradient() -> None:
    model = gpt2()
    model.transformer.h[0].spare = nn.Linear(32, 8).double()
    a = aimed(model, labelled())["transformer.h.0.spare"]
    torch.testing.assert_close(a @ a.T, torch.eye(4 * RANK, dtype=torch.float64))


def test_a_layer_narrower_than_the_rank_keeps_all_directions() -> None:
    language = task(llama(), parameters="lora:10")
    aim(language, columns(), labelled(), progress=False)
    assert {a.shape for a in rows(language).values()} == {(12, 12)}
    for a in rows(language).values():
        torch.testing.assert_close(a @ a.T, torch.eye(len(a), dtype=a.dtype))


QUERIES = Completions(["the cat", "over the sea"], [" sat on the mat", " sails a ship"], tokenizer()).columns


def prepared(model: nn.Module, folder: Path) -> tuple[Task, Store]:
    """An aimed task and its store."""
    language = task(model, parameters="lora:2")
    aim(language, columns(), labelled(), progress=False)
    plan = Plan(steps=2, lr=1e-3, preconditioner="adam")
    return language, simulate(language, columns(), labelled(), plan, out=folder, progress=False)


@pytest.mark.parametrize("readout", ["jvp", "central", "gradient"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_store_is_read_by_a_task_that_was_not_aimed(kind: str, readout: str, tmp_path: Path) -> None:
    language, _ = prepared(MODELS[kind](), tmp_path / "store")
    store, fresh = Store(tmp_path / "store"), task(MODELS[kind](), parameters="lora:2")
    assert not torch.allclose(flat(rows(fresh)), flat(rows(language)))
    expected = scores(language, store, QUERIES, readout=readout)
    assert expected.abs().min() > 0
    assert torch.equal(scores(fresh, store, QUERIES, readout=readout), expected)


@pytest.mark.parametrize("kind", MODELS)
def test_a_store_is_exported_with_the_rows_it_was_made_with(kind: str, tmp_path: Path) -> None:
    language, store = prepared(MODELS[kind]().float(), tmp_path / "store")
    fresh = task(MODELS[kind]().float(), parameters="lora:2")
    found = export.to_peft(fresh, store, tmp_path / "out", QUERIES)
    assert found.self_test.central < 1e-3
    exact = scores(language, store, QUERIES).double()
    read = export.read_peft(found, MODELS[kind]().float(), QUERIES).measured
    torch.testing.assert_close(read, exact, rtol=0, atol=0.02 * float(exact.abs().max()))


def test_simulations_with_the_same_rows_are_the_same_and_with_others_are_not_continued(tmp_path: Path) -> None:
    _, store = prepared(gpt2(), tmp_path / "one")
    _, again = prepared(gpt2(), tmp_path / "two")
    close(imprints(store), imprints(again), 1e-12)
    with pytest.raises(StoreError, match="checkpoint"):
        simulate(
            *(task(gpt2(), parameters="lora:2"), columns(), labelled()),
            Plan(steps=2, lr=1e-3, preconditioner="adam"),
            out=tmp_path / "one",
            progress=False,
        )


def test_other_tasks_are_refused() -> None:
    for other in (
        task(gpt2()),
        task(gpt2(), parameters="last:1"),
        task(fine_tuned()),
        task(fine_tuned(), parameters="*lora_B*"),
        Task(gpt2(), loss=lambda model, batch: batch["weights"].sum(1)),
    ):
        before = other.state()
        with pytest.raises(TaskError, match="only an adapter made for the task can be aimed: give language"):
            aim(other, columns(), labelled(), progress=False)  # type: ignore[arg-type]
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.state().items())


def test_what_makes_no_sense_is_refused_by_name() -> None:
    broken = {name: tensor * torch.nan for name, tensor in gpt2().state_dict().items()}
    for options, message in (
        ({"sample": 0}, "a source needs a sample of at least 1 window to be aimed at, got sample=0"),
        ({"checkpoint": broken}, r"the gradients of layer 'transformer\.h\.0\.mlp\.c_proj' are not finite"),
        ({"checkpoint": "nowhere.safetensors"}, "checkpoint file nowhere.safetensors does not exist"),
        ({"checkpoint": [broken]}, r"checkpoint is a list of 1: give one state dict"),
        ({"checkpoint": gpt2()}, r"checkpoint 0 has type GPT2LMHeadModel, .* needed: give its state_dict\(\)"),
    ):
        with pytest.raises(TaskError, match=message):
            aimed(gpt2(), labelled(), **options)
    with pytest.raises(PlanError, match="checkpoint 0 is a tuple of 3"):
        aimed(gpt2(), labelled(), checkpoint=(broken, {}, {}))
    with pytest.raises(SourcesError, match=r"sources must be an imprint\.Sources, got a list"):
        aimed(gpt2(), ["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(SourcesError, match="the sources are made for 3 training examples, the data has 10"):
        aimed(gpt2(), Sources.by_label(["a", "b", "b"]))
    with pytest.raises(SourcesError, match="source 'a' has member 10, but the training data has examples 0 to 9"):
        aimed(gpt2(), Sources.groups({"a": [0, 10]}))


COMMON, LEFT, RIGHT = 5, 40, 90


def in_two_directions() -> tuple[dict[str, Tensor], Sources]:
    """Windows that repeat one token, and four sources with as much of one and a growing share of two others.

    Every position of such a window looks alike to a layer, so that differences of sources have two input directions.
    """
    tokens = [COMMON] * 12 + [LEFT] * 3 + [LEFT, LEFT, RIGHT] + [LEFT, RIGHT, RIGHT] + [RIGHT] * 3
    ids = torch.tensor(tokens).unsqueeze(1).repeat(1, 6)
    members = {name: [*range(3 * b, 3 * b + 3), *range(12 + 3 * b, 15 + 3 * b)] for b, name in enumerate("abcd")}
    return {"input_ids": ids, "weights": torch.full(ids.shape, 1 / 5)}, Sources.groups(members)


@pytest.mark.parametrize("kind", MODELS)
def test_few_rows_say_what_all_weights_say_where_sources_differ_in_few_directions(kind: str) -> None:
    model = MODELS[kind]()
    if kind == "gpt2":
        nn.init.zeros_(model.transformer.wpe.weight)
    data, sources = in_two_directions()
    asked = {"input_ids": torch.randint(VOCABULARY, (8, 6)), "weights": torch.ones(8, 6)}

    def told_apart(language: Task) -> Tensor:
        """What scores say of sources beyond what they say of all."""
        store = simulate(language, data, sources, Plan(steps=5, lr=1e-3), progress=False)
        found = scores(language, store, asked)
        return found - found.mean(1, keepdim=True)

    adapted = task(model, parameters="lora:2")
    full = told_apart(task(model, parameters=[name.replace(".lora_B.imprint", "") for name in adapted.names]))
    random = told_apart(adapted)
    aim(adapted, data, sources, progress=False)
    aimed = told_apart(adapted)
    assert (random - full).norm() > 0.3 * full.norm()
    assert (aimed - full).norm() < 0.1 * full.norm()

"""A signature shows what checksums cannot: that somebody changed a store on purpose, and sealed it again."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from imprint import Recording, RunRecorder, Sources, Store, StoreError, Task, attribute, simulate, validate
from imprint.errors import ConfigurationError
from imprint.keys import make_keys
from imprint.store.files import sha256
from imprint.store.signing import SIGNATURE, sign_store
from imprint.store.values import sealed

X, Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
PUBLISHERS = ["ann", "bob", "cid", "dan", "eve", "fay"] * 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pairs of keys, a recorded run and its store."""
    folder = tmp_path_factory.mktemp("signing")
    for name in ("mine", "theirs"):
        make_keys(folder / name)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    run = RunRecorder(folder / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))
    for indices in run.batches(24, 8, epochs=2):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            step.backward(nn.functional.cross_entropy(model(X[indices]), Y[indices]))
            run.optimiser.step()
    simulate(
        Task.classifier(model), (X, Y), Sources.by_label(PUBLISHERS), run=run.finish(), out=folder / "store",
        progress=False,
    )  # fmt: skip
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def open_signed(folder: Path, key: str = "mine.pub") -> Store:
    return Store(folder / "store", signed_by=folder / key)


def test_a_signed_store_opens_with_the_key_of_its_signer(folder: Path) -> None:
    sign_store(Store(folder / "store"), folder / "mine")
    assert open_signed(folder).signed is not None and Store(folder / "store").signed is None
    with pytest.raises(StoreError, match="is not signed with key"):
        open_signed(folder, "theirs.pub")


def test_a_store_without_a_signature_is_refused_where_one_is_demanded(folder: Path) -> None:
    with pytest.raises(StoreError, match=r"is not signed\. It must be signed with key"):
        open_signed(folder)


def swap_sources(folder: Path) -> None:
    """Exchange two sources and seal the store again, so that every checksum fits."""
    store = folder / "store"
    table = json.loads((store / "sources.json").read_text())
    for name in ("ids", "names", "sizes", "members"):
        table[name][0], table[name][1] = table[name][1], table[name][0]
    (store / "sources.json").write_text(json.dumps(table))
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["sources"] |= {
        "sha256": sha256(store / "sources.json"),
        "bytes": (store / "sources.json").stat().st_size,
    }
    (store / "manifest.json").write_text(json.dumps(sealed(manifest)))


def test_exchanged_sources_pass_every_checksum_and_no_signature(folder: Path) -> None:
    sign_store(Store(folder / "store"), folder / "mine")
    swap_sources(folder)
    Store(folder / "store").verify()  # this is why signatures are needed
    with pytest.raises(StoreError, match="the store was changed after it was signed"):
        open_signed(folder)
    sign_store(Store(folder / "store"), folder / "theirs")
    with pytest.raises(StoreError, match="is not signed with key"):
        open_signed(folder)


def test_a_validation_is_signed_too(folder: Path) -> None:
    """Otherwise somebody could write 'validated' beside a store that failed."""
    task = Task.classifier(nn.Linear(3, 2))
    task.model.load_state_dict(Recording(folder / "run").state(6))
    queries = torch.randn(30, 3), torch.randint(0, 2, (30,))
    sign_store(Store(folder / "store"), folder / "mine")
    opened = open_signed(folder)
    given = {"task": task, "data": (X, Y), "sources": Sources.by_label(PUBLISHERS), "run": Recording(folder / "run")}
    validate(folder / "store", queries, **given, progress=False)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="its validation was changed after it was signed"):
        open_signed(folder)
    with pytest.raises(StoreError, match="its validation was changed after it was signed"):
        attribute(task, opened, queries, progress=False)  # a service that has the store open
    sign_store(Store(folder / "store"), folder / "mine")
    assert attribute(task, open_signed(folder), queries, progress=False).labels.validation is not None
    (folder / "store" / "validation.json").unlink()
    with pytest.raises(StoreError, match="its validation was changed after it was signed"):
        open_signed(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"content": 1, "signature": ""}', '{"content": "{}", "signature": "AA=="}',
                                  '{"content": "x", "signature": "?"}'])  # fmt: skip
def test_what_is_no_signature_is_refused(text: str, folder: Path) -> None:
    (folder / "store" / SIGNATURE).write_text(text)
    with pytest.raises(StoreError):
        open_signed(folder)


@pytest.mark.parametrize("name", ["validation.json", SIGNATURE])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_does_not_block(name: str, folder: Path) -> None:
    sign_store(Store(folder / "store"), folder / "mine")
    (folder / "store" / name).unlink(missing_ok=True)
    os.mkfifo(folder / "store" / name)
    with pytest.raises(StoreError, match=r"not a regular file|is not signed"):
        open_signed(folder)
    with pytest.raises(StoreError, match=r"not a regular file|is a pipe"):
        sign_store(Store(folder / "store"), folder / "mine")


def test_a_group_has_a_signer_only_if_every_source_keeps_its_id(folder: Path) -> None:
    """Otherwise groups of one source each would exchange two publishers, and the signature would vouch for it."""
    sign_store(Store(folder / "store"), folder / "mine")
    task = Task.classifier(nn.Linear(3, 2))
    task.model.load_state_dict(Recording(folder / "run").state(6))
    result = attribute(task, open_signed(folder), (X[:2], Y[:2]), progress=False)
    ids = result.labels.source_ids
    same, others = {name: [name] for name in reversed(ids)}, {name: [name] for name in ids[2:]}
    assert result.group(same).labels.fingerprints["signer"] == result.labels.fingerprints["signer"]
    for groups in ({ids[0]: [ids[1]], ids[1]: [ids[0]]}, {ids[0]: list(ids[:2])}, {"new": [ids[0]], ids[1]: [ids[1]]}):
        assert "signer" not in result.group({**groups, **others}).labels.fingerprints


def test_a_damaged_store_is_not_signed(folder: Path) -> None:
    file = next((folder / "store").rglob("imprints*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="is damaged"):
        sign_store(Store(folder / "store"), folder / "mine")


def test_a_resumed_simulation_does_not_mind_a_signature(folder: Path) -> None:
    sign_store(Store(folder / "store"), folder / "mine")
    task = Task.classifier(nn.Linear(3, 2))
    task.model.load_state_dict(Recording(folder / "run").state(6))
    sources = Sources.by_label(PUBLISHERS)
    simulate(task, (X, Y), sources, run=Recording(folder / "run"), out=folder / "store", progress=False)
    assert open_signed(folder)


def test_only_ed25519_keys_are_taken(folder: Path) -> None:
    (folder / "text").write_text("no key")
    with pytest.raises(ConfigurationError, match="is not a public key"):
        open_signed(folder, "text")
    with pytest.raises(ConfigurationError, match="is not a public key"):
        open_signed(folder, "mine")
    with pytest.raises(ConfigurationError, match="there is no key file"):
        open_signed(folder, "nothing")
    with pytest.raises(ConfigurationError, match="a public key is an Ed25519 key or the path of one, got a int"):
        Store(folder / "store", signed_by=5)  # type: ignore[arg-type]

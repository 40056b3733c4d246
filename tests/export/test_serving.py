"""`to_vllm` writes what vLLM takes, and refuses what it would serve wrongly."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from imprint import Plan, ReadoutError, Task, TaskError, attribute, simulate
from imprint.cli.app import app
from imprint.errors import ConfigurationError
from imprint.export import Export, RemoteReader, read_peft, to_peft, to_vllm
from tests.export import models, served
from tests.export.fake import running

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Export]:
    return served.path_export(tmp_path_factory.mktemp("path"))


def arguments(folder: Path, *more: str) -> list[str]:
    """The command line that serve.sh of an export makes."""
    script = (folder / "serve.sh").read_text().replace('exec "${PYTHON:-python}" -m', "printf '%s\\n' ")
    told = subprocess.run(["sh", "-c", script, folder / "serve.sh", *more], capture_output=True, text=True, check=True)
    return told.stdout.splitlines()


def test_adapters_have_a_rank_of_vllm_and_score_as_before(exported: Any) -> None:
    task, store, found = exported
    for folder in (found.folder / "adapters").iterdir():
        about = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        assert (about["r"], about["lora_alpha"], about["rank_pattern"]) == (8, 8, {})
        assert {tensor.shape for name, tensor in tensors.items() if "lora_A" in name} == {(8, 96)}
        assert {tensor.shape for name, tensor in tensors.items() if "lora_B" in name} == {(64, 8)}
        assert all(not tensor[6:].any() for name, tensor in tensors.items() if "lora_A" in name)
    assert {rank for rank, _, _ in found.layers.values()} == {6}  # what the imprints have
    scores = read_peft(found, served.plain(found), served.queries()).measured
    exact = torch.as_tensor(attribute(task, store, served.queries(), progress=False).scores)
    assert models.deviation(scores, exact) < 0.01


@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (2, 8), (8, 8), (300, 320), (512, 512), (513, None)])
def test_the_next_rank_that_vllm_has_is_taken(rank: int, padded: int | None, tmp_path: Path) -> None:
    task, store = _adapted(["down_proj"], rank)
    if padded is None:
        with pytest.raises(ReadoutError, match="have rank 513, and vLLM serves at most 512"):
            to_vllm(task, store, tmp_path / "x", models.queries(), tokenizer=served.tokenizer())
        assert not (tmp_path / "x").exists()
        return
    found = to_vllm(task, store, tmp_path / "x", models.queries(), tokenizer=served.tokenizer())
    assert json.loads((found.folder / "adapters/base/adapter_config.json").read_text())["r"] == padded
    assert arguments(found.folder)[_after(arguments(found.folder), "--max-lora-rank")] == str(padded)


def test_the_command_starts_the_server_of_this_folder_wherever_it_is_moved(exported: Any, tmp_path: Path) -> None:
    _, _, found = exported
    moved = tmp_path / "an export"
    shutil.copytree(found.folder, moved)
    told = arguments(moved, "--port", "9000")
    assert told[0] == "vllm.entrypoints.openai.api_server" and told[-2:] == ["--port", "9000"]
    assert "--enable-lora" in told and "--no-enable-prefix-caching" in told
    expected = {"--model": f"{moved}/model", "--host": "127.0.0.1", "--dtype": "float32", "--max-loras": "7"}
    expected |= {"--served-model-name": "plain", "--lora-target-modules": "down_proj", "--max-cpu-loras": "7"}
    assert {name: told[_after(told, name)] for name in expected} == expected
    modules = told[_after(told, "--lora-modules") : -2]
    assert len(modules) == 7 and modules[:2] == [f"base={moved}/adapters/base", f"0000-plus={moved}/adapters/0000-plus"]
    assert all(Path(module.split("=")[1]).is_dir() for module in modules)
    assert os.access(moved / "serve.sh", os.X_OK) and "serve.sh" in found.files


def test_the_tokenizer_of_the_task_is_beside_the_model(exported: Any) -> None:
    _, _, found = exported
    assert AutoTokenizer.from_pretrained(found.folder / "model").get_vocab() == served.tokenizer().get_vocab()


def test_a_named_model_is_served_by_its_name_with_a_given_tokenizer(exported: Any, tmp_path: Path) -> None:
    task, store, first = exported
    plain = first.folder / "model"
    found = to_vllm(task, store, tmp_path / "x", served.queries(), base=plain)
    told = arguments(found.folder)
    assert told[_after(told, "--model")] == str(plain) and not (found.folder / "model").exists()
    assert told[_after(told, "--tokenizer")] == f"{found.folder}/tokenizer"
    assert "tokenizer/tokenizer.json" in found.files


def test_a_tokenizer_is_asked_for(tmp_path: Path) -> None:
    task, store = _adapted(["down_proj"], 4)
    with pytest.raises(TaskError, match="needs the model's tokenizer, and the task has none"):
        to_vllm(task, store, tmp_path / "x", models.queries())
    with pytest.raises(TaskError, match="must be one of transformers"):
        to_vllm(task, store, tmp_path / "x", models.queries(), tokenizer=str.split)


@pytest.mark.parametrize("layer", ["lm_head"])
def test_an_adapter_of_the_head_is_refused_by_name(layer: str, tmp_path: Path) -> None:
    task, store = _adapted([layer, "down_proj"], 4)
    with pytest.raises(ReadoutError, match=f"'{layer}' has an adapter, .* vLLM leaves adapters there out"):
        to_vllm(task, store, tmp_path / "x", models.queries(), tokenizer=served.tokenizer())
    found = to_peft(task, store, tmp_path / "x", models.queries())
    with pytest.raises(ReadoutError, match=f"'{layer}' has an adapter, .* Read this export with read_peft"):
        RemoteReader(found, "http://127.0.0.1:1")


def test_rank_is_refused_by_a_reader_too(tmp_path: Path) -> None:
    task, store = _adapted(["down_proj"], 513)
    found = to_peft(task, store, tmp_path / "x", models.queries())
    with pytest.raises(ReadoutError, match="has rank 513, and vLLM serves at most 512"):
        RemoteReader(found, "http://127.0.0.1:1")


def test_a_gpt2_is_refused_by_name(tmp_path: Path) -> None:
    task, store = models.prepared("gpt2")
    with pytest.raises(ReadoutError, match="is a Conv1D, as in GPT-2, and vLLM serves no adapters"):
        to_vllm(task, store, tmp_path / "x", models.queries(), tokenizer=served.tokenizer())


def test_the_command_exports_for_vllm_and_compares_a_server(tmp_path: Path) -> None:
    place, out = tmp_path / "objects.py", tmp_path / "x"
    place.write_text(
        "from tests.export import models, served, test_serving\n\n"
        'task = test_serving._adapted(["down_proj"], 4)[0]\nqueries = models.queries()\n'
    )
    _, store = _adapted(["down_proj"], 4)
    served.tokenizer().save_pretrained(tmp_path / "words")
    command = ["export", str(store.path), "--out", str(out), "--task", f"{place}:task", "--format", "vllm"]
    command += ["--tokenizer", str(tmp_path / "words")]
    found = RUNNER.invoke(app, command, catch_exceptions=False)
    assert found.exit_code == 0 and f"start the server: {out}/serve.sh" in found.stdout
    assert (out / "model" / "tokenizer.json").is_file()
    again = RUNNER.invoke(app, [*command, "--out", str(tmp_path / "y"), "--json"], catch_exceptions=False)
    assert json.loads(again.stdout)["serve"] == str(tmp_path / "y" / "serve.sh")
    with running(Export.open(out)) as fake:
        same = RUNNER.invoke(app, ["verify", str(out), "--url", fake.url, "--json"], catch_exceptions=False)
        told = json.loads(same.stdout)
        assert told["sound"] and told["server"]["adapters"] == 7 and told["server"]["deviation"] < 1e-4
        shown = RUNNER.invoke(app, ["verify", str(out), "--url", fake.url], catch_exceptions=False)
        assert "files match their checksums" in shown.stdout and "nats of PyTorch's" in shown.stdout
        fake.answers_as = lambda _: "base"
        with pytest.raises(ReadoutError, match="does not serve the adapter"):
            RUNNER.invoke(app, ["verify", str(out), "--url", fake.url], catch_exceptions=False)


def test_verify_checks_the_files_of_an_export(exported: Any, tmp_path: Path) -> None:
    _, store, found = exported
    copy = tmp_path / "x"
    shutil.copytree(found.folder, copy)
    assert "all 16 files match" in RUNNER.invoke(app, ["verify", str(copy)], catch_exceptions=False).stdout
    with (copy / "serve.sh").open("a") as script:
        script.write("true\n")
    with pytest.raises(RuntimeError, match=r"serve\.sh is not the file that was exported"):
        RUNNER.invoke(app, ["verify", str(copy)], catch_exceptions=False)
    with pytest.raises(ConfigurationError, match="--url compares a server with an export"):
        RUNNER.invoke(app, ["verify", str(store.path), "--url", "http://127.0.0.1:1"], catch_exceptions=False)


def test_a_tokenizer_is_for_vllm_only(exported: Any, tmp_path: Path) -> None:
    _, store, _ = exported
    command = ["export", str(store.path), "--out", str(tmp_path / "x"), "--tokenizer", str(tmp_path / "none")]
    with pytest.raises(ConfigurationError, match="--tokenizer applies to --format vllm only"):
        RUNNER.invoke(app, command, catch_exceptions=False)
    with pytest.raises(ConfigurationError, match=r"the tokenizer '.*none' cannot be loaded"):
        RUNNER.invoke(app, [*command, "--format", "vllm"], catch_exceptions=False)


_ADAPTED: dict[tuple[str, int], tuple[Task, Any]] = {}


def _adapted(targets: list[str], rank: int) -> tuple[Task, Any]:
    """A tiny Llama with adapters of a rank, and the store of a path."""
    key = (",".join(targets), rank)
    if key not in _ADAPTED:
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, task_type="CAUSAL_LM")
        task = models.task(peft.get_peft_model(models.llama(), config).eval())
        plan = Plan(engine="tangent", steps=2, lr=0.5)
        _ADAPTED[key] = task, simulate(task, models.data(), models.sources(), plan, progress=False)
    return _ADAPTED[key]


def _after(told: list[str], name: str) -> int:
    return told.index(name) + 1

"""Scores by bergson 2.5, for a language model fine-tuned with LoRA: SOURCE along its run, and EK-FAC at its end.

bergson needs packages that this library does without (datasets, pyarrow, torchopt), so it runs in an environment of its
own. It also asks for torchvision, torchaudio and bitsandbytes, and works without:

    python -m venv bergson
    bergson/bin/pip install torch transformers peft accelerate safetensors datasets scipy natsort
    bergson/bin/pip install ml_dtypes jaxtyping simple-parsing torchopt petname jinja2
    bergson/bin/pip install --no-deps bergson==2.5.1

`source` and `ekfac` write models and columns into a folder, and have that environment's Python run this file on it, on
a GPU if it sees one. Columns are those of `imprint.language`: `input_ids` and `weights`, both (rows, length). bergson
takes the mean over a row's tokens that count, so these must have equal weights.

Its MAGIC differentiates through a run that it trains itself, and each query costs more than that run: too much for a
table of queries, so it is not here.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Columns = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """The model after some steps of its run.

    model: a PEFT model with a LoRA adapter.
    second_moments: `exp_avg_sq` of AdamW by name of the parameter, as they are kept: without correction of their bias.
    """

    model: Any
    step: int
    second_moments: dict[str, Tensor]


def source(
    checkpoints: Sequence[Checkpoint],
    train: Columns,
    queries: Columns,
    damping: float,
    *,
    lr: float,
    folder: str | Path,
    python: str | Path,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Tensor:
    """Return SOURCE scores, (queries, examples): positive where more weight raises the likelihood.

    A score is the predicted rise of the query's log-likelihood when the example counts twice in the mean loss. Every
    checkpoint ends a segment of the run, in which gradients and curvature (EK-FAC) are taken to be the checkpoint's,
    preconditioned by the second moments of AdamW (Bae et al. 2024, appendix C).

    damping: what is added to the eigenvalues of the curvature, as a share of their mean in each layer.
    lr: the learning rate, of all steps. python: the interpreter that has bergson.
    """
    folder = _empty(folder)
    for checkpoint in checkpoints:
        place = _save_adapter(checkpoint.model, folder, f"checkpoint-{checkpoint.step}")
        state = {
            index: {"exp_avg_sq": moment.cpu(), "step": checkpoint.step, "param_name": name}
            for index, (name, moment) in enumerate(checkpoint.second_moments.items())
        }
        torch.save({"state": state, "param_groups": [{"betas": betas, "eps": eps}]}, place / "optimizer.pt")
    ends = [checkpoint.step for checkpoint in checkpoints]
    steps = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    job = {"method": "source", "steps": ends, "lengths": steps, "lr": lr, "damping": damping}
    return _run(job, train, queries, folder, python)


def ekfac(
    model: Any, train: Columns, queries: Columns, damping: float, *, folder: str | Path, python: str | Path
) -> Tensor:
    """Return EK-FAC scores of the same meaning, (queries, examples), at a single model."""
    folder = _empty(folder)
    _save_adapter(model, folder, "checkpoint-1")
    return _run({"method": "ekfac", "steps": [1], "damping": damping}, train, queries, folder, python)


def _run(job: dict[str, Any], train: Columns, queries: Columns, folder: Path, python: str | Path) -> Tensor:
    """Have bergson score, and give its scores of mean losses the weights of the rows."""
    weights = [_row_weights(columns) for columns in (queries, train)]
    for name, columns in (("train", train), ("queries", queries)):
        save_file(
            {key: columns[key].cpu().contiguous() for key in ("input_ids", "weights")}, folder / f"{name}.safetensors"
        )
    (folder / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    with (folder / "log").open("w") as log:
        ended = subprocess.run(
            [str(python), __file__, str(folder)], stdout=log, stderr=log, env=environment, check=False
        )
    if ended.returncode:
        raise RuntimeError(f"bergson exited with status {ended.returncode}: {folder / 'log'} tells why.")
    scores = load_file(folder / "scores.safetensors")["scores"].double()
    return weights[0][:, None] * scores * weights[1] / len(weights[1])


def _row_weights(columns: Columns) -> Tensor:
    """Return the sum of every row's weights, which have to be equal."""
    weights = columns["weights"].cpu().double()
    most = weights.max(1, keepdim=True).values
    if not torch.isclose(torch.where(weights > 0, weights, most), most).all():
        raise ValueError("bergson weighs the tokens of a row equally, and these columns do not.")
    return weights.sum(1)


def _empty(folder: str | Path) -> Path:
    """Return the folder, without what an earlier call left there: bergson would take it for its own."""
    place = Path(folder).resolve()
    for name in ("run", "base", "train.hf", "queries.hf"):
        shutil.rmtree(place / name, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    return place


def _save_adapter(model: Any, folder: Path, name: str) -> Path:
    """Save the adapter as a checkpoint, and once for all checkpoints the model beneath."""
    base, place = folder / "base", folder / name
    if not base.is_dir():
        copy.deepcopy(model).unload().save_pretrained(base)
    named = copy.copy(model.active_peft_config)
    named.base_model_name_or_path = str(base)
    model.save_pretrained(place)
    named.save_pretrained(place)
    shutil.copy(base / "config.json", place)  # bergson asks a checkpoint what model it is of
    return place


def main(folder: Path) -> None:
    """Score with bergson: this runs in its environment."""
    from bergson.config.config import (
        ApproxUnrollingConfig,
        DataConfig,
        HessianConfig,
        HessianPipelineConfig,
        IndexConfig,
        InversionConfig,
        PreprocessConfig,
        QuerySetConfig,
        ScoreConfig,
    )
    from bergson.data import load_scores

    job = json.loads((folder / "job.json").read_text())
    _write_tokenizer(folder / "tokenizer")
    data, asked = (str(_write_dataset(folder, name)) for name in ("train", "queries"))
    places = [str(folder / f"checkpoint-{step}") for step in job["steps"]]
    index = IndexConfig(
        run_path=str(folder / "run"),
        overwrite=True,
        model=places[-1],
        tokenizer=str(folder / "tokenizer"),
        data=DataConfig(dataset=data),
        model_kwargs="attn_implementation=eager",
        loss_reduction="mean",
    )
    curvature = HessianConfig(method="kfac", ev_correction=True)
    inversion = InversionConfig(inversion="damped_inverse", damping_factor=job["damping"])
    query = QuerySetConfig(dataset=asked, aggregation="none")
    if job["method"] == "ekfac":
        from bergson.hessians.pipeline import hessian_pipeline

        pipeline = HessianPipelineConfig(query=query, inversion_cfg=inversion)
        hessian_pipeline(index, curvature, ScoreConfig(), PreprocessConfig(), pipeline)
        sign = 1.0
    else:
        from bergson.approx_unrolling.pipeline import approx_unrolling_pipeline

        unrolling = ApproxUnrollingConfig(
            checkpoints=places,
            segments=len(places),
            lr_list=[job["lr"]] * len(places),
            step_size_list=job["lengths"],
            use_adam_preconditioner=True,
            inversion_cfg=inversion,
            query=query,
        )
        approx_unrolling_pipeline(index, curvature, unrolling)
        sign = -1.0  # bergson predicts the change of the query's loss here
    found = torch.tensor(load_scores(folder / "run" / "scores")[:])  # (examples, queries)
    save_file({"scores": (sign * found.T).contiguous()}, folder / "scores.safetensors")


def _write_tokenizer(place: Path) -> None:
    """Write a tokenizer that knows no word: bergson loads one, and the columns have tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    wordless = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=wordless, unk_token="<unk>").save_pretrained(place)


def _write_dataset(folder: Path, name: str) -> Path:
    """Write columns as a dataset with labels, which are −100 where a token does not count."""
    from datasets import Dataset

    columns = load_file(folder / f"{name}.safetensors")
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": []}
    for ids, weights in zip(columns["input_ids"], columns["weights"], strict=True):
        length = int(weights.nonzero().max()) + 1
        rows["input_ids"].append(ids[:length].tolist())
        rows["labels"].append(ids.masked_fill(weights == 0, -100)[:length].tolist())
        rows["length"].append(length)
    place = folder / f"{name}.hf"
    Dataset.from_dict(rows).save_to_disk(str(place))
    return place


if __name__ == "__main__":
    main(Path(sys.argv[1]))

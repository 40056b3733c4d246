"""A GPT-2 with dropout is replayed as it was trained, in whichever way its attention is computed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.simulation.engines.test_replay_rows import check, replay_plainly, replay_stacked
from tests.simulation.engines.trainings import Training

pytestmark = pytest.mark.wide


def gpt2(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None,
        use_cache=False, attn_implementation=attention, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config).double()
    return model


def next_tokens(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0]).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch[0][:, 1:], reduction="none")
    return losses.mean(1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_of_a_gpt2_are_the_trainings_at_weight_0(attention: str) -> None:
    tokens = torch.randint(0, 13, (40, 8), generator=torch.Generator().manual_seed(0))
    settings = {"lr": 0.05, "momentum": 0.9}
    training = Training(gpt2(attention), (tokens,), settings=settings, steps=4, losses=next_tokens)
    _, run = training.run()
    check(replay_stacked(training, run), training)
    check(replay_plainly(training, run), training)

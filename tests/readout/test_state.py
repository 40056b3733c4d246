"""A readout leaves the caller's state as it was, inside inference mode and outside."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Store, Task, attribute
from imprint.readout.kernels import ReadoutName
from imprint.task import Batch
from tests.readout.reading import FORWARD_ONLY, columns, new_model, scored, simulated


@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_scores_are_the_same_inside_inference_mode(readout: ReadoutName, task: Task, store: Store) -> None:
    outside = scored(task, store, readout=readout)
    assert float(outside.abs().min()) > 0
    with torch.inference_mode():
        inside = scored(task, store, readout=readout)
    torch.testing.assert_close(inside, outside)


@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_queries_made_inside_inference_mode_are_scored_the_same(readout: ReadoutName, task: Task, store: Store) -> None:
    with torch.inference_mode():
        queries = columns(5, 2)
        assert queries[0].is_inference()
        inside = scored(task, store, queries, readout=readout)
        batches = scored(task, store, iter([queries]), readout=readout)
    expected = scored(task, store, readout=readout)
    torch.testing.assert_close(inside, expected)
    torch.testing.assert_close(batches, expected)
    torch.testing.assert_close(scored(task, store, queries, readout=readout), expected)


@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_a_model_made_inside_inference_mode_is_scored_the_same(readout: ReadoutName, task: Task, store: Store) -> None:
    with torch.inference_mode():
        twin = Task.classifier(new_model(), measure="margin")
        assert twin.model.get_parameter("0.weight").is_inference()
        inside = scored(twin, store, readout=readout)
    expected = scored(task, store, readout=readout)
    torch.testing.assert_close(inside, expected)
    torch.testing.assert_close(scored(twin, store, readout=readout), expected)


@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_a_readout_leaves_inference_mode_and_comes_back_to_it(readout: ReadoutName, store: Store) -> None:
    """Inside it, forward mode returns zeros in some versions of torch."""
    seen: set[bool] = set()

    def measure(model: nn.Module, batch: Batch) -> Tensor:
        seen.add(torch.is_inference_mode_enabled())
        return model(batch[0])[:, 0]  # type: ignore[no-any-return]

    with torch.inference_mode():
        scored(Task.classifier(new_model(), measure=measure), store, readout=readout)
        assert torch.is_inference_mode_enabled()
    assert seen == {False}


def test_scores_made_inside_inference_mode_can_be_used_outside(task: Task, store: Store) -> None:
    with torch.inference_mode():
        result = attribute(task, store, columns(5, 2), progress=False)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    (weight @ result.removal_effect).sum().backward()
    assert weight.grad is not None


def _flags() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        torch.backends.mha.get_fastpath_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _mixed_modes(model: nn.Module) -> list[bool]:
    """Training mode with two submodules left in evaluation mode, as for frozen batch norm."""
    model.train()
    model.get_submodule("0").eval()
    model.get_submodule("2").eval()
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
@pytest.mark.parametrize("readout", [*FORWARD_ONLY, "gradient"])
def test_modes_and_attention_settings_come_back_after_a_readout(
    readout: ReadoutName, fails: bool, store: Store
) -> None:
    def measure(model: nn.Module, batch: Batch) -> Tensor:
        assert not any(module.training for module in model.modules())
        assert _flags()[:3] == (False, False, False)
        if fails:
            raise RuntimeError("nothing to see")
        return model(batch[0])[:, 0]  # type: ignore[no-any-return]

    task = Task.classifier(new_model(), measure=measure)
    modes, flags = _mixed_modes(task.model), _flags()
    assert flags[0] and any(flags[1:3])
    if fails:
        with pytest.raises(Exception, match="nothing to see"):
            scored(task, store, readout=readout)
    else:
        scored(task, store, readout=readout)
    assert [module.training for module in task.model.modules()] == modes
    assert _flags() == flags


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
def test_modes_and_attention_settings_come_back_after_a_simulation(fails: bool) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if fails:
            raise RuntimeError("nothing to see")
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    task = Task(new_model(), loss)
    modes, flags = _mixed_modes(task.model), _flags()
    if fails:
        with pytest.raises(Exception, match="nothing to see"):
            simulated(task)
    else:
        simulated(task)
    assert [module.training for module in task.model.modules()] == modes
    assert _flags() == flags


def test_a_disabled_fast_path_stays_disabled(task: Task, store: Store) -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        scored(task, store)
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_neither_weights_nor_queries_are_touched(task: Task, store: Store) -> None:
    before, queries = task.state(), columns(5, 2)
    for readout in (*FORWARD_ONLY, "gradient"):
        scored(task, store, queries, readout=readout)
    for name, tensor in task.state().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in task.model.parameters())
    assert all(torch.equal(*pair) for pair in zip(queries, columns(5, 2), strict=True))

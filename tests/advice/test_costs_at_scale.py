"""The formulas of the cost model against cases computed by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imprint.advice import stages
from imprint.advice.devices import NAMES, Constant, Device, ProfileError
from imprint.advice.shapes import Carrier, Operations, Shape, Work, forward, training_step
from imprint.advice.stages import Model, Run
from imprint.errors import PlanError

SHAPE = Shape(layers=4, width=10, vocabulary=20, length=8, parameters=4200)  # blocks of 1,000 values, a head of 200
ALL, LAST, ADAPTER = Carrier("all"), Carrier("last", last=1), Carrier("adapter", 2)


def device(overlaps: bool = False, **values: float) -> Device:
    """A device that does a FLOP a second and nothing else takes time, unless it is said."""
    free = dict.fromkeys(NAMES, 0.0) | {"bandwidth": float("inf"), "disk": float("inf"), "memory": 1e9}
    known = {name: Constant(value, "by hand") for name, value in {**free, **values}.items()}
    return Device("a device", overlaps, known, ((10, 1.0),), ((10, 1.0),), "by hand")


def test_a_forward_pass_costs_two_flops_per_value_and_token_and_attention_over_all_pairs() -> None:
    assert SHAPE.block_flops(8) == 8 * (2 * 1000 + 4 * 8 * 10)
    assert forward(SHAPE, 8, Operations(30, 90, 20)) == Work(4 * 30 + 20, forward=4 * 8 * 2320 + 8 * 400)


def test_a_step_is_three_forwards_and_two_of_frozen_weights() -> None:
    full, frozen = (training_step(SHAPE, carrier, 8, Operations()).training for carrier in (ALL, ADAPTER))
    one = SHAPE.forward_flops(8)
    assert full == 3 * one
    assert frozen == 2 * one + 6 * 8 * ADAPTER.values(SHAPE)


def test_checkpointing_adds_a_forward_pass_of_the_blocks_that_are_trained() -> None:
    for carrier, blocks in ((ALL, 4), (LAST, 1)):
        plain, again = (training_step(SHAPE, carrier, 8, Operations(), checkpointed=c).training for c in (False, True))
        assert again - plain == blocks * SHAPE.block_flops(8)


def test_a_replay_in_turn_is_a_training_per_source_and_three_more() -> None:
    run, model = Run(tokens=80, batch=8, compared=0), Model(SHAPE, ALL)
    step = 3 * SHAPE.forward_flops(8)
    found = stages.replay(device(), model, run, 5, stacked=False)
    assert found.seconds == pytest.approx((10 * (5 + 3) + 6) * step)
    assert found.stored == (5 + 2 + 1) * 4200 * 4


def test_a_stack_shares_operations_and_no_flops() -> None:
    run, model = Run(tokens=80, batch=8, compared=0), Model(SHAPE, ALL)
    one = training_step(SHAPE, ALL, 8, Operations(0, 1)).operations
    known: dict[str, Any] = {
        "block operations, training": 1.0,
        "dispatch": 1e6,
        "stacked operations": 2.0,
        "stacked work": 0.0,
    }
    found = stages.replay(device(**known), model, run, 5, stacked=True)
    compared = (5 + 3 + 2) * Operations().head
    starting = 1e6 * (one * (10 * (1 + 2) + 6) + compared)
    assert found.seconds - starting == pytest.approx((10 + 6) * 3 * SHAPE.forward_flops(8), rel=1e-3)
    assert found.binding == "starting operations"


def test_a_later_start_leaves_out_its_share_and_replays_two_sources_twice() -> None:
    run, model = Run(tokens=800, batch=8, compared=0), Model(SHAPE, ALL)
    step = 3 * SHAPE.forward_flops(8)
    found = stages.replay(device(), model, run, 50, stacked=False, start=0.9)
    assert found.seconds == pytest.approx((10 * 53 + 2 * (100 + 10) + 6) * step)
    with pytest.raises(PlanError, match="start is the share"):
        stages.replay(device(), model, run, 50, stacked=False, start=1.0)


def test_a_path_costs_forwards_by_steps_and_sources_in_the_blocks_that_carry_imprints() -> None:
    known = device(response=7.0, settling=100.0)
    one = LAST.blocks(SHAPE) * SHAPE.block_flops(8) + SHAPE.head_flops(8)
    base = training_step(SHAPE, LAST, 8, Operations()).training
    found = stages.tangent(known, Model(SHAPE, ALL), LAST, 6, steps=9, tokens=8)
    assert found.seconds == pytest.approx(10 * (base + 6 * 7 * one) + 100 * one)
    sampled = stages.tangent(known, Model(SHAPE, ALL), LAST, 6, steps=9, tokens=8, sampled=8)
    assert sampled.seconds - found.seconds == pytest.approx(10 * 6 * base)


def test_a_closed_form_costs_products_and_one_gradient_of_each_example() -> None:
    known = device(product=4.0)
    one = LAST.blocks(SHAPE) * SHAPE.block_flops(80) + SHAPE.head_flops(80)
    found = stages.spectral(known, Model(SHAPE, ALL), LAST, 6, directions=5, tokens=80)
    gradients = training_step(SHAPE, LAST, 80, Operations()).training
    assert found.seconds == pytest.approx(5 * 4 * one + gradients + (4 * 5 * 6 + 4 * 25) * 1000)


def test_a_readout_reads_every_imprint_and_repeats_the_blocks_behind_for_each_source() -> None:
    known = device(jvp=1.5, bandwidth=1.0)
    found = stages.readout(known, Model(SHAPE, ALL), LAST, 6, queries=2)
    work = SHAPE.forward_flops(16) + SHAPE.head_flops(16) + 6 * 1.5 * SHAPE.block_flops(16)
    assert found.seconds == pytest.approx(work + 6 * 1000 * 4)
    halves = stages.readout(known, Model(SHAPE, ALL), LAST, 6, queries=2, itemsize=2)
    assert found.seconds - halves.seconds == pytest.approx(6 * 1000 * 2)


def test_derivatives_along_an_adapter_are_counted_by_themselves_from_the_end_of_its_first_block() -> None:
    counts: dict[str, Any] = {"jvp": 1000.0, "jvp, adapter": 3.0}
    known, lora = device(**counts), Carrier("lora", 1, last=2)
    found = stages.readout(known, Model(SHAPE, ALL), lora, 6, queries=2)
    plain = SHAPE.forward_flops(16) + SHAPE.head_flops(16)
    assert found.seconds == pytest.approx(plain + 6 * 3 * (2 - 2 / 3) * SHAPE.block_flops(16))


def test_a_backward_pass_covers_all_sources_and_the_imprints_are_read_for_products() -> None:
    known = device(bandwidth=1.0)
    found = stages.gradient(known, Model(SHAPE, ALL), LAST, 6, queries=2)
    step = training_step(SHAPE, LAST, 16, Operations()).training
    assert found.seconds == pytest.approx(step + 2 * 2 * 6 * 1000 + 6 * 1000 * 4)


def test_a_readout_of_replays_is_a_forward_pass_per_source_and_one() -> None:
    found = stages.removed(device(), Model(SHAPE, ADAPTER), 6, queries=2)
    assert found.seconds == pytest.approx(7 * SHAPE.forward_flops(16))


def test_what_overlaps_takes_as_long_as_the_longest_and_the_disk_comes_after() -> None:
    work = Work(operations=3, forward=10, moved=4, written=5)
    known: dict[str, Any] = {"dispatch": 1.0, "bandwidth": 1.0, "disk": 1.0}
    assert device(overlaps=False, **known).seconds(work, 10) == 3 + 10 + 4 + 5
    assert device(overlaps=True, **known).seconds(work, 10) == 10 + 5
    assert device(overlaps=True, **known).binding(work, 10) == "computing"


@pytest.mark.parametrize(
    ("text", "values"),
    [("all", 4200), ("last:2", 2000), ("lora:3", 4 * 3 * 40), ("lora:3:last:1", 120), ("adapter:2", 4 * 16 * 20)],
)
def test_values_of_what_carries_imprints(text: str, values: int) -> None:
    assert Carrier.read(text).values(SHAPE) == values


@pytest.mark.parametrize(
    ("carrier", "measured"),
    [("last:12", 3.1), ("last:2", 1.6), ("last:1", 1.5), ("lora:16", 2.1), ("lora:16:last:2", 1.4)],
)
def test_backward_passes_cost_the_forwards_that_were_measured_of_gpt2_on_a_gpu(carrier: str, measured: float) -> None:
    """The column `gradient`, sixteen queries, of docs/language.md, to which nothing was fitted."""
    gpt2 = Shape(layers=12, width=768, vocabulary=50257, length=256)
    counted = training_step(gpt2, Carrier.read(carrier), 1, Operations()).training / gpt2.forward_flops(1)
    assert counted == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("text", ["", "last", "last:0", "lora:x", "lora:2:first:1", "all:2", "last:2:3", "adapter:1:2"])
def test_what_carries_imprints_is_read_or_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not understood"):
        Carrier.read(text)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(PlanError, match="layers must be at least 1"):
        replace(SHAPE, layers=0)
    with pytest.raises(PlanError, match="fewer than an embedding"):
        replace(SHAPE, parameters=100)
    with pytest.raises(PlanError, match="a batch has more than 0"):
        Run(tokens=10, batch=20)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    known = device(bandwidth=3.0, disk=2.0)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"profile": known.to_json(), "points": []}))
    assert Device.load(file) == known


def test_a_constant_without_a_source_is_refused() -> None:
    content = device(bandwidth=3.0, disk=2.0).to_json()
    content["constants"]["jvp"]["source"] = ""
    with pytest.raises(ProfileError, match="without a source, or not finite: jvp"):
        Device.from_json(content)
    with pytest.raises(ProfileError, match="no profile of a device"):
        Device.from_json({"name": "x"})


def test_a_constant_that_is_missing_is_named() -> None:
    known = device()
    lacking = replace(known, constants={name: each for name, each in known.constants.items() if name != "jvp"})
    with pytest.raises(ProfileError, match="no 'jvp'"):
        stages.readout(lacking, Model(SHAPE, ALL), LAST, 6, queries=2)

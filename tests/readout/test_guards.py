"""Guards of a readout: each fires on a planted case and none on the zoo; results repeat every warning."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import Attribution, Plan, Sources, Task, attribute, simulate
from imprint.attribution.labels import Labels
from imprint.errors import ReliabilityWarning
from imprint.readout.guards import Observed, warn_beyond_range, warn_opposed
from tests.zoo import ZOO

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ZOO)
def test_no_ordinary_task_is_warned_of(name: str) -> None:
    member = ZOO[name].make(CPU, torch.float32)
    engine: Any = "tangent" if ZOO[name].forward_mode else "trajectories"
    options: Any = {"collate_fn": member.collate_fn, "progress": False}
    store = simulate(member.task, member.data, member.sources, Plan(engine=engine, steps=3, lr=0.05), **options)
    for queries in (member.queries, member.data):
        assert attribute(member.task, store, queries, **options).warnings == ()


def test_an_effect_beyond_the_range_of_the_measurement_is_named() -> None:
    values = [0.1, 2.3, 0.02, 0.4]
    assert warn_beyond_range(6.8, values) is None
    assert "by 7, where it is 2.3 at most" in str(warn_beyond_range(7.0, values))
    assert warn_beyond_range(7.0, [-5.0, 5.0, 0.0, 0.0]) is None  # F runs over ten
    assert warn_beyond_range(2.9, [0.001], unit=1.0) is None  # nats: a sure prediction may become an unsure one
    assert warn_beyond_range(49.8, [0.17], unit=1.0) is not None
    assert warn_beyond_range(49.8, [0.17]) is None  # one value of anything tells no range


def test_checkpoints_of_opposite_scores_are_named() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(8, 30, generator=generator)
    noise = torch.randn(3, 8, 30, generator=generator)
    shares = [0.25, 0.5, 0.25]

    def found(*each: torch.Tensor) -> ReliabilityWarning | None:
        seen = Observed()
        for part in (slice(0, 10), slice(10, 30)):  # in blocks, as a readout comes
            seen.add(1.0, [scores[:, part] for scores in each])
        assert seen.products is not None
        return warn_opposed(seen.products, [0, 1, 3], shares)

    agreeing = [one + 0.5 * extra for extra in noise]
    assert found(*agreeing) is None
    assert found(*noise) is None  # nothing in common is no disagreement
    assert str(found(agreeing[0], agreeing[1], -agreeing[2])).startswith("checkpoint 3 disagrees with the others")
    assert found(one, one, torch.zeros_like(one)) is None


def linear(seed: int = 0) -> tuple[Task, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(12, 4, generator=generator), torch.arange(12) % 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Task.classifier(nn.Linear(4, 3)), (x, y)


SOURCES = Sources.by_label([index % 4 for index in range(12)], names={0: "a", 1: "b", 2: "c", 3: "d"})


@pytest.mark.filterwarnings("ignore:.*may diverge")
def test_an_exploded_simulation_is_warned_of_by_its_result() -> None:
    task, data = linear()
    store = simulate(task, data, SOURCES, Plan(steps=6, lr=30.0), progress=False)
    with pytest.warns(ReliabilityWarning, match="is predicted to change the measurement by") as caught:
        result = attribute(task, store, data, progress=False)
    assert float(result.removal_effect.abs().max()) > 100
    assert len(caught) == 1  # the store's own was shown when it was made
    assert result.warnings == (*store.warnings, str(caught[0].message)) and len(result.warnings) == 2
    with pytest.warns(ReliabilityWarning):
        assert attribute(task, store, data, top=2, progress=False).warnings == result.warnings


@pytest.mark.filterwarnings("ignore:checkpoint")
def test_checkpoints_that_disagree_are_warned_of_by_the_result() -> None:
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(12)
    task = Task.regression(nn.Linear(4, 1), measure=lambda model, batch: model(batch[0]).squeeze(1))
    above, below = ({**task.state(), "bias": torch.tensor([bias])} for bias in (100.0, -100.0))
    found = []
    for checkpoints in ([above, below], [above, above]):  # residuals, and with them all scores, change their sign
        store = simulate(task, (x, y), SOURCES, Plan(steps=1, lr=0.01), checkpoints=checkpoints, progress=False)
        found.append(attribute(task, store, (x, y), progress=False).warnings)
    assert any("disagrees with the others" in warning for warning in found[0]) and found[1] == ()


def test_every_form_of_a_result_repeats_its_warnings(tmp_path: Path) -> None:
    names = ("a", "b")
    labels = Labels(10, names, names, (5, 5), "loss", "lower", warnings=("take <care>",))
    result = Attribution(labels, torch.tensor([[1.0, 2.0]]))
    assert "\nwarning: take <care>" in repr(result) and "\nwarning: take <care>" in repr(result.top(1))
    assert repr(result).count("warning") == 1
    assert "take &lt;care&gt;" in result._repr_html_() and "<care>" not in result._repr_html_()
    assert result.top(1).to_json()["warnings"] == ["take <care>"]
    result.save(tmp_path / "result.safetensors")
    assert Attribution.load(tmp_path / "result.safetensors").warnings == ("take <care>",)
    for other in (result[0], result.mean(), result.top(1)):
        assert other.warnings == result.warnings
    calm = Attribution(replace(labels, warnings=()), result.scores)
    assert "warning" not in repr(calm) and "warning" not in calm._repr_html_()

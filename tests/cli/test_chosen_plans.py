"""A plan that is chosen where `auto` is asked for."""

import re
from pathlib import Path

import pytest

import imprint
from imprint import Plan, Store
from tests.cli.commands import Command, loaded


@pytest.mark.parametrize("sources", ["sources", "per-example"])
def test_a_plan_is_chosen_where_auto_is_asked_for(command: Command, here: Path, tmp_path: Path, sources: str) -> None:
    given = ("simulate", "model.py:task", "--sources", sources, "-p", "auto", "--out", tmp_path / "store", "--json")
    assert command(*given).code == 0
    objects = loaded(here / "model.py")
    units = objects.sources if sources == "sources" else imprint.Sources.per_example(12)
    assert Store(tmp_path / "store").manifest.plan == Plan.auto(objects.task, objects.data, units, progress=False)
    again = command(*given)
    assert again.code == 0 and "only checking that it matches" in again.err
    assert command("check", "model.py:task", "--sources", sources, "-p", "auto", "--json").values["ok"]


def test_what_is_given_besides_goes_over_the_chosen_plan(command: Command, here: Path, tmp_path: Path) -> None:
    given = ("simulate", "model.py:task", "--no-check", "-p", "auto", "-p", "steps=7", "-o", tmp_path / "store")
    assert command(*given).code == 0
    plan = Store(tmp_path / "store").manifest.plan
    assert plan.steps == 7 and plan.curvature == "gauss-newton"


def test_auto_goes_over_the_plan_of_a_file_or_a_store(command: Command, here: Path, tmp_path: Path) -> None:
    config = tmp_path / "some.toml"
    config.write_text(f'task = "{here / "model.py"}:task"\n[plan]\nsteps = 2\nlr = 0.5\n')
    from_file = ("simulate", "--config", config, "--no-check", "-p", "auto", "-o", tmp_path / "one")
    from_store = (
        "simulate",
        "model.py:task",
        "--repeat",
        "runs/news",
        "--no-check",
        "-p",
        "auto",
        "-o",
        tmp_path / "two",
    )
    for given in (from_file, from_store):
        assert command(*given).code == 0
        plan = Store(given[-1]).manifest.plan
        assert plan.curvature == "gauss-newton" and plan.steps != 2 and plan.lr not in (0.5, 0.1)
    config.write_text(f'task = "{here / "model.py"}:task"\n[plan]\nauto = true\n')
    assert command("simulate", "--config", config, "--no-check", "-o", tmp_path / "three").code == 0
    assert Store(tmp_path / "three").manifest.plan == Store(tmp_path / "one").manifest.plan


def test_the_chosen_plan_is_shown(command: Command, here: Path, tmp_path: Path) -> None:
    checked = command("check", "model.py:task", "--sources", "per-example", "-p", "auto")
    assert re.search(r"plan +│ spectral, Gauss–Newton; steps infinite; lr auto; damping 0\.\d+; weight 1 ", checked.out)
    simulated = command("simulate", "model.py:task", "-p", "auto", "-o", tmp_path / "store")
    plan = Store(tmp_path / "store").manifest.plan
    assert isinstance(plan.steps, tuple) and f"tangent, Gauss–Newton; steps {plan.steps[0]}; lr " in simulated.err


def test_per_example_is_suggested_where_it_is_misspelt(command: Command, here: Path) -> None:
    found = command("check", "model.py:task", "--sources", "per_example")
    assert found.code == 1 and "there is no 'per_example'; did you mean per-example?" in found.err

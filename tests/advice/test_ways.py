"""Which way is the cheapest, from planted costs."""

import pytest

from imprint.advice.ways import SEEDS, Way, advise, list_ways
from imprint.plan import Question
from tests.advice.planted import UNKNOWN, costs, simulation, training


def by_task(ways: tuple[Way, ...]) -> dict[str, Way]:
    return {way.task: way for way in ways}


def test_every_way_says_which_question_it_answers_and_whether_it_measures() -> None:
    found = {way.task: (way.name, way.question, way.measures) for way in list_ways(costs())}
    assert found == {
        "retrain from 3 seeds": ("retrain", "expected", True),
        "replay this run": ("repeat", "this_run", True),
        "replay 3 recorded runs": ("repeat", "expected", True),
        "simulate": ("simulate", "expected", False),
    }


def test_retraining_is_a_training_on_everything_and_one_without_each_source_from_each_seed() -> None:
    retrain, *_ = list_ways(costs(training=training(2.0)))
    assert retrain.seconds == SEEDS * 13 * 2.0
    assert retrain.how.startswith("13 trainings from each of 3 seeds") and retrain.how.endswith("one by one")
    assert (retrain.peak_bytes, retrain.disk_bytes) == (500, 0)


def test_models_that_are_trained_together_count_by_the_stack() -> None:
    together = training(2.0, at_once=13, seconds_at_once=5.0)
    retrain, this_run, expected, _ = list_ways(costs(training=together))
    assert retrain.seconds == SEEDS * 5.0 and retrain.how.endswith("13 at once")
    assert this_run.seconds == pytest.approx(2.0 + 15 / 13 * 5.0)  # recorded by itself
    assert expected.seconds == pytest.approx(SEEDS * (this_run.seconds or 0))


def test_a_replay_costs_what_was_measured_of_it() -> None:
    measured = simulation(7.0, peak_bytes=11, disk_bytes=12, rows_at_once=6)
    _, this_run, expected, _ = list_ways(costs(replay=measured))
    assert (this_run.seconds, this_run.peak_bytes, this_run.disk_bytes) == (7.0, 11, 12)
    assert this_run.how == "repeat the recorded run once per source, 6 at once"
    assert expected.seconds == SEEDS * (1.0 + 7.0)
    _, this_run, *_ = list_ways(costs(replay=simulation(7.0, one_by_one="batch norm")))
    assert this_run.how.endswith("one by one")


def test_a_replay_that_is_not_recorded_yet_includes_the_recording() -> None:
    _, this_run, *_ = list_ways(costs(trainings=15))
    assert this_run.seconds == 1.0 + 15 * 1.0
    assert this_run.how == "record the run, and repeat it once per source; less where many run at once"


def test_a_small_model_with_few_sources_is_better_retrained() -> None:
    advice = advise(list_ways(costs(training=training(0.5), simulation=simulation(70.0))), "expected")
    assert advice == (
        "To know what to expect of training without each source, retrain from 3 seeds: about 20 s, against 24 s to "
        "replay 3 recorded runs and 70 s to simulate; this measures what a simulation only estimates."
    )


def test_a_long_training_is_better_simulated() -> None:
    advice = advise(list_ways(costs(training=training(3600.0), simulation=simulation(70.0))), "expected")
    assert advice.startswith("To know what to expect of training without each source, simulate: about 70 s, against ")
    assert "against 39:00:00 to retrain from 3 seeds and 48:00:00 to replay 3 recorded runs" in advice
    assert advice.endswith("; this is an estimate, so validate it (imprint validate).")


def test_many_sources_tip_the_scales() -> None:
    """The same training, and a simulation that takes as long for any number of sources."""
    few, many = (advise(list_ways(costs(sources=count, trainings=count + 3)), "expected") for count in (3, 1000))
    assert ", retrain from 3 seeds: about 12 s" in few
    assert ", simulate: about 60 s" in many


@pytest.mark.parametrize("seconds", [0.001, 1e6])
def test_only_a_replay_answers_for_this_run_whatever_it_takes(seconds: float) -> None:
    advice = advise(list_ways(costs(replay=simulation(seconds))), "this_run")
    assert advice.startswith("To know what this very run would have been without each source, replay this run: about ")
    assert advice.endswith("; nothing else answers this question.") and "retrain" not in advice


def test_without_a_known_training_nothing_is_compared_with_it_and_the_advice_says_so() -> None:
    ways = by_task(list_ways(costs(training=UNKNOWN)))
    assert {task for task, way in ways.items() if way.seconds is None} == set(ways) - {"simulate"}
    assert advise(tuple(ways.values()), "expected") == (
        "To know what to expect of training without each source, simulate: about 60 s; this is an estimate, so "
        "validate it (imprint validate). How long it would take to retrain from 3 seeds or to replay 3 recorded runs "
        f"is not known: {UNKNOWN}."
    )
    assert advise(tuple(ways.values()), "this_run").endswith(f"without each source is not known: {UNKNOWN}.")


def test_a_recorded_run_that_cannot_be_replayed_is_not_counted_by_its_training() -> None:
    ways = by_task(list_ways(costs(replay="another optimiser", simulation="no derivative")))
    assert ways["replay this run"].seconds is ways["replay 3 recorded runs"].seconds is None
    advice = advise(tuple(ways.values()), "expected")
    assert ", retrain from 3 seeds: about 39 s; this measures" in advice
    assert "How long it would take to replay 3 recorded runs is not known: another optimiser." in advice
    assert advice.endswith("How long it would take to simulate is not known: no derivative.")


@pytest.mark.parametrize("question", ["expected", "this_run"])
def test_the_cheapest_is_never_one_that_answers_the_other_question(question: Question) -> None:
    ways = list_ways(costs(replay=simulation(0.01), simulation=simulation(0.01)))
    best = min((way for way in ways if way.question == question), key=lambda way: way.seconds or 0)
    assert f", {best.task}: about" in advise(ways, question)

"""The model that answers a query which leaves its answer open: the very one whose answer is attributed."""

from typing import Any, Literal

import torch
from torch import Tensor

from imprint.forms import Form
from imprint.readout.reader import Reader
from imprint.task import Parameters

AnswersFrom = Literal["query", "recorded_run", "task"]
DESCRIPTIONS: dict[AnswersFrom, str] = {
    "query": "part of each query",
    "recorded_run": "of the model that the recorded run ended with; the task's own weights are not used",
    "task": "of the task's own weights, which must be those of the model you serve",
}
"""Whose answers are attributed, in words."""


class Answering:
    """Answers in place of queries that leave it open.

    answers_from: "recorded_run" where effects are about the model of one run, which the store holds. Effects on the
        mean over trainings may be read from checkpoints that are earlier than the model people use, so there it is the
        "task". "query" where every query has its answer, such as a completion.
    """

    def __init__(self, reader: Reader, form: Form) -> None:
        self._reader, self._is_one_run = reader, reader.store.question == "this_run"
        self.answers_from: AnswersFrom = "recorded_run" if self._is_one_run else "task"
        if form.kind == "completion":
            self.answers_from = "query"

    def ask(self, inputs: Tensor) -> Any:
        """Return what the model says to some inputs."""
        task = self._reader.task
        with torch.no_grad(), task.evaluating():
            return task.call(lambda model, given: model(given), self._find_state(), inputs.to(task.device))

    def _find_state(self) -> Parameters:
        """Return the tensors of the model that answers, which are not copied."""
        return self._reader.base.state if self._is_one_run else self._reader.task.tensors()

"""What clients are told of faults: nothing of the machine, which the log has."""

import logging
from pathlib import Path
from typing import Any

import pytest

from qoff.api.errors import ApiError
from qoff.errors import ArgumentError, BudgetError, FormatError
from qoff.serve.faults import told, told_of_batch, told_of_line

FOLDER = Path("/srv/files")
OURS = [
    FormatError(f"{FOLDER}/layer: is broken"),
    BudgetError(f"{FOLDER}: no room"),
    OSError(5, f"{FOLDER}: I/O error"),
]


@pytest.mark.parametrize("error", OURS, ids=lambda one: type(one).__name__)
def test_faults_name_no_files(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "qoff.serve")
    said: dict[str, Any] = {}
    answer = told(error, said)
    assert (answer.status, answer.code, said["error"]) == (500, "internal_error", str(error))
    assert answer.headers["X-Request-Id"] == said["id"]
    line = told_of_line(error)
    assert (line.status, line.code) == (500, "internal_error")
    (logged,) = caplog.records
    assert vars(logged)["fields"] == {"error": str(error)}
    for text in (answer.message, line.message, told_of_batch(error, FOLDER)):
        assert str(error) not in text
        assert str(FOLDER) not in text


def test_what_clients_did_is_said() -> None:
    error = ArgumentError(f"{FOLDER}/batch.jsonl: has no lines")
    assert told(error, {}).message == told_of_line(error).message == str(error)
    assert told_of_batch(error, FOLDER) == "batch.jsonl: has no lines"


def test_a_fault_that_is_named_has_an_id_too() -> None:
    said: dict[str, Any] = {}
    answer = told(ApiError(500, "logits are not finite"), said)
    assert answer.message == f"logits are not finite (request {said['id']})"
    assert told_of_line(ApiError(500, "logits are not finite")).message == "logits are not finite"

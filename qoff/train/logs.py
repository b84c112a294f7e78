"""What a run logs after each step: rows of a CSV file, and curves for TensorBoard."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qoff.errors import DiskWriteError, QoffError, io_errors

_COLUMNS = ("step", "loss", "norm", "lr", "tokens_per_s", "held_out_loss")


@dataclass(frozen=True)
class Told:
    """What is known after a step. norm: of gradients, where they are clipped.

    held_out_loss: of sequences that are not learned, where they were evaluated.
    """

    step: int
    loss: float
    norm: float | None
    lr: float
    tokens_per_s: float
    held_out_loss: float | None = None


class Log:
    """Appends to a file; see `opened`. board: a SummaryWriter, or None."""

    def __init__(self, path: Path, board: Any) -> None:
        self._path, self._board = path, board

    def add(self, told: Told) -> None:
        """Write all of a step, so that it is there whatever ends the run. Raises DiskWriteError."""
        values = {name: getattr(told, name) for name in _COLUMNS}
        row = values | {"tokens_per_s": f"{told.tokens_per_s:.1f}"}
        with io_errors(self._path, DiskWriteError), self._path.open("a", newline="") as file:
            csv.writer(file).writerow(["" if x is None else x for x in row.values()])
        if self._board is None:
            return
        for name, value in values.items():
            if value is not None and name != "step":
                self._board.add_scalar(f"train/{name}", value, told.step)
        self._board.flush()


def writer_class() -> Any:
    """What writes for TensorBoard. Raises QoffError where that is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise QoffError(
            f"curves for TensorBoard need {error.name}, which is not installed; pip install "
            "tensorboard, or leave --tensorboard out: log.csv has the same numbers"
        ) from error
    return SummaryWriter


def begin(path: Path, steps: int) -> None:
    """Keep the rows of the first `steps` steps, and no others. Raises DiskWriteError."""
    rows = list[list[str]]()
    beside = path.with_name(f"{path.name}.new")
    with io_errors(path, DiskWriteError):
        if steps and path.exists():
            with path.open(newline="") as file:
                whole = (line for line in file if line.endswith("\n"))  # not cut by a full disk
                rows = [row for row in csv.reader(whole) if row and row[0].isdecimal()]
        try:
            with beside.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(_COLUMNS)
                writer.writerows(row for row in rows if int(row[0]) <= steps)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def opened(path: Path, board: Path | None, steps: int) -> Iterator[Log]:
    """Append to a file, and to a folder for TensorBoard, less what that has of steps after these.

    Raises QoffError where TensorBoard is not installed.
    """
    with ExitStack() as stack:
        writer = None
        if board is not None:
            writer = writer_class()(str(board), purge_step=steps + 1)
            stack.callback(writer.close)
        yield Log(path, writer)

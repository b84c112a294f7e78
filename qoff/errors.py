"""Every error a user can cause. Each message says what was found, what was expected, what to do.

`assert` is for what cannot happen; these are for what can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class QoffError(Exception):
    """Base of all qoff errors; the command line prints its message and exits with status 1.

    A message is one line, whatever a damaged file's names have in them.
    """

    def __str__(self) -> str:
        return "\\n".join(super().__str__().splitlines())


class ArgumentError(QoffError, ValueError):
    """An argument of a function is out of its range, or its object was closed."""


class ClosedError(ArgumentError):
    """An object was closed, and is asked for more."""


class StreamedError(ArgumentError, RuntimeError):
    """Weights of a model whose layers stream are wanted as only those are that stay.

    Accelerate and torch raise RuntimeError for it.
    """


class ContextLengthError(ArgumentError):
    """A prompt, or a prompt and its answer, has more tokens than a sequence may have."""


class OpError(QoffError, ValueError):
    """An op was given an operand of the wrong dtype, shape, stride, group or device."""


class QuantizationError(QoffError, ValueError):
    """A tensor cannot be quantized as asked: NaN in it, a group that does not divide K, ..."""


class FormatError(QoffError):
    """A file is not what its format says it must be (truncated, inconsistent header, bad path)."""


class ChecksumError(FormatError):
    """The bytes of a file are not the bytes that were written (flipped bits, replaced shard)."""


class UnsupportedModelError(QoffError):
    """The model's architecture or a switch in its config has no implementation."""


class ConversionError(QoffError):
    """A conversion could not be finished; nothing that looks complete was left behind."""


class BudgetError(QoffError, MemoryError):
    """A plan does not fit: names the tier, the bytes wanted and the bytes there."""

    least: int | None = None  # bytes of the device with which it fits if weights stream, if known


class DiskReadError(QoffError, OSError):
    """Reading weights from disk failed or came up short."""


class DiskWriteError(QoffError, OSError):
    """Writing what does not fit the memory to disk failed."""


class TrainingError(QoffError):
    """A step of training cannot be taken: its loss or gradients are not finite."""


@contextmanager
def raised_as(kind: type[QoffError], what: str, advice: str = "") -> Iterator[None]:
    """Turn what the code of others raises over an input, Rust's panics too, into one line of ours.

    What a QoffError says already, and a lack of memory, stay as they are.
    """
    try:
        yield
    except (QoffError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(f"{error}".split())[:_SHOWN] or type(error).__name__
        raise kind(f"{what}: {reason}" + (f"; {advice}" if advice else "")) from error


@contextmanager
def io_errors(path: object, kind: type[QoffError], advice: str = "") -> Iterator[None]:
    """Turn what the system says of a file or folder into one line of ours."""
    try:
        yield
    except QoffError:
        raise
    except OSError as error:
        ending = f"; {advice}" if advice else ""
        raise kind(f"{path}: {error.strerror or error}{ending}") from error


_SHOWN = 300  # characters of another's message

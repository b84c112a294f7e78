"""The bytes on disk: a directory that transformers also understands, written all or nothing."""

from .known import KnownFiles, Stamp
from .layout import (
    QuantEntry,
    TensorEntry,
    WeightEntry,
    WeightFile,
    tensors_of,
    view_weight,
)
from .place import check_apart, check_place
from .reader import Checkpoint, read_weight
from .verify import FileCheck, VerifyReport, verify
from .writer import CheckpointWriter, unwritten

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "FileCheck",
    "KnownFiles",
    "QuantEntry",
    "Stamp",
    "TensorEntry",
    "VerifyReport",
    "WeightEntry",
    "WeightFile",
    "check_apart",
    "check_place",
    "read_weight",
    "tensors_of",
    "unwritten",
    "verify",
    "view_weight",
]

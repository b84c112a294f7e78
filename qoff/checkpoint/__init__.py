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
from .reader import Checkpoint, read_config, read_weight
from .verify import FileCheck, VerifyReport, verify
from .writer import CheckpointWriter, check_place, unwritten

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
    "check_place",
    "read_config",
    "read_weight",
    "tensors_of",
    "unwritten",
    "verify",
    "view_weight",
]

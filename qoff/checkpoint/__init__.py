"""The bytes on disk: a directory that transformers also understands. Modules:

- `layout`: names of files, and the entries that say where a weight lies.
- `header`: the safetensors header, written and read with every claim checked.
- `reader`: `Checkpoint`, an opened directory; `read_weight`.
- `writer`: `CheckpointWriter`, all or nothing.
- `staging`: the hidden directory it writes to, moved into place at the end.
- `verify`: every byte against its checksum.
- `strict_json`: JSON objects from files that nobody vouches for.
"""

from .layout import (
    QuantEntry,
    TensorEntry,
    WeightEntry,
    WeightFile,
    tensors_of,
    view_weight,
)
from .reader import Checkpoint, read_config, read_weight
from .verify import VerifyReport, check_digest, verify
from .writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "QuantEntry",
    "TensorEntry",
    "VerifyReport",
    "WeightEntry",
    "WeightFile",
    "check_digest",
    "read_config",
    "read_weight",
    "tensors_of",
    "verify",
    "view_weight",
]

"""The tokenizer of a qoff checkpoint."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qoff.checkpoint.layout import TOKENIZER_FILES
from qoff.dynamo import import_configurations
from qoff.errors import FormatError, raised_as
from qoff.models.modules.configs import REMOTE_CODE
from qoff.system_memory import return_freed

from .checkpoints import read_if_there


def has_tokenizer(checkpoint: Path) -> bool:
    """Whether there are files of a tokenizer."""
    return any((checkpoint / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(checkpoint: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer, padding on the left as decoders need.

    Raises FormatError when there is none, it is damaged, or it is code that is not trusted.
    """
    import_configurations()
    trusted = trust_remote_code and any(checkpoint.glob("*.py"))
    advice = "put the model's tokenizer files there"
    if not trusted and REMOTE_CODE in read_if_there(checkpoint / "tokenizer_config.json"):
        advice = (
            "the tokenizer is code of its own, which is not run unless you say so: read it, then "
            "convert and load with trust_remote_code=True (--trust-remote-code)"
        )
    if not has_tokenizer(checkpoint):  # of some families transformers would make an empty one
        raise FormatError(
            f"{checkpoint}: no usable tokenizer (there are no files of one); {advice}"
        )
    with raised_as(FormatError, f"{checkpoint}: no usable tokenizer", advice):
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=trusted
        )
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    return_freed()  # what it was read through is several times as large
    return tokenizer

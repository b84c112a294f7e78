"""`generation_config.json` of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from qoff.errors import FormatError, raised_as
from qoff.schema import (
    SPECIAL_TOKENS,
    SWITCH,
    Fields,
    check,
    nothing_or,
    number,
    read_object,
    whole,
)

GENERATION_CONFIG = "generation_config.json"
_NUMBER = nothing_or(number(-1e30, 1e30, "a finite number"))
_FIELDS: Fields = {
    **SPECIAL_TOKENS,
    **dict.fromkeys(("do_sample", "use_cache"), nothing_or(SWITCH)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("max_length", "max_new_tokens", "num_beams"), nothing_or(whole(1))),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k"), nothing_or(whole(-1))),
}


def read_generation_config(checkpoint: Path) -> GenerationConfig | None:
    """Read what a checkpoint says of generation; None where it says nothing.

    Raises FormatError, naming file and field.
    """
    path = checkpoint / GENERATION_CONFIG
    if not path.exists():
        return None
    check(read_object(path), _FIELDS, path)
    with raised_as(FormatError, f"{path}: transformers does not accept it", "correct it"):
        return GenerationConfig.from_pretrained(checkpoint, local_files_only=True)

"""References that are computed once, and found again."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError, FormatError
from qoff.hf.load import source_stamps
from qoff.settings import cache_directory

from .models import open_reference_model, tokenizer_of
from .reference import Reference
from .scoring import Progress, Sample, make_reference
from .texts import digest

# Text on which tokenizers differ, if they do.
_PROBE = "The quick brown fox, 1234.56 — naïve café\n\n\tdef f(x): return x  # ünïcödé"


def cached_reference(
    source: Path,
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Reference:
    """The predictions of a text by a model, from `folder` (by default in qoff's cache directory).

    It is found by the files of the model and by the text's tokens and windows, and computed where
    there is none, or a damaged one. tokenizer: of what is to be compared; ArgumentError where the
    reference's own reads text otherwise. Other errors are those of loading the model.
    """
    ours, theirs = (
        t.encode(_PROBE, add_special_tokens=False) for t in (tokenizer, tokenizer_of(source))
    )
    if ours != theirs:
        raise ArgumentError(
            f"the reference {source} has another tokenizer; compare a model with its own original"
        )
    parent = folder or cache_directory() / "references"
    path = parent / digest(source_stamps(source), sample.digest)
    try:
        return Reference(path)
    except FormatError:  # there is none yet, or it is damaged
        with open_reference_model(source, source.name) as subject:
            return make_reference(subject, sample, path, progress)

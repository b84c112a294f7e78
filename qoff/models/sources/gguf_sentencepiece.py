"""SentencePiece vocabularies of GGUF files (Llama 1 and 2, Mistral) as byte-pair encodings.

SentencePiece joins the two neighbours whose union is the token with the highest score, again and
again, the leftmost first. The same comes from merges in the order of the scores of what they make.
Only where a token can be made in two ways that overlap in the text (of "aaa" and "a", say) may the
one that is not leftmost come first, as in every conversion to merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from qoff.errors import FormatError, UnsupportedModelError

_NORMAL, _USER_DEFINED, _UNUSED, _BYTE = 1, 4, 5, 6  # of tokenizer.ggml.token_type
_JOINED = (_NORMAL, _USER_DEFINED, _UNUSED)  # what text is made of; not what stands for a byte
_SPACE = "\u2581"  # what stands for a space


def sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    """Return the tokenizer of a SentencePiece vocabulary, without special tokens.

    types: of each token. Characters that no token has become their bytes, where the vocabulary has
    bytes. Raises FormatError for scores that are missing, UnsupportedModelError for a vocabulary
    with a normalization of its own.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        found = f"has {len(scores)} entries" if isinstance(scores, list) else "is missing"
        raise FormatError(
            f"GGUF key tokenizer.ggml.scores {found}; expected a score for each of {len(tokens)} "
            "tokens"
        )
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise UnsupportedModelError(
                f"GGUF key tokenizer.ggml.{key} asks for a normalization that is not supported. "
                "Convert the model's safetensors checkpoint instead, which has its own tokenizer "
                "files"
            )
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(tokens, scores, types),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    begun = [normalizers.Prepend(_SPACE), spaces] if prefixed else [spaces]
    backend.normalizer = normalizers.Sequence(begun)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", left=1)] if prefixed else steps
    )
    return backend


def _merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token; those that make the one with the best score first."""
    known = {t for t, kind in zip(tokens, types, strict=True) if kind in _JOINED}
    ways = [
        (-scores[index], -at, index, at)
        for index, token in enumerate(tokens)
        if token in known
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
    return [(tokens[index][:at], tokens[index][at:]) for *_, index, at in sorted(ways)]

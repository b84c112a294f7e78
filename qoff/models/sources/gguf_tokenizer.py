"""Tokenizers from the metadata of a GGUF file.

transformers reads these too, but splits text by GPT-2's regex for every `tokenizer.ggml.pre` that
it does not list (smollm is one: "x  1" and "a\\n\\n1." become other tokens than the model was
trained on), and leaves out Qwen2's NFC normalizer and Llama 3's `ignore_merges`. Here each known
kind is built as the model's own `tokenizer.json` has it, and others are refused.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from qoff.errors import FormatError, UnsupportedModelError, raised_as

from .gguf_metadata import Metadata
from .gguf_pre_tokenizers import KINDS, Kind

# Of tokenizer.ggml.token_type.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
_JOINED = (_NORMAL, _USER_DEFINED, _UNUSED)  # what text is made of; not what stands for a byte
_LONGEST = 2048  # characters of a token: all ways to cut one in two are tried
_SPACE = "\u2581"  # what stands for a space
_INSTEAD = "Convert the model's safetensors checkpoint instead, which has its own tokenizer files"
_SENTENCEPIECE, _GEMMA4 = "llama", "gemma4"  # values of tokenizer.ggml.model
_STAY = ("<unk>", "<s>", "<|endoftext|>")  # in Phi-3 the space after these is text
# Texts of tokens that end an answer, whatever keys and types a file has; as llama.cpp has them.
ENDS = frozenset(
    [
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("[e~[", "<｜end▁of▁sentence｜>"),  # noqa: RUF001 (so it is written)
    ]
)
_MESSAGE_END = "<|end|>"  # where an answer may have several messages, which other tokens end
_ANSWER_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def companions(metadata: Metadata) -> dict[str, bytes]:
    """The tokenizer files and `generation_config.json` that say what a GGUF file does, by name.

    Raises FormatError for a tokenizer that cannot be built.
    """
    from transformers import GenerationConfig

    ends = {i for key in ("eos", "eot", "eom") if (i := metadata.token(key)) is not None}
    ends |= set(_ends(_required(metadata.values, "tokens")).values())
    generation = GenerationConfig(
        bos_token_id=metadata.token("bos"),
        eos_token_id=sorted(ends) if len(ends) > 1 else next(iter(ends), None),
        pad_token_id=metadata.token("padding"),
    )
    with (
        raised_as(FormatError, f"{metadata.path}: its tokenizer cannot be built", "get it again"),
        TemporaryDirectory() as directory,
    ):
        tokenizer = build_tokenizer(metadata.values, metadata.need("context_length"))
        tokenizer.save_pretrained(directory)
        generation.save_pretrained(directory)
        written = (path for path in sorted(Path(directory).iterdir()) if path.is_file())
        return {path.name: path.read_bytes() for path in written}


def build_tokenizer(metadata: Mapping[str, Any], context_length: int) -> Any:
    """Return a transformers tokenizer built from the `tokenizer.*` keys of a GGUF file.

    `context_length` becomes its `model_max_length`. Raises UnsupportedModelError for a kind of
    tokenizer that is not known, FormatError for keys that are missing.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = _required(metadata, "tokens")
    special = {
        f"{name}_token": index
        for name, key in _SPECIAL_IDS.items()
        if (index := _token_id(metadata, key, len(tokens))) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(metadata, tokens, special),
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        **{name: tokens[index] for name, index in special.items()},
    )


def _backend(
    metadata: Mapping[str, Any], tokens: list[str], special: Mapping[str, int]
) -> Tokenizer:
    bos, eos = special.get("bos_token"), special.get("eos_token")
    types = _numbers(metadata, "token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise FormatError(
            f"GGUF key tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    model = metadata.get("tokenizer.ggml.model")
    sentencepiece = begins = model in (_SENTENCEPIECE, _GEMMA4)
    if model == _GEMMA4:
        merges = _given_merges(metadata, set(tokens))
        backend = _with_bytes(metadata, tokens, types, merges, prefixed=False)
    elif sentencepiece:
        backend = _sentencepiece(metadata, tokens, types)
    else:
        kind = _kind(metadata)
        backend, begins = _byte_level(metadata, tokens, kind), kind.add_bos
    begin = bos if metadata.get("tokenizer.ggml.add_bos_token", begins) else None
    end = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if begin is not None or end is not None:
        backend.post_processor = _around(tokens, begin, end)
    ends = _ends(tokens)
    typed = [(t, _CONTROL if t in ends else x) for t, x in zip(tokens, types, strict=True)]
    phi3 = sentencepiece and metadata.get("general.architecture") == "phi3"

    def added(wanted: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(t, normalized=False, special=special, rstrip=phi3 and t not in _STAY)
            for t, type_ in typed
            if type_ == wanted
        ]

    backend.add_special_tokens(added(_CONTROL, special=True))
    backend.add_tokens(added(_USER_DEFINED, special=False))
    return backend


def _ends(tokens: Sequence[str]) -> dict[str, int]:
    """The tokens that end an answer by their texts, and their ids."""
    found = {t: i for i, t in enumerate(tokens) if t in ENDS}
    if any(found.keys() >= others for others in _ANSWER_ENDS):
        found.pop(_MESSAGE_END, None)
    return found


def _around(tokens: Sequence[str], begin: int | None, end: int | None) -> processors.PostProcessor:
    """What puts a token before, and one after, each text."""
    before, after = ([] if x is None else [tokens[x]] for x in (begin, end))
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{x}:1" for x in (*before, "$B", *after))],
        special_tokens=[(tokens[x], x) for x in {begin, end} if x is not None],
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], kind: Kind) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_given_merges(metadata, vocab),
            continuing_subword_prefix="",
            end_of_word_suffix="",
            ignore_merges=kind.ignore_merges,
        )
    )
    backend.normalizer = normalizers.NFC() if kind.nfc else None
    backend.pre_tokenizer = kind.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _given_merges(metadata: Mapping[str, Any], tokens: Container[str]) -> list[tuple[str, str]]:
    """The merges that a file has."""
    merges = []
    for pair in _required(metadata, "merges"):
        left, separator, right = pair.partition(" ")
        if not (left and separator and right):
            raise FormatError(f"GGUF key tokenizer.ggml.merges holds {pair!r}; expected two tokens")
        if not (left in tokens and right in tokens and left + right in tokens):
            raise FormatError(
                f"GGUF key tokenizer.ggml.merges joins {left!r} and {right!r}, "
                "but these or what they make are not in tokenizer.ggml.tokens"
            )
        merges.append((left, right))
    return merges


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    """The tokenizer of a SentencePiece vocabulary (Llama 1 and 2, Mistral), as byte-pair encoding.

    SentencePiece joins the two neighbours whose union is the token with the highest score, again
    and again, the leftmost first. The same comes from merges in the order of the scores of what
    they make. Only where a token can be made in two ways that overlap in the text (of "aaa" and
    "a", say) may the one that is not leftmost come first, as in every conversion to merges.
    Characters that no token has become their bytes, where the vocabulary has bytes.
    """
    scores = _numbers(metadata, "scores")
    if scores is None or len(scores) != len(tokens):
        found = "is missing" if scores is None else f"has {len(scores)} entries"
        raise FormatError(
            f"GGUF key tokenizer.ggml.scores {found}; expected a score for each of {len(tokens)} "
            "tokens"
        )
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if np.any(metadata.get(f"tokenizer.ggml.{key}")):
            raise UnsupportedModelError(
                f"GGUF key tokenizer.ggml.{key} asks for a normalization that is not supported. "
                f"{_INSTEAD}"
            )
    return _with_bytes(metadata, tokens, types, _merges(tokens, scores, types), prefixed=True)


def _with_bytes(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    merges: list[tuple[str, str]],
    prefixed: bool,
) -> Tokenizer:
    """Byte-pair encoding of characters, of which unknown ones become their bytes.

    prefixed: whether a space comes before each text, where no key says so.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", prefixed))
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


def _numbers(metadata: Mapping[str, Any], key: str) -> list[Any] | None:
    """An array of numbers as a list, None without one."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    return None if value is None else np.asarray(value).tolist()


def _token_id(metadata: Mapping[str, Any], key: str, tokens: int) -> int | None:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if index is None or (isinstance(index, int) and 0 <= index < tokens):
        return index
    raise FormatError(
        f"GGUF key tokenizer.ggml.{key}_token_id is {index!r}; expected one of {tokens} tokens"
    )


def _kind(metadata: Mapping[str, Any]) -> Kind:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"GGUF key tokenizer.ggml.model is {model!r}; supported: 'gpt2' (byte-level BPE), "
            f"{_SENTENCEPIECE!r} (SentencePiece's BPE) and {_GEMMA4!r}. {_INSTEAD}"
        )
    name = metadata.get("tokenizer.ggml.pre")
    kind = KINDS.get(str(name))
    if kind is None:
        raise UnsupportedModelError(
            f"GGUF key tokenizer.ggml.pre is {name!r}; supported: {', '.join(KINDS)}. {_INSTEAD}"
        )
    return kind


def _required(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        raise FormatError(f"GGUF key tokenizer.ggml.{key} is missing; expected a list of strings")
    longest = max(map(len, value))
    if longest > _LONGEST:
        raise FormatError(
            f"GGUF key tokenizer.ggml.{key} holds a text of {longest} characters; expected at most "
            f"{_LONGEST}"
        )
    return value

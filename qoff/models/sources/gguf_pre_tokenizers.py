"""What splits text into words before byte-pair encoding, by `tokenizer.ggml.pre` of GGUF files.

Expressions are those of the models' own `tokenizer.json`, which llama.cpp's `src/llama-vocab.cpp`
quotes. One after the other they split what the one before left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# A word with its capitals first, as GPT-4o and Tekken split it.
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED = (f"{_BEFORE}{_CAPITALS}*{_SMALL}+", f"{_BEFORE}{_CAPITALS}+{_SMALL}*")
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_DIGIT = pre_tokenizers.Digits(individual_digits=True)


@dataclass(frozen=True)
class Kind:
    """What a value of `tokenizer.ggml.pre` stands for."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token needs no merges
    add_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """What splits by each of some expressions in turn."""
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, _BYTES])


def _words(numbers: str, rest: str = _REST) -> str:
    """The expression that Llama 3, Qwen2 and others share but for these."""
    return "|".join((_CONTRACTIONS, _WORDS, numbers, rest))


def _cased(numbers: str, suffix: str = "") -> str:
    return "|".join((*(f"{word}{suffix}" for word in _CASED), numbers, _CASED_REST))


_PLAIN = Kind(_GPT2)
_DIGITS = Kind(pre_tokenizers.Sequence([_DIGIT, _GPT2]))
_LLAMA3 = Kind(_split(_words(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True)
_QWEN35 = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{N}",
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_QWEN2 = Kind(_split(_words(r"\p{N}")), nfc=True)
_GPT4O = Kind(_split(_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")))
_V3 = Kind(_split(*_DEEPSEEK_V3))
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        **dict.fromkeys(("default", "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum"), _PLAIN),
        **dict.fromkeys(("jais", "trillion", "granite-docling", "exaone4"), _PLAIN),
        **dict.fromkeys(("olmo", "mpt"), Kind(_GPT2, nfc=True)),  # as GPT-NeoX's
        **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGITS),
        "command-r": Kind(_DIGITS.pre_tokenizer, nfc=True),
        **dict.fromkeys(
            ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "midm-2.0"), _LLAMA3
        ),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Kind(_LLAMA3.pre_tokenizer)),
        "glm4": Kind(_LLAMA3.pre_tokenizer, ignore_merges=True),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo"), _QWEN2),
        "qwen35": Kind(_split("|".join((_CONTRACTIONS, *_QWEN35))), nfc=True),
        **dict.fromkeys(("stablelm2", "megrez", "hunyuan"), Kind(_QWEN2.pre_tokenizer)),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
        "tekken": Kind(_split(_cased(r"\p{N}")), ignore_merges=True, add_bos=True),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _V3),
        "seed-coder": Kind(_split(_words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES))),
        "deepseek-coder": Kind(_split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
        "falcon": Kind(
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Punctuation("contiguous"),
                    _GPT2,
                    pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
                ]
            )
        ),
    }
)

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
_DEEPSEEK_LETTERS = (  # in hexadecimal: those with case, as an early Unicode had them
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_JAIS_SPACES = "|".join((*(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)), r"\s{1,2}(?!\S)|\s"))
_EXAONE_MOE = "|".join(  # words with single spaces between them are one
    (
        _CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_YOUTU = "|".join(  # Korean, marks, Bopomofo, Chinese and Japanese
    (
        "[\uac00-\ud7a3\u3131-\u318e]+",
        "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+",
        "[\u3105-\u312f]+",
        "[\u4e00-\u9fa5\u3040-\u30ff]+",
    )
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TRIPLE = "[0-9][0-9][0-9]"
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


def _ranges(codes: str) -> str:
    """What a class of characters has between its brackets, from their numbers."""
    return "".join("-".join(chr(int(x, 16)) for x in part.split("-")) for part in codes.split())


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
# Quoted in `src/unicode.cpp`, whose own code for it parts letters and combining marks.
_HAN_APART = tuple(word.replace("\\p{M}]", "\\p{M}&&[^\\p{Han}]]") for word in _CASED)
_KIMI = (r"\p{Han}+", *(f"{word}{_CONTRACTIONS}?" for word in _HAN_APART), r"\p{N}{1,3}", _REST)
_V3 = Kind(_split(*_DEEPSEEK_V3))
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "default": Kind(_split(r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", _TRIPLE)),
        **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum"), _PLAIN),
        **dict.fromkeys(("jais", "trillion", "granite-docling", "exaone4"), _PLAIN),
        **dict.fromkeys(("olmo", "mpt"), Kind(_GPT2, nfc=True)),  # as GPT-NeoX's
        **dict.fromkeys(
            ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS
        ),
        "command-r": Kind(_DIGITS.pre_tokenizer, nfc=True),
        **dict.fromkeys(
            ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "midm-2.0"), _LLAMA3
        ),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Kind(_LLAMA3.pre_tokenizer)),
        "glm4": Kind(_LLAMA3.pre_tokenizer, ignore_merges=True),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo"), _QWEN2),
        "qwen35": Kind(_split("|".join((_CONTRACTIONS, *_QWEN35))), nfc=True),
        **dict.fromkeys(
            ("stablelm2", "megrez", "hunyuan", "solar-open"), Kind(_QWEN2.pre_tokenizer)
        ),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
        "tekken": Kind(_split(_cased(r"\p{N}")), ignore_merges=True, add_bos=True),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _V3),
        "seed-coder": Kind(_split(_words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES))),
        "deepseek-coder": Kind(_split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
        "deepseek-llm": Kind(
            _split(
                "[\r\n]",
                rf"\s?[{_ranges(_DEEPSEEK_LETTERS)}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _CJK,
                r"\p{N}+",
            )
        ),
        "kimi-k2": Kind(_split("|".join(_KIMI))),
        "youtu": Kind(_split(_YOUTU, _cased(r"\p{N}", f"{_CONTRACTIONS}?")), ignore_merges=True),
        "jais-2": Kind(
            _split(
                _words(r"\p{N}{1,3}", rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_JAIS_SPACES}")
            )
        ),
        "exaone-moe": Kind(_split(_EXAONE_MOE)),
        "minicpm5": Kind(_split(r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
        **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), Kind(_split(_BLOOM))),
        "viking": Kind(_split(_BLOOM, r"\p{N}")),
        "falcon": Kind(
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Punctuation("contiguous"),
                    _GPT2,
                    pre_tokenizers.Split(Regex(_TRIPLE), behavior="isolated"),
                ]
            )
        ),
    }
)

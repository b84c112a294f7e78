"""Tokenizers built from GGUF metadata give the tokens of the model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer

from qoff.errors import FormatError, UnsupportedModelError
from qoff.models.sources.gguf_tokenizer import build_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED_LETTERS = (  # of DeepSeek's first tokenizer
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-\u2113\u2115\u2119-ℝℤΩℨK-\u212d\u212f-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-\uff3a\uff41-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
SPACES = "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = {  # of the models' own `tokenizer.json`; others split as Llama 3
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),  # llama.cpp's own
    "qwen2": (QWEN2,),
    "qwen35": (QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),),
    "gpt-4o": (GPT4O,),
    "tekken": (
        GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{CASED_LETTERS}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-‟　-。]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "kimi-k2": (
        r"[\p{Han}]+|"
        + GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*"),
    ),
    "youtu": (
        r"[가-힣ㄱ-ㆎ]+|[\uff01…“”\u2018\u2019—\uff1a\uff1b\uff0c、-〿\ufe30-\ufe4f]+"
        r"|[ㄅ-ㄯ]+|[一-龥぀-ゟ\u30a0-ヿ]+",
        GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    "jais-2": (LLAMA3.replace(r"|\s+(?!\S)|\s+", SPACES + r"|\s{1,2}(?!\S)|\s{1}"),),
    "exaone-moe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "minicpm5": (r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")),
    "solar-open": (QWEN2,),
    "bloom": (r" ?[^(\s|[.,!?…。\uff0c、।\u06d4،])]+",),
    "viking": (r" ?[^(\s|[.,!?…。\uff0c、।\u06d4،])]+", r"\p{N}"),
}
TESTED = (
    *("default", "gpt-2", "smollm", "llama-bpe", "llama3", "qwen2", "olmo", "dbrx", "glm4"),
    *("gpt-4o", "tekken", "deepseek-v3", "starcoder", "qwen35"),
    *("deepseek-llm", "kimi-k2", "youtu", "jais-2", "exaone-moe", "minicpm5", "solar-open"),
    *("bloom", "viking"),
)
NFC = ("qwen2", "qwen35", "olmo")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The 12 quick foxes didn't jump 3456 times.\n\n1. First  2   3\n\n2. Second\t\tthing",
    "xyzWords camelCASE漢字abc한국어 ㄱㅎㄅㄆ こんにちは、世界"
    "\uff01  \uff21\uff22 \uff11\uff12 “a”——b। c\u06d4 ƻʔ𝐀ა",
    "  leading, trailing  \r\n\r\n  and I'LL you're Über straße 漢字かな交じり 🤗🤗 e\u0301",
    "def f(x):\n        return x[1:10] + 1234567890 # ²³ Ⅷ ٣٤٥\n\n\n99 bottles\n 100%",
]
TRICKY = [
    *TEXT,
    "",
    " ",
    "  ",
    "x  1",
    *(" " * n + x for n in (3, 5, 7, 13, 35) for x in ("", "x", "\n", "\n\nx", "!/\n/\n")),
    "a\n\n1. b",
    "1   2",
    "\n\n\n7\n",
    "it's IT'S 'tis",
    "<|im_start|>user\nhi 42<|im_end|>\n",
    "<|im_star",
    "e\u0301 \u00e9 \u1e9b\u0323",
    "\u200b\u00a0\ufeff\x00",
]


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(x), behavior="isolated") for x in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def reference(pre: str) -> Tokenizer:
    """A tokenizer as the model's `tokenizer.json` has it, trained on a little text."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    single = pre_tokenizers.Sequence([digits, gpt2])
    kinds: dict[str, pre_tokenizers.PreTokenizer] = {"smollm": single, "starcoder": single}
    kinds |= dict.fromkeys(("gpt-2", "olmo"), gpt2)
    ignore_merges = pre in ("llama-bpe", "llama3", "glm4", "tekken", "youtu", "minicpm5")
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = kinds.get(pre) or _split(*PATTERNS.get(pre, (LLAMA3,)))
    tokenizer.normalizer = normalizers.NFC() if pre in NFC else None
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] + eos_token }}",
    }


REFERENCES = {pre: reference(pre) for pre in TESTED}
BUILT = {pre: build_tokenizer(metadata_of(REFERENCES[pre], pre), 512) for pre in TESTED}


@pytest.mark.parametrize("pre", TESTED)
def test_tokens_are_those_of_the_model(pre: str) -> None:
    for text in TRICKY:
        ids = BUILT[pre](text, add_special_tokens=False).input_ids
        assert ids == REFERENCES[pre].encode(text).ids, text


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TESTED)),
    st.text(st.sampled_from("a1 '\n\té字²") | st.characters(exclude_categories=["Cs"])),
)
def test_any_text(pre: str, text: str) -> None:
    ids = BUILT[pre](text, add_special_tokens=False).input_ids
    assert ids == REFERENCES[pre].encode(text).ids
    normal = normalizers.NFC().normalize_str(text) if pre in NFC else text
    assert BUILT[pre].decode(ids) == normal


def test_digits_stand_alone_in_smollm() -> None:
    """Blank lines and runs of spaces before a digit are one piece, unlike in GPT-2."""
    pieces = BUILT["smollm"].backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12  3")
    assert [piece for piece, _ in pieces] == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "deepseek-v3"])
def test_saved_tokenizer_is_the_same(pre: str, tmp_path: Path) -> None:
    built = BUILT[pre]
    built.save_pretrained(tmp_path)
    model_type = "qwen2" if pre == "qwen2" else "llama"
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()
    assert (loaded.bos_token, loaded.eos_token_id) == ("<|im_start|>", 2)
    assert (loaded.unk_token, loaded.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert loaded.model_max_length == 512
    message = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(message, tokenize=False) == "hi<|im_end|>"
    assert loaded(TRICKY[0]).input_ids == built(TRICKY[0]).input_ids
    assert loaded.decode(loaded("a<|im_end|>b").input_ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(
    ("pre", "flag", "starts"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("gpt-2", True, True),
    ],
)
def test_bos_is_added_as_the_file_says(pre: str, flag: bool | None, starts: bool) -> None:
    metadata = metadata_of(REFERENCES[pre], pre)
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    ids = build_tokenizer(metadata, 512)("abc").input_ids
    assert ids == [1] * starts + REFERENCES[pre].encode("abc").ids


def test_eos_is_added_as_the_file_says() -> None:
    metadata = metadata_of(REFERENCES["smollm"], "smollm")
    both = {**metadata, "tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_bos_token": True}
    found = build_tokenizer(both, 512)("abc").input_ids
    assert found == [1, *REFERENCES["smollm"].encode("abc").ids, 2]


def test_user_defined_tokens_stay_whole_and_are_not_special() -> None:
    metadata = metadata_of(REFERENCES["smollm"], "smollm")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = build_tokenizer(metadata, 512)
    ids = tokenizer("a<think>b").input_ids
    assert ids[1] == len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("model", "t5", UnsupportedModelError, r"tokenizer.ggml.model is 't5'"),
        ("model", "llama", FormatError, r"tokenizer.ggml.scores is missing"),
        ("pre", "chameleon", UnsupportedModelError, r"tokenizer.ggml.pre is 'chameleon'"),
        ("pre", None, UnsupportedModelError, r"tokenizer.ggml.pre is None"),
        ("tokens", None, FormatError, r"tokenizer.ggml.tokens is missing"),
        ("merges", [], FormatError, r"tokenizer.ggml.merges is missing"),
        ("merges", ["ab"], FormatError, r"merges holds 'ab'; expected two tokens"),
        ("merges", ["a 漢"], FormatError, r"merges joins 'a' and '漢'"),
        ("token_type", [3], FormatError, r"token_type has 1 entries"),
        ("bos_token_id", -1, FormatError, r"bos_token_id is -1"),
        ("eos_token_id", 10**6, FormatError, r"eos_token_id is 1000000; expected one of"),
    ],
)
def test_unknown_and_damaged_metadata(
    key: str, value: Any, error: type[Exception], message: str
) -> None:
    metadata = metadata_of(REFERENCES["smollm"], "smollm")
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(error, match=message):
        build_tokenizer(metadata, 512)

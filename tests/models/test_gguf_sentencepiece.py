"""SentencePiece vocabularies of GGUF files: tokens are those that SentencePiece's rule gives."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from qoff.errors import FormatError, UnsupportedModelError
from qoff.models.sources.gguf_tokenizer import build_tokenizer

UNK, BOS, EOS, USER = "<unk>", "<s>", "</s>", "<|user|>"
CONTROL = [UNK, BOS, EOS]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Best scores first. No token can be made in two ways that overlap.
WORDS = [
    *(
        "\u2581t",
        "he",
        "in",
        "\u2581the",
        "er",
        "\u2581\u2581",
        "\u2581a",
        "ing",
        "her",
        "th",
        "on",
    ),
    *("\u2581\u2581\u2581\u2581", "ther", "\u2581in", "an", "and", "\u2581and", "12", "é!"),
]
LETTERS = [*"\u2581abcdefghijklmnopqrstuvwxyz012é!."]
TOKENS = [*CONTROL, *BYTES, *WORDS, *LETTERS, USER]
IDS = {token: index for index, token in enumerate(TOKENS)}
SCORES = [0.0] * (3 + 256) + [-float(i) for i in range(len(WORDS) + len(LETTERS))] + [0.0]
TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(WORDS) + len(LETTERS)), 4]
TEXTS = [
    "",
    " ",
    "the other thing and an anthem",
    "  two  spaces    four",
    "in 1212 the\n\nend",
    "漢字 é! Über",
    "hi\n",
    "here, there ther e",
]


def metadata(**changes: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes."""
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": TOKENS,
        "scores": SCORES,
        "token_type": TYPES,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def by_the_rule(text: str, prefix: bool = True) -> list[int]:
    """SentencePiece's rule, as it is said: join the best pair, the leftmost of equals."""
    parts = [*("\u2581" * prefix + text.replace(" ", "\u2581"))] if text else []
    while True:
        pairs = [(a + b, at) for at, (a, b) in enumerate(pairwise(parts))]
        known = [(SCORES[IDS[pair]], -at) for pair, at in pairs if pair in WORDS]
        if not known:
            break
        at = -max(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [IDS[part]] if part in IDS else [3 + byte for byte in part.encode()]
    return found


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


TOKENIZER = build_tokenizer(metadata(), 512)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_follow_the_rule(text: str) -> None:
    assert ids(TOKENIZER, text) == by_the_rule(text)
    assert TOKENIZER.decode(ids(TOKENIZER, text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_given_merges_are_those_of_the_scores(text: str) -> None:
    ways = [(word[:at], word[at:]) for word in WORDS for at in range(1, len(word))]
    merges = [f"{a} {b}" for a, b in ways if a in IDS and b in IDS]
    given = build_tokenizer(metadata(model="gemma4", scores=None, merges=merges), 512)
    assert ids(given, text) == by_the_rule(text, prefix=False)
    assert given.decode(ids(given, text)) == text


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from("thenrigado 12é!") | st.characters(exclude_categories=["Cs"])),
    st.booleans(),
)
def test_any_text(text: str, prefix: bool) -> None:
    tokenizer = build_tokenizer(metadata(add_space_prefix=prefix), 512)
    if any(token in text for token in (*CONTROL, USER)):
        return
    found = ids(tokenizer, text)
    assert found == by_the_rule(text, prefix)
    assert tokenizer.decode(found) == text.replace("\u2581", " ")


def test_by_hand() -> None:
    """her (8) beats the end of \u2581the (3) only where nothing better takes its h."""
    pieces = [TOKENS[i] for i in ids(TOKENIZER, "the there her")]
    assert pieces == ["\u2581the", "\u2581the", "r", "e", "\u2581", "her"]
    assert [TOKENS[i] for i in ids(TOKENIZER, "Ü")] == ["\u2581", "<0xC3>", "<0x9C>"]


def test_what_stands_for_a_byte_is_no_text() -> None:
    assert IDS["<0x0A>"] not in ids(TOKENIZER, "<0x0A>")
    assert TOKENIZER.decode(ids(TOKENIZER, "<0x0A>")) == "<0x0A>"


def test_without_bytes_there_is_the_unknown_token() -> None:
    keep = [i for i, kind in enumerate(TYPES) if kind != 6]
    few = {"tokens": TOKENS, "scores": SCORES, "token_type": TYPES}
    tokenizer = build_tokenizer(metadata(**{k: [v[i] for i in keep] for k, v in few.items()}), 512)
    assert ids(tokenizer, "a漢字") == [tokenizer.convert_tokens_to_ids("\u2581a"), 0]


@pytest.mark.parametrize("flag", [None, True, False])
def test_bos_comes_first_unless_the_file_says_no(flag: bool | None) -> None:
    changes = {} if flag is None else {"add_bos_token": flag}
    tokenizer = build_tokenizer(metadata(**changes), 512)
    assert tokenizer("the").input_ids == [1] * (flag is not False) + by_the_rule("the")


def test_special_and_user_defined_tokens_stay_whole() -> None:
    found = ids(TOKENIZER, f"the{EOS}and{USER}in")
    assert found == [*by_the_rule("the"), 2, *by_the_rule("and"), IDS[USER], *by_the_rule("in")]
    assert TOKENIZER.decode(found, skip_special_tokens=True) == f"the and{USER} in"


def test_phi3_takes_space_after_its_tokens_away() -> None:
    """`rstrip` in its `tokenizer.json`; only of the tokens of a chat."""
    tokens = [*TOKENS, "<|end|>"]
    changes = {"tokens": tokens, "scores": [*SCORES, 0.0], "token_type": [*TYPES, 3]}
    built = build_tokenizer({**metadata(**changes), "general.architecture": "phi3"}, 512)
    assert ids(built, "<|end|>  the") == [len(TOKENS), *by_the_rule("the")]
    assert ids(built, f"{USER}\nthe") == [IDS[USER], *by_the_rule("the")]
    assert ids(built, f"{BOS} the") == [1, *by_the_rule(" the")]


def test_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert (loaded.bos_token, loaded.eos_token_id, loaded.unk_token) == (BOS, 2, UNK)
    for text in TEXTS:
        assert ids(loaded, text) == by_the_rule(text)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": None}, FormatError, "scores is missing"),
        ({"scores": [0.0]}, FormatError, "scores has 1 entries"),
        ({"token_type": [1]}, FormatError, "token_type has 1 entries"),
        ({"unknown_token_id": 10**6}, FormatError, "unknown_token_id is 1000000"),
        ({"precompiled_charsmap": [1]}, UnsupportedModelError, "precompiled_charsmap asks"),
        ({"remove_extra_whitespaces": True}, UnsupportedModelError, "remove_extra_whitespaces"),
    ],
)
def test_what_is_missing_is_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as refusal:
        build_tokenizer(metadata(**changes), 512)
    assert "\n" not in str(refusal.value)

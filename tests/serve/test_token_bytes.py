"""Log-probabilities of tokens that are parts of characters, or whose space `decode` drops."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qoff.api.answers import Form
from qoff.api.token_bytes import Place, TokenBytes
from qoff.engine import Logprob

SMILE = "\U0001f600"
SPELLED = bytes_to_unicode()
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def tokenizer(kind: str) -> tuple[PreTrainedTokenizerFast, dict[bytes, int]]:
    """And its tokens by what they are."""
    if kind == "bytes":
        said = [*(bytes([byte]) for byte in range(256)), b"Hi", b" \xf0\x9f", b" you", b"\xff\xfe"]
        pieces = ["".join(SPELLED[byte] for byte in one) for one in said]
        decoder: Any = decoders.ByteLevel()
    else:
        said = [*(bytes([byte]) for byte in range(256)), b" Hi", b" ", b"  ", b" you", b"ye"]
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        pieces += [one.decode().replace(" ", "▁") for one in said[256:]]
        strip = [decoders.Strip(" ", 1, 0)] if kind == "llama" else []
        decoder = decoders.Sequence([*LLAMA, *strip])
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=kind != "bytes"))
    backend.decoder = decoder
    found = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    return found, dict(zip(said, range(len(said)), strict=True))


@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma"])
def test_a_token_is_its_bytes(kind: str) -> None:
    with_decoder, tokens = tokenizer(kind)
    known = TokenBytes(with_decoder)
    assert {number: known.within(number) for number in tokens.values()} == {
        number: said for said, number in tokens.items()
    }
    assert known.within(10**6) == b""


@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma"])
def test_offsets_are_where_tokens_are_in_the_text(kind: str) -> None:
    with_decoder, tokens = tokenizer(kind)
    one, two, three, four = (tokens[bytes([byte])] for byte in SMILE.encode())
    hi, you = (tokens[b"Hi" if kind == "bytes" else b" Hi"], tokens[b" you"])
    given = [hi, one, two, three, four, you, one, two]
    text, place = with_decoder.decode(given), Place(TokenBytes(with_decoder))
    start = text.index("i") + 1
    assert [place.add(token) for token in given] == [
        0, *[start] * 4, start + 1, *[start + 5] * 2
    ]  # fmt: skip
    assert text[start : start + 5] == f"{SMILE} you"


def test_special_tokens_count_where_the_text_has_them() -> None:
    with_decoder, tokens = tokenizer("bytes")
    with_decoder.add_special_tokens({"bos_token": "<s>"})
    bos, hi, you = with_decoder.bos_token_id, tokens[b"Hi"], tokens[b" you"]
    form = Form("text", "tiny", with_decoder, 1)
    given = [bos, hi, bos, you]
    own: Any = form.logprobs(given, [step(one) for one in given])
    assert own["text_offset"] == [0, 0, 2, 2]
    for text, wanted in (("Hi you", [0, 0, 2, 2]), ("<s>Hi<s> you", [0, 3, 5, 8])):
        found: Any = form.echoed(given, [None, *map(step, given[1:])], own, text)
        assert found["text_offset"] == [*wanted, *(len(text) + at for at in [0, 0, 2, 2])]


def step(*tokens: int) -> dict[int, Logprob]:
    return {token: Logprob(-float(rank), rank) for rank, token in enumerate(tokens, 1)}


def test_parts_of_characters_are_told_apart_as_openai_does() -> None:
    with_decoder, tokens = tokenizer("bytes")
    parts = [tokens[bytes([byte])] for byte in SMILE.encode()]
    steps = [step(part, tokens[b"\xff\xfe"], tokens[b" \xf0\x9f"]) for part in parts]
    text = Form("text", "tiny", with_decoder, 3)
    found: Any = text.logprobs(parts, steps)
    assert found["tokens"] == [rf"bytes:\x{byte:02x}" for byte in SMILE.encode()]
    assert found["top_logprobs"][0] == {
        r"bytes:\xf0": -1, r"bytes:\xff\xfe": -2, r"bytes: \xf0\x9f": -3
    }  # fmt: skip
    assert found["text_offset"] == [0, 0, 0, 0]
    place = text.place()  # in a stream
    assert [text.logprobs(parts[at : at + 2], steps[at : at + 2], place) for at in (0, 2)] == [
        {name: values[at : at + 2] for name, values in found.items()} for at in (0, 2)
    ]
    echoed: Any = text.echoed(parts, [None, *steps[1:]], found, SMILE)
    assert echoed["text_offset"] == [0, 0, 0, 0, 1, 1, 1, 1]
    said: Any = Form("chat", "tiny", with_decoder, 3).logprobs(parts, steps)
    assert [one["bytes"] for one in said["content"]] == [[byte] for byte in SMILE.encode()]
    assert said["content"][0]["token"] == r"\xf0"
    assert said["content"][0]["top_logprobs"][2]["token"] == r" \xf0\x9f"


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    with_decoder, tokens = tokenizer("bytes")
    found: Any = Form("text", "tiny", with_decoder, 3).logprobs(
        [tokens[b"H"]], [step(10**6, tokens[b"H"], 10**6 + 1)]
    )
    assert found["top_logprobs"] == [{"": -1, "H": -2}]

"""Tokens of GGUF vocabularies: qoff's tokenizer against llama.cpp's.

For every `ggml-vocab-*.gguf` of llama.cpp's sources, the texts of its `.inp` file have to give the
ids of its `.out` file. Then llama-server is asked for the same texts, hard ones, and those that the
vocabulary's special tokens are in, as text of its own and with what it puts around a text. The
same is asked of every `tokenizer.ggml.pre` that qoff knows, with GPT-2's vocabulary. Ends with
status 1 on a difference. Texts are normalized (NFC) where the model's own tokenizer does that and
llama.cpp does not. Tokens that llama.cpp takes for special by their name, against the file, are
left out.
"""

# ruff: noqa: RUF001 (texts with letters that look like others)
from __future__ import annotations

import shutil
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.harness import Report, arguments
from bench.peers import native, servers
from qoff.errors import FormatError, QoffError, UnsupportedModelError
from qoff.models.sources.gguf_pre_tokenizers import KINDS
from qoff.models.sources.gguf_tokenizer import ENDS, build_tokenizer
from qoff.quant import GGUFFile

_BETWEEN = "\n__ggml_vocab_test__\n"  # of the texts of an .inp file
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_WIDTH, _CONTEXT = 32, 4096  # of the model that stands around a vocabulary
_SHOWN = 5  # differences of a vocabulary
_PLAIN, _BASE = "gpt-2", "GPT-2's with pre "
Ids = Callable[[str, bool], Sequence[int]]  # of a text, with what is put around it or without
HARD = (
    *("", " ", "  ", "       ", " " * 33, " " * 200, "\t", "\t\t\t", " \t \t", "\t a"),
    *("\x0b\x0c\x85", "\n", "\n\n\n\n", "\r", "\r\n", "a\r\nb\r\n\r\nc", "a \n b", "a  \n\n  b"),
    *(" \n", "\n ", " \n \n ", "trailing   ", "   leading", "the  the   the    the"),
    *("a\n\n\n  \n\t\nb", "\xa0\xa0a\xa0", "\u2003\u2028\u2029\u3000x", "\u200bzero\u200bwidth"),
    *("\ufeffbom", "a\xadb", "0", "007", "1234567890", "3.14159e-10", "1,234,567.89", "12 345 678"),
    *("v1.2.3-rc4", "١٢٣٤", "१२३", "²³¹½Ⅷ①", "0xDEADBEEF 0b1010", "1\u0301", "¹ a", " 1", "  1"),
    *("   12 3", "\n1", "1\n", "a_1", "#1", " #1", "漢字かな交じり文。"),
    *("你好，世界！今天是2026年11月28日。", "한국어 문장입니다.", "ไทยภาษา", "हिन्दी में कुछ"),
    *("தமிழ்", "မြန်မာ", "ｆｕｌｌｗｉｄｔｈ\u3000１２３", "👩\u200d👩\u200d👧\u200d👦"),
    *("👨🏽\u200d💻 🏳\ufe0f\u200d🌈 🇩🇪🇫🇷", "☃☃\ufe0f", "😀😀😀😀", "🂡♠", "שלום עולם"),
    *("مرحبا بالعالم ١٢٣", "\u202eRTL\u202c", "abc אבג 123", "e\u0301 a\u0308 o\u0302\u0323"),
    *("Z\u0351\u036b\u0343a\u0321l\u0322", "\u0301", "a\u0301\u0301\u0301"),
    *("\ufffd\ufffd", "\x00", "a\x00b"),
    *("\x01\x02\x1b[0m\x7f", "\x80\x9f", "\ud7ff\ue000\uffff", "\U0010ffff\U000e0001"),
    *("\\xff\\u0000 %FF %00", "Ã©â€™", "supercalifragilisticexpialidocious" * 20, "a" * 1000),
    *("ab" * 400, "x" * 63 + " " + "y" * 64, "=-" * 100, "!" * 50, "." * 37, "_" * 40),
    *("/" * 33 + "*" * 20, "aaa aaaa aaaaa"),
    "def f(x):\n    return x ** 2  # square\n\n\nif __name__ == '__main__':\n\tprint(f(3))\n",
    "#include <stdio.h>\r\nint main(void) { return 0; }\r\n",
    *('{"a": [1, 2.5e3, null], "b": {"c": "\\n"}}', '<div class="x">&nbsp;</div><!-- c -->'),
    *("$$\\frac{a}{b}$$ `code` ~~~", "a!/\n", "//\n//", " /", "https://example.com/a?b=c&d=%20#e"),
    *("i++ && !j || k->l::m<n>", "camelCaseHTTPServer snake_case"),
    *("I'm you're we'll THEY'VE it'S 'd ''s ’s don't", "'", "''''", '""""', "((((((", "…—–«»„“"),
    *("!a", " !a", "\n!a", "!\n", "!\n\n a", "<s>", "</s>", "<unk>", "<pad>", "<|endoftext|> a"),
    *("<s><s>", "<|im_start|>user\nhi<|im_end|>\n", "<0x0A>", "<0x41>", "▁", "▁▁a▁b", "ĠaĊ"),
    *("[INST] a [/INST]", "<|begin_of_text|>a<|eot_id|>"),
    *("<bos><start_of_turn>user\na<end_of_turn>", "<s", "< s >", " <s> x </s> ", "<|not a token|>"),
    *("a <|endoftext|>\n\nb", "ǅ ß ẞ ŉ ﬁ Ĳ", "İstanbul ıI", "ΑΣ ας", "ЁЖ ёж", "ᏣᎳᎩ ꭰ", "ʰʱ ªº"),
    *("ℵ∀∃ ∑x²", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙", "𐍈𐌰"),
)  # fmt: skip
# Of `src/llama-vocab.cpp`: what ends a text, and so is special, whatever the file says of it.
BY_NAME = ENDS | {"</s>"}


@dataclass(frozen=True)
class Difference:
    """A text of which two tokenizers make different ids. around: with BOS and EOS."""

    text: str
    around: bool
    wanted: list[int]
    found: list[int]

    def line(self) -> str:
        at = next(
            (i for i, (a, b) in enumerate(zip(self.wanted, self.found, strict=False)) if a != b),
            min(len(self.wanted), len(self.found)),
        )
        shown = f"{self.wanted[at : at + 6]}, not {self.found[at : at + 6]}"
        return f"  {self.text[:60]!r}{' with BOS' * self.around}: token {at}: llama.cpp has {shown}"


def pairs(path: Path) -> list[tuple[str, list[int]]]:
    """The texts of a vocabulary's `.inp` file and the ids of its `.out` file, none without them.

    Raises FormatError where there are more of one than of the other.
    """
    texts, lines = path.with_name(f"{path.name}.inp"), path.with_name(f"{path.name}.out")
    if not (texts.exists() and lines.exists()):
        return []
    cut = texts.read_bytes().decode().removesuffix(_BETWEEN).split(_BETWEEN)
    ids = [[int(x) for x in line.split()] for line in lines.read_text()[:-1].split("\n")]
    if len(cut) != len(ids):
        raise FormatError(f"{texts}: {len(cut)} texts, and {len(ids)} lines in {lines.name}")
    return list(zip(cut, ids, strict=True))


def ids_of(tokenizer: Any) -> Ids:
    """What a tokenizer of transformers does, as `Ids`."""
    return lambda text, around: tokenizer(text, add_special_tokens=around).input_ids


def with_special(values: Mapping[str, Any]) -> list[str]:
    """Texts with up to 24 of the special and user-defined tokens of a file's metadata in them."""
    tokens = values["tokenizer.ggml.tokens"]
    types = np.asarray(values.get("tokenizer.ggml.token_type", []))
    of = [np.flatnonzero(types == kind)[:12] for kind in (_CONTROL, _USER_DEFINED)]
    special = [tokens[i] for i in np.concatenate(of)]
    return [text for x in special for text in (f"a{x}b", f" {x} \n{x}", f"{x}{x[:-1]}")]


def settled(values: Mapping[str, Any], text: str) -> bool:
    """Whether the file alone decides what is special in a text, and no name of `BY_NAME`."""
    named = [name for name in BY_NAME if name in text]
    if not named:
        return True
    tokens = values["tokenizer.ggml.tokens"]
    types = np.asarray(values.get("tokenizer.ggml.token_type", np.ones(len(tokens))))
    special = {tokens[i] for i in np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED))}
    return all(name in special or name not in tokens for name in named)


def differences(
    wanted: Ids, found: Ids, texts: Sequence[str], nfc: bool = False
) -> list[Difference]:
    """The texts of which two tokenizers make different ids, alone or with what they put around.

    nfc: of normalized texts.
    """
    apart = []
    for text in texts:
        given = unicodedata.normalize("NFC", text) if nfc else text
        for around in (False, True):
            one, other = list(wanted(given, around)), list(found(given, around))
            if one != other:
                apart.append(Difference(given, around, one, other))
    return apart


def write_model(values: Mapping[str, Any], path: Path) -> None:
    """A model of zeros in a GGUF file, with the vocabulary of another file's metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(str(values.get("general.name", "model")))  # "Phi3" decides on spaces
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in values.items():
        if key.startswith("tokenizer.ggml."):
            _add(writer, key, value)
    square = np.zeros((_WIDTH, _WIDTH), np.float16)
    ones = np.ones(_WIDTH, np.float32)
    count = len(values["tokenizer.ggml.tokens"])
    writer.add_tensor("token_embd.weight", np.zeros((count, _WIDTH), np.float16))
    writer.add_tensor("output_norm.weight", ones)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)


@contextmanager
def llama_cpp(values: Mapping[str, Any]) -> Iterator[Ids]:
    """llama-server's tokenizer for a file's metadata; special tokens as text are read as such.

    Raises PeerNotBuiltError where it is not built or does not start.
    """
    tool, port = native.built("llama-server"), servers.free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(values, path)
        command = [tool, "--model", path, "--port", port, "--ctx-size", _CONTEXT, "--threads", 1]
        options = ("--parallel", "1", "--no-warmup")
        with servers.process([*map(str, command), *options], port):
            yield lambda text, around: _asked(port, text, around)


def _asked(port: int, text: str, around: bool) -> list[int]:
    body = {"content": text, "add_special": around, "parse_special": True}
    return list(servers.asked(f"http://127.0.0.1:{port}/tokenize", body)["tokens"])


def vocabularies() -> Path:
    """The folder of llama.cpp's vocabularies, taken out of its sources if it is not there yet."""
    target = native.folder() / f"llama.cpp-{native.LLAMA_CPP}-vocabularies"
    if not target.exists():
        partial = target.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            for path in (native.sources(Path(folder)) / "models").glob("ggml-vocab-*"):
                shutil.copy2(path, partial)
        partial.rename(target)
    return target


def compare(
    values: Mapping[str, Any], given: Sequence[tuple[str, list[int]]], asks: bool
) -> tuple[int, list[Difference], int]:
    """Texts compared, what differs, and how many texts were left out (see `settled`).

    values: of a file's metadata. given: texts, and their ids. asks: whether to ask llama-server.
    """
    ours = ids_of(build_tokenizer(values, _CONTEXT))
    kind = KINDS.get(str(values.get("tokenizer.ggml.pre")))
    byte_level = values.get("tokenizer.ggml.model") == "gpt2"
    nfc = byte_level and kind is not None and kind.nfc
    kept = [x for x in given if not nfc or unicodedata.is_normalized("NFC", x[0])]
    apart = [
        Difference(text, False, ids, found)
        for text, ids in kept
        if (found := list(ours(text, False))) != ids
    ]
    count, left_out = len(kept), len(given) - len(kept)
    if asks:
        texts = [*HARD, *(text for text, _ in given), *with_special(values)]
        fair = [text for text in texts if settled(values, text)]
        with llama_cpp(values) as theirs:
            apart += differences(theirs, ours, fair, nfc)
        count, left_out = count + 2 * len(fair), left_out + len(texts) - len(fair)
    return count, apart, left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns 1 if a token differs."""
    args = arguments(
        __doc__, argv,
        vocabularies=(Path, None, "folder of ggml-vocab-*.gguf; by default llama.cpp's, fetched"),
    )  # fmt: skip
    folder = args.vocabularies or vocabularies()
    paths = sorted(folder.glob("ggml-vocab-*.gguf"))
    if not paths:
        raise FormatError(f"{folder}: no ggml-vocab-*.gguf; name llama.cpp's folder models")
    asks = native.llama_cpp("llama-server") is not None
    result = Report(
        "gguf_tokens",
        {"llama-server": asks, "llama.cpp": native.LLAMA_CPP},
        "Tokens of GGUF vocabularies: qoff against llama.cpp",
        ("vocabulary", "compared", "equal", "left out", "seconds"),
    )
    if not asks:
        result.notes.append("llama.cpp is not built: only the ids of .out files were compared")
    cases: list[tuple[str, Mapping[str, Any], list[tuple[str, list[int]]]]] = [
        (path.stem.removeprefix("ggml-vocab-"), GGUFFile(path).metadata, pairs(path))
        for path in paths
    ]
    base = next((values for name, values, _ in cases if name == _PLAIN), None)
    if asks and base is not None and not args.quick:
        cases += [(_BASE + pre, {**base, "tokenizer.ggml.pre": pre}, []) for pre in KINDS]
    total = 0
    for name, values, given in cases:
        began = time.monotonic()
        try:
            count, apart, left_out = compare(values, given, asks)
        except UnsupportedModelError as error:
            result.rows.append((name, "not read", "", "", ""))
            print(f"{name}: not read: {str(error).partition(';')[0]}", flush=True)
            continue
        took = time.monotonic() - began
        total += len(apart)
        row = (name, str(count), str(count - len(apart)), str(left_out), f"{took:.1f}")
        result.rows.append(row)
        result.measured[name] = {"compared": count, "different": len(apart)}
        print(f"{name}: {count - len(apart)} of {count} equal, {left_out} left out", flush=True)
        for one in apart[:_SHOWN]:
            print(one.line(), flush=True)
    result.publish(args.out)
    return 1 if total else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QoffError as error:
        sys.exit(f"gguf_tokens: {error}")

"""Kinds of inputs: what each is made from, how it is edited, and what qoff does with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from qoff.budgets import resolve_dtype
from qoff.checkpoint import Checkpoint, verify
from qoff.engine.answers import default_params, end_tokens
from qoff.hf.tokenizer import load_tokenizer
from qoff.models.convert.builder import Builder
from qoff.models.convert.unconverted import Unconverted
from qoff.models.families import converted
from qoff.models.modules.configs import build, is_native, read_config
from qoff.models.native.rope import inverse_frequencies
from qoff.models.sources import GGUFModulesSource, open_source
from qoff.models.sources.safetensors import SafetensorsSource
from qoff.models.spec import DecoderSpec
from qoff.models.stored import check_checkpoint
from qoff.quant import GGUFFile, QuantConfig

from . import corpus
from .edits import Document, edit_bytes
from .gguf_files import METADATA

LAYER = "model-layer-00001.safetensors"
INDEX = "model.safetensors.index.json"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Target:
    """One kind. start: an input before it is edited; most inputs get one to four edits.

    share: how often it has its turn.
    """

    start: Callable[[Random], Any]
    edit: Callable[[Any, Random], Any]
    run: Callable[[Any], object]
    share: int = 1


def files(folder: Path) -> dict[str, Target]:
    """Targets that are files of `corpus.write`."""
    source, sharded, checkpoint = (folder / name for name in ("source", "sharded", "checkpoint"))
    head, data = _split((source / "model.safetensors").read_bytes())
    layer_head, layer_data = _split((checkpoint / LAYER).read_bytes())
    ggufs = [(folder / f"{name}.gguf").read_bytes() for name in METADATA]
    header = len(ggufs[0]) - sum(
        x.nbytes for _, x in GGUFFile(folder / "llama.gguf")._tensors.values()
    )

    def document(path: Path, run: Callable[[], object], share: int = 1, *others: Any) -> Target:
        """A JSON file. others: contents that it starts with as well."""
        content = path.read_bytes()
        intact = json.loads(content)

        def write_and_run(value: Document) -> None:
            path.write_bytes(value.encoded())
            try:
                run()
            finally:
                path.write_bytes(content)

        starts = [Document(intact)] * (1 + len(others)) + [Document(x) for x in others]
        return Target(lambda random: random.choice(starts), _edited, write_and_run, share)

    families = [{**corpus.CONFIG, **family} for family in corpus.FAMILIES]
    modules = [{**corpus.CONFIG, "model_type": x} for x in ("gpt2", "stablelm")]
    quantized = [{**corpus.CONFIG, "quantization_config": x} for x in corpus.QUANTIZATIONS]
    return {
        "safetensors": Target(
            lambda random: Document(head),
            _edited,
            partial(_source_file, source / "model.safetensors", data),
            3,
        ),
        "safetensors-bytes": Target(
            lambda random: (source / "model.safetensors").read_bytes()[:4000],
            lambda value, random: edit_bytes(value, random, 2000),
            partial(_source_bytes, source / "model.safetensors", data),
        ),
        "checkpoint": Target(
            lambda random: Document(layer_head), _edited, partial(_layer, checkpoint, layer_data), 3
        ),
        "checkpoint-data": Target(
            lambda random: layer_data,
            edit_bytes,
            lambda value: _layer(checkpoint, value, Document(layer_head)),
        ),
        "checkpoint-index": document(checkpoint / INDEX, partial(_open, checkpoint), 2),
        "checkpoint-config": document(checkpoint / "config.json", partial(_open, checkpoint), 2),
        "index": document(sharded / INDEX, partial(_read_all, sharded), 2),
        "config": document(
            source / "config.json", partial(_convertible, source), 4, *families, *quantized
        ),
        "config-of-modules": document(
            sharded / "config.json", partial(_modules, sharded), 1, *modules
        ),
        "generation-config": document(
            checkpoint / "generation_config.json", partial(_generation, checkpoint), 3
        ),
        "gguf": Target(
            lambda random: random.choice(ggufs),
            lambda value, random: edit_bytes(value, random, header),
            partial(_gguf, folder / "edited.gguf"),
            8,
        ),
        "tokenizer": document(checkpoint / "tokenizer.json", partial(_tokenizer, checkpoint)),
        "tokenizer-config": document(
            checkpoint / "tokenizer_config.json", partial(_tokenizer, checkpoint)
        ),
    }


def _edited(value: Document, random: Random) -> Document:
    return value.edited(random)


def _split(content: bytes) -> tuple[Any, bytes]:
    """Header and data of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _joined(header: bytes, data: bytes, alignment: int = 8) -> bytes:
    length = -(-(8 + len(header)) // alignment) * alignment - 8
    return length.to_bytes(8, "little") + header.ljust(length) + data


def _source_file(path: Path, data: bytes, header: Document) -> None:
    path.write_bytes(_joined(header.encoded(), data))
    _read_all(path.parent)


def _source_bytes(path: Path, data: bytes, start: bytes) -> None:
    path.write_bytes(start + data)
    _read_all(path.parent)


def _read_all(folder: Path) -> None:
    """Open a source and read all of its tensors."""
    source = open_source(folder)
    assert isinstance(source, SafetensorsSource)
    for name in source.names():
        for _ in source.chunks(name, 32):
            pass


def _convertible(folder: Path) -> None:
    """Everything that a conversion checks before it reads weights."""
    source = open_source(folder)
    config = source.config()
    if isinstance(source, SafetensorsSource) and not is_native(config):
        read_config(config, folder, tensors=len(source.names()))
        return
    spec = DecoderSpec.from_config(converted(config, lambda name: False)[0])
    for rope in {spec.rope, spec.local_rope} - {None}:
        inverse_frequencies(spec, rope)  # type: ignore[arg-type]
    model = Unconverted.of(source)
    builder = Builder(model.source, QuantConfig(solver="rtn"), False)
    for unit in model.units:
        builder.check(*unit)


def _modules(folder: Path) -> None:
    source = open_source(folder)
    config = source.config()
    if isinstance(source, SafetensorsSource) and not is_native(config):
        build(read_config(config, folder, tensors=len(source.names())))


def _open(folder: Path) -> None:
    """Everything that is checked before a checkpoint's weights are read."""
    checkpoint = Checkpoint.open(folder)
    spec = DecoderSpec.from_config(checkpoint.config)
    check_checkpoint(spec, checkpoint)
    for rope in {spec.rope, spec.local_rope} - {None}:
        inverse_frequencies(spec, rope)  # type: ignore[arg-type]
    resolve_dtype("auto", checkpoint.config, _CPU)
    end_tokens(checkpoint)


def _layer(folder: Path, data: bytes, header: Document) -> None:
    """A layer's file with another header or other data, and the checksum of what it is now."""
    content, index = _joined(header.encoded(), data, 4096), folder / INDEX
    intact, before = index.read_bytes(), (folder / LAYER).read_bytes()
    (folder / LAYER).write_bytes(content)
    found = json.loads(intact)
    checksum = {"sha256": hashlib.sha256(content).hexdigest(), "nbytes": len(content)}
    found["checksums"][LAYER] = checksum
    index.write_text(json.dumps(found))
    try:
        _open(folder)
        verify(folder)
    finally:
        index.write_bytes(intact)
        (folder / LAYER).write_bytes(before)


def _generation(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    default_params(checkpoint)
    end_tokens(checkpoint)


def _gguf(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    source = open_source(path)
    if isinstance(source, GGUFModulesSource):
        for name in source.names():
            source.whole(name)
        source.files()
        return
    model, builder = Unconverted.of(source), Builder(source, QuantConfig(solver="rtn"), True)
    for prefix, weights in model.units:
        builder.check(prefix, weights)
    for _, weights in model.units:
        for weight in weights:
            builder.floats(weight)
    source.files()


def _tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    from qoff.engine.prompts import PromptReader

    _, tokens = PromptReader(tokenizer).read("then the cat")
    tokenizer.decode(list(tokens[:50]))

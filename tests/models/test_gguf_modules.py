"""GGUF files of architectures without a spec: what transformers' own loader makes of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

import qoff
from qoff.errors import FormatError, UnsupportedModelError
from qoff.models.convert.convert import convert
from qoff.models.sources import GGUFModulesSource, open_source
from qoff.models.sources.gguf_modules import BY_TRANSFORMERS
from qoff.quant import GGUFFile, QuantConfig
from tests.gguf_models import GGUFModel
from tests.tolerances import relative_rms

VOCAB = 64
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
ROTARY = SMALL | {"num_key_value_heads": 2, "intermediate_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "falcon": SMALL,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "mamba": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": 4,
        "intermediate_size": 128,
        "vocab_size": VOCAB,
    },
    "stablelm": ROTARY,
}


def written(kind: str, path: Path, head: bool = False, **changes: Any) -> Path:
    """A file of random values, with the names and shapes that llama.cpp's converter gives them.

    head: apart from the embedding, where it may also be tied. changes: of keys; None leaves it out.
    """
    config = CONFIG_MAPPING[kind](**CONFIGS[kind])
    config.tie_word_embeddings = kind != "stablelm" and not head
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    known = {key: name for key, name in GGUF_CONFIG_MAPPING[kind].items() if name}
    metadata = {key: getattr(config, name) for key, name in known.items() if hasattr(config, name)}
    metadata.setdefault("context_length", 64)
    if kind == "falcon":  # as the 7B, whose file says no more than this
        metadata = {"embedding_length": 64, "feed_forward_length": 256, "block_count": 2}
        metadata |= {"attention.head_count": 4, "attention.head_count_kv": 1}
        metadata |= {"attention.layer_norm_epsilon": 1e-5, "tensor_data_layout": "jploski"}
        metadata["context_length"] = 2048
    processor = TENSOR_PROCESSORS.get(kind, TensorProcessor)(config.to_dict())
    state, random = model.state_dict(), np.random.default_rng(0)
    tensors = {}
    for name, own in get_gguf_hf_weights_map(model, processor).items():
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        shape = tuple(x for x in state[own].shape if x != 1)
        if kind == "gpt2" and len(shape) == 2 and name.startswith("blk."):
            shape = shape[::-1]
        values = random.standard_normal(shape).astype(np.float32) / 8
        tensors[name] = -np.exp(values) if name.endswith("ssm_a") else values
    said = {key: value for key, value in (metadata | changes).items() if value is not None}
    found = GGUFModel(kind, said, tensors)
    found.kinds = {"blk.": Kind.F16}
    return found.write(path)


@pytest.mark.parametrize("kind", BY_TRANSFORMERS)
def test_values_and_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path / "m.gguf")
    truth = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).eval()
    source = open_source(path)
    assert isinstance(source, GGUFModulesSource)
    state = truth.state_dict()
    for name in source.names():
        assert torch.equal(source.whole(name), state[name]), name
    quant = QuantConfig(bits=8, head_bits=8, group_size=32, solver="rtn")
    checkpoint = convert(path, tmp_path / "out", quant=quant)
    ids = torch.arange(24).view(1, 24)
    model, _ = qoff.load(checkpoint)
    with closing(model), torch.inference_mode():
        found, wanted = model(ids).logits, truth(ids).logits
    assert relative_rms(found, wanted) < 0.02


def test_what_transformers_leaves_out_is_refused(tmp_path: Path) -> None:
    for changes, words in (
        ({"rope.dimension_count": 16}, r"rope.dimension_count is 16; supported: 4"),
        ({"rope.freq_base": 1e6}, r"rope.freq_base is 1000000.0; supported: 10000.0"),
        ({"attention.scale": 2.0}, r"stablelm.attention.scale is not read by transformers"),
    ):
        source = open_source(written("stablelm", tmp_path / "m.gguf", **changes))
        assert isinstance(source, GGUFModulesSource)
        with pytest.raises(UnsupportedModelError, match=words):
            source.names()


def test_a_falcon_whose_rows_are_in_another_order_is_refused(tmp_path: Path) -> None:
    """transformers leaves them as they are: those of several KV heads would be mixed up."""
    for changes, kind, words in (
        ({"attention.head_count_kv": 2}, UnsupportedModelError, r"kv is 2; supported: 1$"),
        ({"attention.head_count_kv": None}, FormatError, r"head_count_kv is missing; expected"),
        ({"tensor_data_layout": "x"}, UnsupportedModelError, r"layout is 'x'; supported: jploski$"),
    ):
        source = open_source(written("falcon", tmp_path / "m.gguf", **changes))
        with pytest.raises(kind, match=words):
            source.names()


def test_a_falcons_head_is_the_files(tmp_path: Path) -> None:
    """transformers ties it to the embedding whether the file has one or not."""
    path = written("falcon", tmp_path / "m.gguf", head=True)
    source = open_source(path)
    assert source.config()["tie_word_embeddings"] is False
    stored = GGUFFile(path).load("output.weight")
    assert isinstance(stored, torch.Tensor)
    assert torch.equal(source.whole("lm_head.weight"), stored.float())


def test_an_architecture_that_nobody_reads_is_named(tmp_path: Path) -> None:
    path = written("stablelm", tmp_path / "m.gguf")
    content = path.read_bytes().replace(b"stablelm", b"stablexx")
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"is 'stablexx'; supported: afmoe, apertus, "):
        open_source(path)

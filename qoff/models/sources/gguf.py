"""A GGUF file as a source: `config.json` and tokenizer from its metadata.

The keys are those of llama.cpp's `gguf-py/gguf/constants.py`; what they do not say has the value of
transformers' config class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qoff.errors import FormatError, UnsupportedModelError, raised_as
from qoff.models.families.family import TensorNames
from qoff.models.native.rope import inverse_frequencies
from qoff.models.spec import DecoderSpec
from qoff.quant import GGUFFile, QTensor, TensorInfo
from qoff.quant.gguf import DENSE, QUANTIZED, TO_FLOATS
from qoff.quant.gguf_blocks import BLOCK_TYPES, GROUP_SIZE
from qoff.schema import SWITCH, TEXT, Fields, Kind, check, list_of, number, whole

from .gguf_tokenizer import build_tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_PERMUTED = ("llama", "smollm3")  # architectures whose rotary pairs are neighbouring rows
_BITS_FROM_FLOATS = 8  # of types whose codes no QTensor holds
_NAMES = TensorNames(
    layer="blk.{}.",
    modules={
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    embedding="token_embd.weight",
    norm="output_norm",
    head="output.weight",
)
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_COUNT, _SCALE = whole(1), number(1e-30, 1e30, "a number above 0")
_FIELDS: Fields = {  # after the architecture's name
    **dict.fromkeys(set(_KEYS.values()) - {"attention.layer_norm_rms_epsilon"}, _COUNT),
    "attention.head_count_kv": _COUNT,
    "attention.key_length": _COUNT,
    "attention.layer_norm_rms_epsilon": number(0, 1, "a number from 0 to 1"),
    "rope.freq_base": _SCALE,
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": _SCALE,
    "rope.scaling.original_context_length": _COUNT,
}
_TEXTS = Kind("a list of texts", list_of(TEXT).allows)
_NUMBERS = Kind("an array of numbers", lambda x: isinstance(x, np.ndarray))
_TOKENIZER: Fields = {  # after "tokenizer.ggml."
    **dict.fromkeys(("model", "pre"), TEXT),
    **dict.fromkeys(("tokens", "merges"), _TEXTS),
    **dict.fromkeys(("token_type", "scores", "precompiled_charsmap"), _NUMBERS),
    **dict.fromkeys(("add_bos_token", "add_space_prefix", "remove_extra_whitespaces"), SWITCH),
    **{f"{name}_token_id": whole(0) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}
# Llama 3.1 to 3.3 store their frequency factors as a tensor; these are the constants behind it
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GGUFSource:
    """A GGUF file of the Llama family. Raises FormatError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._architecture = str(self._file.metadata.get("general.architecture"))
        fields = {f"{self._architecture}.{key}": kind for key, kind in _FIELDS.items()}
        fields |= {f"tokenizer.ggml.{key}": kind for key, kind in _TOKENIZER.items()}
        check(self._file.metadata, fields | {"tokenizer.chat_template": TEXT}, path)
        self._there = frozenset(self._file.tensors)
        self.tensor_names = replace(_NAMES, rope_pairs=self._architecture in _PERMUTED)

    def config(self) -> dict[str, Any]:
        arch = self._architecture
        if arch not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.path}: general.architecture is {arch!r}; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        config = {name: self._need(key) for name, key in _KEYS.items()}
        if config["num_hidden_layers"] > len(self._there):
            raise FormatError(
                f"{self.path}: {arch}.block_count is {config['num_hidden_layers']} in a file of "
                f"{len(self._there)} tensors; it is damaged, get it again"
            )
        heads = config["num_attention_heads"]
        kv = "" if self._get("attention.head_count_kv") is None else "_kv"
        config |= {
            "model_type": arch,
            "architectures": [ARCHITECTURES[arch]],
            "num_key_value_heads": self._need(f"attention.head_count{kv}"),
            "head_dim": self._get("attention.key_length", config["hidden_size"] // heads),
            "vocab_size": self._file.shape(_NAMES.embedding)[0],
            "rope_parameters": self._rope(),
            "tie_word_embeddings": _NAMES.head not in self._there,
            "bos_token_id": self._token("bos"),
            "eos_token_id": self._token("eos"),
            "pad_token_id": self._token("padding"),
        }
        if arch in ("llama", "qwen3", "smollm3"):
            config["attention_bias"] = "blk.0.attn_q.bias" in self._there
        if arch in ("llama", "smollm3"):
            config["mlp_bias"] = "blk.0.ffn_up.bias" in self._there
        self._check_value("rope.dimension_count", config["head_dim"])
        self._check_value("expert_count", 0)
        return self._with_rope_factors(config)

    def info(self, name: str) -> TensorInfo | None:
        if name not in self._there:
            return None
        kind, shape = self._file.tensor_type(name), self._file.shape(name)
        if kind in DENSE:
            return TensorInfo(shape, None)
        if kind in TO_FLOATS:
            return TensorInfo(shape, (_BITS_FROM_FLOATS, GROUP_SIZE), anew=True)
        if kind in BLOCK_TYPES:
            return TensorInfo(shape, (BLOCK_TYPES[kind][0], GROUP_SIZE))
        raise FormatError(
            f"{self.path}: tensor {name} has type {kind}; supported are "
            f"{', '.join((*QUANTIZED, *DENSE))}. Use a file of one of these types"
        )

    def chunks(self, name: str, rows: int) -> Iterator[Tensor | QTensor]:
        for numbers in torch.arange(self._file.shape(name)[0]).split(rows):
            yield self._file.load(name, numbers)

    def item(self, name: str, index: int) -> Tensor:
        raise FormatError(f"{self.path}: {name} has no parts of its own in a GGUF file")

    def files(self) -> Mapping[str, bytes | Path]:
        from transformers import GenerationConfig

        ends = {i for key in ("eos", "eot", "eom") if (i := self._token(key)) is not None}
        generation = GenerationConfig(
            bos_token_id=self._token("bos"),
            eos_token_id=sorted(ends) if len(ends) > 1 else next(iter(ends), None),
            pad_token_id=self._token("padding"),
        )
        with (
            raised_as(FormatError, f"{self.path}: its tokenizer cannot be built", "get it again"),
            TemporaryDirectory() as directory,
        ):
            tokenizer = build_tokenizer(self._file.metadata, self._need("context_length"))
            tokenizer.save_pretrained(directory)
            generation.save_pretrained(directory)
            written = (path for path in sorted(Path(directory).iterdir()) if path.is_file())
            return {path.name: path.read_bytes() for path in written}

    def _get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._architecture}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise FormatError(
                f"{self.path}: key {self._architecture}.{key} is missing; expected "
                f"{_FIELDS[key].words}"
            )
        return value

    def _token(self, kind: str) -> int | None:
        index: int | None = self._file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return index

    def _check_value(self, key: str, supported: int) -> None:
        value = self._get(key, supported)
        if value != supported:
            raise UnsupportedModelError(
                f"{self.path}: {self._architecture}.{key} is {value}; supported: {supported}"
            )

    def _rope(self) -> dict[str, Any]:
        """Return transformers' `rope_parameters`."""
        kind = self._get("rope.scaling.type", "none")
        rope = {"rope_type": "default", "rope_theta": float(self._get("rope.freq_base", 10000.0))}
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise UnsupportedModelError(
                f"{self.path}: {self._architecture}.rope.scaling.type is {kind!r}; "
                "supported: none, linear, yarn"
            )
        rope |= {"rope_type": kind, "factor": float(self._need("rope.scaling.factor"))}
        if kind == "yarn":
            original = self._need("rope.scaling.original_context_length")
            rope["original_max_position_embeddings"] = original
        return rope

    def _with_rope_factors(self, config: dict[str, Any]) -> dict[str, Any]:
        """Put the divisors of the frequencies that Llama 3.1 and later store into the config.

        Raises UnsupportedModelError if they are not those of transformers' kind "llama3".
        """
        if "rope_freqs.weight" not in self._there:
            return config
        factors = self._file.load("rope_freqs.weight")
        assert isinstance(factors, Tensor)
        rope = {**config["rope_parameters"], "rope_type": "llama3", "factor": float(factors.max())}
        scaled = {**config, "rope_parameters": rope | _LLAMA3_ROPE}
        plain, wanted = (_frequencies(DecoderSpec.from_config(c)) for c in (config, scaled))
        if factors.shape != plain.shape or not torch.allclose(plain / factors, wanted, 1e-4, 0.0):
            raise UnsupportedModelError(
                f"{self.path}: rope_freqs.weight does not hold the factors of rope_type 'llama3'; "
                "convert the model's safetensors checkpoint instead"
            )
        return scaled


def _frequencies(spec: DecoderSpec) -> Tensor:
    assert spec.rope is not None
    return inverse_frequencies(spec, spec.rope)[0]

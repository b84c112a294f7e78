"""The metadata of a GGUF file, checked, and which tensors it has.

The keys are those of llama.cpp's `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qoff.errors import FormatError, UnsupportedModelError
from qoff.quant import GGUFFile
from qoff.schema import (
    SWITCH,
    TEXT,
    Fields,
    Kind,
    check,
    either,
    first_wrong,
    list_of,
    number,
    shown,
    whole,
)

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_COUNT, _SIZE = whole(1), whole(0)
_FACTOR = number(-1e30, 1e30, "a finite number")
_SCALE = number(1e-30, 1e30, "a number above 0")
_EPS = number(0, 1, "a number from 0 to 1")
_NUMBERS = Kind("an array of numbers", lambda x: isinstance(x, np.ndarray))
_FIELDS: Fields = {  # after the architecture's name
    **dict.fromkeys(("embedding_length", "block_count", "context_length"), _COUNT),
    **dict.fromkeys(("attention.key_length", "attention.value_length"), _COUNT),
    **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"), _COUNT),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank"), _COUNT),
    **dict.fromkeys(("attention.indexer.head_count", "attention.indexer.key_length"), _COUNT),
    "attention.indexer.top_k": _COUNT,
    "attention.indexer.types": _NUMBERS,
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), _SIZE),
    "rope.scaling.yarn_log_multiplier": _FACTOR,
    "attention.head_count": _COUNT,
    "attention.head_count_kv": _COUNT,
    "attention.layer_norm_epsilon": _EPS,
    "attention.layer_norm_rms_epsilon": _EPS,
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), _COUNT),
    **dict.fromkeys(("attention.shared_kv_layers", "embedding_length_per_layer_input"), _SIZE),
    "rope.dimension_count_swa": _COUNT,
    **dict.fromkeys(("altup.num_inputs", "altup.active_idx"), _SIZE),
    "activation_sparsity_scale": _NUMBERS,
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), either(_FACTOR, _NUMBERS)),
    "attention.sliding_window": _SIZE,
    "attention.value_scale": _FACTOR,
    "attention.sliding_window_pattern": either(_SIZE, _NUMBERS),
    "attention.causal": SWITCH,
    "attention.temperature_scale": _FACTOR,
    "attention.temperature_length": _SIZE,
    "feed_forward_length": _COUNT,
    "expert_feed_forward_length": _COUNT,
    "expert_shared_feed_forward_length": _SIZE,
    "expert_weights_norm": SWITCH,
    "expert_weights_scale": _FACTOR,
    **dict.fromkeys(("leading_dense_block_count", "interleave_moe_layer_step"), _SIZE),
    **dict.fromkeys(("expert_count", "expert_used_count", "nextn_predict_layers"), _SIZE),
    **dict.fromkeys(("rope.dimension_count", "rope.scaling.original_context_length"), _COUNT),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), _SCALE),
    "rope.scaling.type": TEXT,
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), _FACTOR),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), _FACTOR),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), _FACTOR),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _FACTOR),
    **dict.fromkeys(("embedding_scale", "residual_scale", "attention.scale"), _FACTOR),
    **dict.fromkeys(("ssm.conv_kernel", "ssm.state_size", "ssm.group_count"), _COUNT),
    **dict.fromkeys(("ssm.time_step_rank", "ssm.inner_size", "full_attention_interval"), _COUNT),
    **dict.fromkeys(("shortconv.l_cache", "kda.head_dim"), _COUNT),
    "moe_latent_size": _SIZE,
    "logit_scale": _SCALE,
    "use_parallel_residual": SWITCH,
}
_TEXTS = Kind("a list of texts", list_of(TEXT).allows)
_TOKENIZER: Fields = {  # after "tokenizer.ggml."
    **dict.fromkeys(("model", "pre"), TEXT),
    **dict.fromkeys(("tokens", "merges"), _TEXTS),
    **dict.fromkeys(("token_type", "scores", "precompiled_charsmap"), _NUMBERS),
    **dict.fromkeys(("add_bos_token", "add_eos_token"), SWITCH),
    **dict.fromkeys(("add_space_prefix", "remove_extra_whitespaces"), SWITCH),
    **{f"{name}_token_id": whole(0) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}
# What changes a model in ways that no family here has, and the values that change nothing.
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "expert_group_count": (0, 1),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_TEMPERATURE = "attention.temperature_scale"
_HEEDED = {
    **dict.fromkeys(
        ("deepseek2", "deepseek32", "glm-dsa", "mistral4"),
        ("expert_group_count", _LOG_MULTIPLIER, _TEMPERATURE),
    ),
    **dict.fromkeys(("exaone-moe", "nemotron_h_moe"), ("expert_group_count",)),
    "mistral3": (_TEMPERATURE, _LOG_MULTIPLIER),
}


class Metadata:
    """The metadata of a file. architecture: its `general.architecture`.

    Raises FormatError, naming the key, for a value that no file has there.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path: Path = file.path
        self.values = file.metadata
        self.architecture = str(file.metadata.get("general.architecture"))
        self._file = file
        self.tensors = frozenset(file.tensors)

    def check(self) -> None:
        """Raise FormatError or UnsupportedModelError for a value that cannot be read."""
        tokenizer = {f"tokenizer.ggml.{key}": kind for key, kind in _TOKENIZER.items()}
        check(self.values, {**tokenizer, "tokenizer.chat_template": TEXT}, self.path)
        for key, allowed in _WITHOUT_EFFECT.items():
            if key not in _HEEDED.get(self.architecture, ()):
                self.only(key, *allowed)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture; of one that layers have apart, what all have.

        Raises UnsupportedModelError where layers differ.
        """
        full = f"{self.architecture}.{key}"
        value = self.values.get(full)
        if value is None:
            return default
        if isinstance(value, np.ndarray) and _FIELDS.get(key) in (_COUNT, _SIZE):
            if not len(value) or (value != value[0]).any():
                raise UnsupportedModelError(
                    f"{self.path}: {full} is {shown(value.tolist())}; supported: the same in all "
                    "layers"
                )
            value = value[0].item()
        if isinstance(value, float) and np.float32(value) == value:
            value = float(str(np.float32(value)))  # 0.1 became one of 32 bits when it was written
        if key in _FIELDS and first_wrong({key: value}, {key: _FIELDS[key]}):
            raise FormatError(
                f"{self.path}: {full} is {shown(value)}; expected {_FIELDS[key].words}. "
                "Correct the file"
            )
        return value

    def need(self, key: str) -> Any:
        """The value of a key that has to be there. Raises FormatError without it."""
        value = self.get(key)
        if value is None:
            raise FormatError(
                f"{self.path}: key {self.architecture}.{key} is missing; expected "
                f"{_FIELDS[key].words}"
            )
        return value

    def only(self, key: str, *supported: object) -> None:
        """Raise UnsupportedModelError if a key is there, with another value than these."""
        value = self.get(key)
        if value is not None and value not in supported:
            raise UnsupportedModelError(
                f"{self.path}: {self.architecture}.{key} is {shown(value)}; supported: "
                f"{', '.join(map(str, supported))}"
            )

    def token(self, kind: str) -> int | None:
        """The number of a special token, None without one."""
        index: int | None = self.values.get(f"tokenizer.ggml.{kind}_token_id")
        return index

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises FormatError without it."""
        return self._file.shape(tensor)

    def vector(self, tensor: str) -> list[float]:
        """The numbers of a tensor of one dimension. Raises FormatError for another."""
        if len(self.shape(tensor)) != 1 or self._file.tensor_type(tensor) != "F32":
            raise FormatError(
                f"{self.path}: tensor {tensor} is {self._file.tensor_type(tensor)} "
                f"{list(self.shape(tensor))}; expected F32 of one dimension"
            )
        values = self._file.load(tensor)
        return [float(x) for x in values.flatten().tolist()]  # type: ignore[union-attr]

    @property
    def blocks(self) -> int:
        """How many layers there are. Raises FormatError if there cannot be so many."""
        blocks = int(self.need("block_count"))
        if blocks > len(self.tensors):
            raise FormatError(
                f"{self.path}: {self.architecture}.block_count is {blocks} in a file of "
                f"{len(self.tensors)} tensors; it is damaged, get it again"
            )
        return blocks

    @property
    def layers(self) -> int:
        """How many of them compute the next token; others predict the tokens after it."""
        beyond = int(self.get("nextn_predict_layers", 0))
        if beyond >= self.blocks:
            self.only("nextn_predict_layers", 0)
        return self.blocks - beyond

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""
        return tensor in self.tensors

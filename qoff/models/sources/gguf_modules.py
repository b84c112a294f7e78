"""A GGUF file of an architecture without a spec, as transformers' own loader reads it.

transformers says which of its tensors each one of the file is, and undoes what llama.cpp's
conversion did to their values. Its reader believes all counts, so a file is opened by ours first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.errors import FormatError, UnsupportedModelError, raised_as
from qoff.kernels.layout.qtensor import QTensor
from qoff.models.modules.configs import build, read_config
from qoff.quant import GGUFFile
from qoff.quant.gguf import DENSE

from .gguf_architectures import ARCHITECTURES
from .gguf_metadata import HEAD, Metadata

# Those that it reads, that are compared with what it reads by a test, and that run.
BY_TRANSFORMERS = ("bloom", "falcon", "gpt2", "mamba", "stablelm")
_TIED = ("bloom",)  # whose head is the embedding whatever the file has
# Keys that say nothing of what is computed, or nothing that the tensors do not say.
_WITHOUT_EFFECT = ("context_length", "vocab_size", "use_parallel_residual")
_EPS = ("norm_eps", "layer_norm_eps", "layer_norm_epsilon")


class GGUFModulesSource:
    """A GGUF file for transformers' modules; tensors have transformers' names.

    quantized: whether the file has weights in fewer than 16 bits. Raises FormatError for a file
    that is damaged, UnsupportedModelError for an architecture that nothing here reads.
    """

    def __init__(self, file: GGUFFile, metadata: Metadata) -> None:
        self.path: Path = file.path
        self._file, self._metadata = file, metadata
        if metadata.architecture not in BY_TRANSFORMERS:
            raise UnsupportedModelError(
                f"{self.path}: general.architecture is {metadata.architecture!r}; supported: "
                f"{', '.join(sorted((*ARCHITECTURES, *BY_TRANSFORMERS)))}"
            )
        metadata.check()
        self.quantized = any(file.tensor_type(name) not in DENSE for name in file.tensors)

    @cached_property
    def _config(self) -> dict[str, Any]:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        with self._readable():
            config = load_gguf_checkpoint(str(self.path))["config"]
        tied = self._metadata.architecture in _TIED or HEAD not in self._metadata.tensors
        return {**config, "tie_word_embeddings": tied}

    @cached_property
    def _processor(self) -> Any:
        """What undoes the changes of llama.cpp's conversion."""
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        return TENSOR_PROCESSORS.get(self._metadata.architecture, TensorProcessor)(self._config)

    @cached_property
    def _tensors(self) -> dict[str, list[str]]:
        """The file's tensors that each of transformers' is made of."""
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        full = read_config(self._config, self.path, tensors=len(self._file.tensors))
        self._check_left_out(full)
        with self._readable():
            names = get_gguf_hf_weights_map(build(full), self._processor)
        found: dict[str, list[str]] = defaultdict(list)
        for name in self._file.tensors:
            if name not in names:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} is not one that transformers has for a model of "
                    f"architecture {self._metadata.architecture}; convert the model's safetensors "
                    "checkpoint instead"
                )
            found[names[name]].append(name)
        return dict(found)

    def _check_left_out(self, full: Any) -> None:
        """Raise UnsupportedModelError for a key that transformers leaves out, if it matters."""
        from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

        architecture = self._metadata.architecture
        if architecture == "falcon":  # without it, as many as there are heads
            self._metadata.need("attention.head_count_kv")
        own, taken = type(full)(), _taken(full)  # the first with what any config of it has
        fields: Any = GGUF_CONFIG_MAPPING[architecture]
        read = {key for key, name in fields.items() if name in dir(own)}
        for full_key in self._metadata.values:
            owner, _, key = full_key.partition(".")
            if owner != architecture or key in read or key in _WITHOUT_EFFECT:
                continue
            if key not in taken:
                raise UnsupportedModelError(
                    f"{self.path}: {full_key} is not read by transformers; convert the model's "
                    "safetensors checkpoint instead"
                )
            self._metadata.only(key, taken[key])

    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        return dict(self._config)

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def whole(self, name: str) -> Tensor:
        """Read a tensor, in float32."""
        (stored,) = self._tensors[name]
        found = self._file.load(stored)
        values = found.dequantize() if isinstance(found, QTensor) else found.float()
        with self._readable():
            processed = self._processor.process(weights=values.numpy(), name=stored)
        return torch.from_numpy(processed.weights).contiguous()

    def files(self) -> Mapping[str, bytes | Path]:
        """Tokenizer files and `generation_config.json`, by name."""
        from .gguf_tokenizer import companions

        return companions(self._metadata)

    def _readable(self) -> AbstractContextManager[None]:
        advice = "get it again, or convert the model's safetensors checkpoint instead"
        return raised_as(FormatError, f"{self.path}: transformers cannot read it", advice)


def _taken(full: Any) -> dict[str, object]:
    """What transformers takes for keys that it leaves out, from a config object."""
    heads = getattr(full, "num_attention_heads", 0)
    rope = getattr(full, "rope_parameters", None)
    eps = next(getattr(full, name) for name in _EPS if hasattr(full, name))
    falcon = full.model_type == "falcon"
    found: dict[str, object] = {
        "attention.head_count": heads,
        "attention.head_count_kv": 1 if falcon else getattr(full, "num_key_value_heads", heads),
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": eps,
        "feed_forward_length": 4 * full.hidden_size if heads else 0,
        "rope.scaling.type": "none",
        "ssm.dt_b_c_rms": False,
    }
    if falcon:
        found["tensor_data_layout"] = "jploski"  # of one KV head, the rows of transformers
    if rope:
        turned = full.hidden_size // heads * rope.get("partial_rotary_factor", 1.0)
        found |= {"rope.freq_base": rope["rope_theta"], "rope.dimension_count": int(turned)}
    return found

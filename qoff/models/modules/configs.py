"""Which models run through transformers' modules, and transformers' model of a `config.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qoff.errors import UnsupportedModelError, raised_as
from qoff.models.families import FAMILIES, SOURCES
from qoff.models.families.config_fields import check_counts
from qoff.models.families.family import full_config

from .text_part import keep_text, sees

DTYPE = torch.float32  # of activations and of weights that are not quantized, on a CPU
LAYOUT = "modules"  # of a checkpoint, in its quantization_config
_WANTED = "qoff runs models that continue text, like Llama and Qwen"
_UNLIKE_OTHERS = {  # causal language models whose passes are not those of the others, and how
    "cpmant": "which wants all tokens of a sequence in every pass, and qoff hands on the new ones",
    "prophetnet": "whose head predicts several tokens at once, in a form that qoff does not read",
}
REMOTE_CODE = "auto_map"  # of a config: names code that comes with the model


def position_limit(config: Any) -> int | None:
    """Tokens of a sequence that a model was made for, as transformers' config of it says; or None.

    Whisper's config calls them `max_target_positions`.
    """
    names = "max_position_embeddings", "max_target_positions"
    return next((n for name in names if (n := getattr(config, name, None))), None)


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether qoff's own decoder runs models of this `config.json`.

    A checkpoint that was made for transformers' modules runs through these.
    """
    stored = config.get("quantization_config")
    if isinstance(stored, Mapping) and stored.get("layout") == LAYOUT:
        return False
    return str(config.get("model_type")) in {**FAMILIES, **SOURCES}


def check_config(config: Mapping[str, Any], trust_remote_code: bool = False) -> None:
    """Raise UnsupportedModelError unless transformers has a causal language model for a config.

    Models that see have one within them.

    For code that comes with the model, `trust_remote_code` is enough.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = str(config.get("model_type"))
    known = None
    if kind in CONFIG_MAPPING:  # it is lazy: `get` finds nothing
        known = CONFIG_MAPPING[kind]
    if known is None and trust_remote_code and REMOTE_CODE in config:
        return
    if _says(config, known, "is_encoder_decoder"):
        raise _refusal(kind, f"an encoder-decoder model; {_WANTED}")
    if known is None and REMOTE_CODE in config:
        raise _refusal(
            kind,
            f"which transformers {__version__} does not have; the model comes with code of its "
            f"own ({REMOTE_CODE}), which is not run unless you say so: read it, then pass "
            "trust_remote_code=True (--trust-remote-code)",
        )
    if known is None:
        raise _refusal(
            kind,
            f"which neither qoff nor transformers {__version__} knows; check the file, or use a "
            "newer transformers",
        )
    if sees(kind):
        return
    encodes = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not _says(config, known, "is_decoder")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (encodes and hasattr(known, "is_decoder")):
        raise _refusal(kind, f"of which transformers {__version__} has no decoder; {_WANTED}")
    if kind in _UNLIKE_OTHERS:
        raise _refusal(kind, _UNLIKE_OTHERS[kind])


def read_config(
    config: Mapping[str, Any], folder: Path, trust_remote_code: bool = False, *, tensors: int
) -> Any:
    """transformers' config object of a `config.json`; that of `folder` where its code is.

    tensors: how many there are, which no number of layers exceeds. Raises UnsupportedModelError as
    `check_config` does, and for values that are refused.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    check_config(config, trust_remote_code)
    check_counts(config, layers=tensors)
    if config["model_type"] in CONFIG_MAPPING:
        # transformers' own code goes before that of the model.
        full = full_config({k: v for k, v in config.items() if k != REMOTE_CODE})
    else:
        with raised_as(UnsupportedModelError, f"{folder}: its own code refuses its config.json"):
            full = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        full.__dict__.pop("quantization_config", None)
        full.tie_word_embeddings = config.get("tie_word_embeddings", full.tie_word_embeddings)
    if full.is_encoder_decoder:
        raise _refusal(config["model_type"], f"an encoder-decoder model; {_WANTED}")
    if full.model_type == "xmod" and full.default_language not in full.languages:
        raise _refusal(
            "xmod",
            f"whose default_language is {full.default_language!r}; set it there to one of its "
            "languages",
        )
    return full


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer where they differ, as in Gemma 4; else `config` alone.

    transformers refuses to read from a config as a whole what differs.
    """
    differ = getattr(config, "is_heterogeneous", False)
    return [*config.per_layer_config] if differ else [config]


def build(
    config: Any,
    trust_remote_code: bool = False,
    attention: str | None = None,
    dtype: torch.dtype = DTYPE,
) -> Any:
    """transformers' model of a config object, in `dtype` on the meta device, for inference.

    attention: the implementation in transformers' attention interface; None: its choice.
    Raises UnsupportedModelError with the reason why transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if sees(config.model_type) else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = kind.from_config(
                config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                attn_implementation=attention,
            )
    except Exception as error:  # the code of any model
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise _refusal(
            config.model_type, f"but transformers cannot build it ({reason}); check the file"
        ) from error
    if kind is AutoModelForImageTextToText:
        keep_text(model)
    _keep_wide(model, dtype)
    return model.eval().requires_grad_(False)


def _keep_wide(model: Any, dtype: torch.dtype) -> None:
    """Leave in float32 what the model's class wants in it: routers' biases, states' matrices.

    As transformers does where it loads a model in `dtype`, by patterns of names.
    """
    for pattern, wide in model._get_dtype_plan(dtype).items():
        named = re.compile(pattern.replace("*", ".*"))
        for path, module in model.named_modules():
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is not None and named.search(f"{path}.{name}"):
                        own[name] = _like(tensor, tensor.to(wide))


def _like(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(after) if isinstance(before, nn.Parameter) else after


def _says(config: Mapping[str, Any], known: type | None, switch: str) -> bool:
    """What a `config.json` says of a switch; by default what its class in transformers does."""
    return bool(config.get(switch, getattr(known, switch, False)))


def _refusal(kind: object, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"config.json: model_type is {kind!r}, {reason}")

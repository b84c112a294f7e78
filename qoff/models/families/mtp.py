"""Layers for multi-token prediction (MTP), which some models have behind their last one.

Given the hidden states of a token, behind the model's final norm, and the embedding of the token
that follows, such a layer predicts the one after that (DeepSeek V3, arXiv 2412.19437, section 2.2):

    x = proj([embed_norm(embedding); hidden_norm(hidden)])
    x = norm(decoder_layer(x))

Embedding and head are the model's. What it returns takes the place of the hidden states to predict
a further token. Only the first such layer of a model is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .family import Fields, Has, TensorNames

_KEY = "qoff_mtp"  # of a config that is never written to a file
# By what the layer calls its own modules: within the number behind the last layer's, or "mtp".
_BEHIND = {
    "mtp.embed_norm": "enorm",
    "mtp.hidden_norm": "hnorm",
    "mtp.proj": "eh_proj",
    "mtp.norm": "shared_head.norm",
}
_OF_GGUF = {
    "mtp.embed_norm": "nextn.enorm",
    "mtp.hidden_norm": "nextn.hnorm",
    "mtp.proj": "nextn.eh_proj",
    "mtp.norm": "nextn.shared_head_norm",
}
_OWN_NORM = {**_BEHIND, "mtp.norm": "final_layernorm"}  # of Hunyuan 3
_APART = {
    "mtp.embed_norm": "pre_fc_norm_embedding",
    "mtp.hidden_norm": "pre_fc_norm_hidden",
    "mtp.proj": "fc",
    "mtp.norm": "norm",
}
_OF_LAYERS = ("layer_types", "mlp_layer_types")  # lists with an entry for each layer


def mtp_fields(config: Mapping[str, Any]) -> Fields:
    """What the spec of a layer for multi-token prediction has that its model's has not.

    Nothing, unless a config is one that `mtp_config` returns. Such layers attend.
    """
    return {"mtp": True, "recurrent": None} if config.get(_KEY) is True else {}


def mtp_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the layer for multi-token prediction of a model, as a model of that layer.

    The layer is like the last one of the model, and attends.
    """
    count, found = config["num_hidden_layers"], dict(config)
    for key in _OF_LAYERS:
        each, own = config.get(key), config.get(f"mtp_{key}")
        if isinstance(own, list) and own:
            found[key] = own[:1]
        elif isinstance(each, list) and "linear_attention" in each:
            found[key] = ["full_attention"]
        elif isinstance(each, list) and each:
            found[key] = each[count : count + 1] or each[-1:]
    if "first_k_dense_replace" in found:
        found["first_k_dense_replace"] = 0
    if config.get("index_topk") is not None:
        found["indexer_types"] = ["full"]
    return {**found, "num_hidden_layers": 1, _KEY: True}


def mtp_names(names: TensorNames, layers: int, has: Has) -> TensorNames | None:
    """What the tensors of that layer are called in a source; None: it has none.

    names, layers: of the model, and how many it has.
    """
    behind = names.layer.format(layers)
    for layer, at, called in (
        (behind, behind, _BEHIND),
        (behind, behind, _OWN_NORM),
        (behind, behind, _OF_GGUF),
        ("mtp.layers.0.", "mtp.", _APART),
    ):
        modules = {name: at + own for name, own in called.items()}
        if all(has(f"{module}.weight") for module in modules.values()):
            return replace(names, layer=layer, mtp=MappingProxyType(modules))
    return None

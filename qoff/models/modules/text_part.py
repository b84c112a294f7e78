"""Models that see, of which the part that continues text is kept: images are not read."""

from __future__ import annotations

from typing import Any

from torch import nn

from qoff.errors import UnsupportedModelError

# Of classes that add one token after the other; others diffuse, or write formulas.
_ENDS = ("ForConditionalGeneration", "NemotronH_Omni_Reasoning_V3")


def sees(kind: str) -> bool:
    """Whether transformers has a model of this `model_type` for images and text alone."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    name = str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind))
    return name.endswith(_ENDS) and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def keep_text(model: Any) -> None:
    """Take what is neither decoder nor head out of a model without weights.

    Raises UnsupportedModelError where its class does not say which they are.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if not isinstance(decoder, nn.Module) or decoder is model or not isinstance(head, nn.Module):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not tell its language model from what it sees with; it "
            "is not supported"
        )
    kept = {id(module) for part in (decoder, head) for module in part.modules()}
    _strip(model, kept)


def _strip(module: nn.Module, kept: set[int]) -> bool:
    """Take all tensors but those kept out of what has such within; whether it has.

    Modules without tensors stay: what bends logits, say.
    """
    if id(module) in kept:
        return True
    children = {name: child for name, child in module._modules.items() if child is not None}
    others = {name: child for name, child in children.items() if not _strip(child, kept)}
    if len(others) == len(children):
        return False
    for own in (module._parameters, module._buffers):
        own.update(dict.fromkeys(own))
    vars(module)["_is_hf_initialized"] = True  # or transformers initializes what is gone
    for name, child in others.items():
        if [*child.parameters(), *child.buffers()]:
            module._modules[name] = None
    return True

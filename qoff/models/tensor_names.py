"""What a family of models calls its tensors in a Hugging Face checkpoint, and how it fuses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class TensorNames:
    """Names of a family; by default Llama's.

    modules: from Llama's name of a module inside a layer, or the beginning of it, to the family's.
    leaves: the same for the last part of a module's name.
    fused_qkv: one tensor has the rows of queries, keys and values ("rows"), or those of one head
    after the other ("heads"). fused_gate_up: one tensor has the rows of gate above those of up.
    stacked_experts: one tensor has all experts, [experts, columns, rows], its rows of gate and up
    in turn. rope_pairs: neighbouring channels of queries and keys turn together. norm_offset: what
    norm weights are stored less. times: from EMBEDDING or LM_HEAD to a matrix that it
    is multiplied by from the right, and whether that is stored transposed.
    """

    layer: str = "model.layers.{}."
    modules: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    leaves: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    embedding: str = "model.embed_tokens.weight"
    positions: str = ""
    norm: str = "model.norm"
    head: str = "lm_head.weight"
    fused_qkv: Literal["", "rows", "heads"] = ""
    fused_gate_up: bool = False
    stacked_experts: bool = False
    rope_pairs: bool = False
    norm_offset: float = 0.0
    times: Mapping[str, tuple[str, bool]] = field(default_factory=lambda: MappingProxyType({}))

    def in_layer(self, layer: int, module: str, tensor: str) -> str:
        """The full name of a tensor of a module of a layer."""
        return self.layer.format(layer) + self._called(module) + ("." + tensor if tensor else "")

    def _called(self, module: str) -> str:
        """The family's name of a module: the longest beginning that has another name decides."""
        rest, _, leaf = module.rpartition(".")
        if leaf in self.leaves:
            module = f"{rest}.{self.leaves[leaf]}"
        for at in range(len(module), 0, -1):
            begin = module[:at]
            if begin in self.modules and (at == len(module) or module[at] == "."):
                return self.modules[begin] + module[at:]
        return module

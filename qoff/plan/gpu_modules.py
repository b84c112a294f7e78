"""The bytes that a plan takes on a GPU for a model of transformers' modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qoff.kernels.triton.attention.offloaded import joined_bytes
from qoff.kernels.triton.attention.select_blocks import select_bytes
from qoff.kvcache.device.rings import Rings
from qoff.kvcache.store.placement import DEVICE, HOST
from qoff.kvcache.store.plan import BlockPlans
from qoff.models.modules.outline import Outline

from .gpu import all_tables_bytes, attends_on_host, attention_bytes_on_host, device_block_plans
from .manual import Memory, Plan
from .modules import purposes

if TYPE_CHECKING:
    from qoff.models.modules.sequence_memory import SequenceMemory


def memory_of_modules_on_gpu(
    plan: Plan, outline: Outline, held: SequenceMemory, tiled: bool = False
) -> Memory:
    """As `memory_of_modules`, where attention is qoff's and K and V are packed."""
    shapes, dtype = [*outline.packed_shapes.values()], outline.dtype
    forms = plan.kv.packed_forms(shapes)
    blocks = device_block_plans(plan, shapes, forms)
    recent = plan.batches * Rings.bytes_for(shapes, plan.batch_size, plan.kv.window, dtype)
    found = purposes(plan, outline, held, tiled, blocks.tier_bytes(), recent)
    on_device, on_host = all_tables_bytes(plan, len(blocks.groups)), 0
    if attends_on_host(plan):
        on_device += max(joined_bytes(plan.pass_tokens, shape, dtype) for shape in shapes)
        blocks_each, top = plan.blocks_per_sequence, plan.kv.attention_top
        heads = max(shape.kv_heads for shape in shapes)
        on_device += select_bytes(plan.batch_size, heads, blocks_each, top, offloaded=True)
        kinds = set(zip(shapes, forms, strict=True))
        on_host = attention_bytes_on_host(plan, kinds, dtype, outline.vocab_size)
    found[DEVICE]["working space"] += on_device
    found[HOST]["working space"] += on_host
    return Memory(BlockPlans(), found, blocks)

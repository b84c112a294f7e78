"""The bytes that a plan takes for a model of transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qoff.kernels.cpu.sampling.scratch import sampling_bytes as sampling_scratch
from qoff.kvcache import PackedCache
from qoff.kvcache.host.recent import RecentTokens
from qoff.kvcache.store.placement import DEVICE, TIERS
from qoff.models.modules.outline import Outline
from qoff.models.modules.pass_bytes import kept_bytes, lent_bytes, scratch_bytes, working_bytes

from .manual import Memory, Plan, by_purpose

if TYPE_CHECKING:
    from qoff.models.modules.sequence_memory import SequenceMemory

_LOGITS = 3  # copies that a model's head makes: its own, scaled, capped


def memory_of_modules(
    plan: Plan, outline: Outline, held: SequenceMemory, tiled: bool = False
) -> Memory:
    """What a plan takes on a CPU beside the weights of layers, embedding and head.

    So, too, on a GPU, where nothing is packed. held: what a sequence takes beside packed blocks.
    tiled: layers stream in tiles.
    """
    shapes = [*outline.packed_shapes.values()]
    blocks = plan.block_plans(shapes, plan.kv.packed_forms(shapes))
    window = PackedCache.recent_tokens(plan.kv.window, plan.kv.sinks)
    recent = plan.batches * RecentTokens.bytes_for(shapes, plan.batch_size, window)
    kv = {tier: {"KV blocks": nbytes} for tier, nbytes in blocks.tier_bytes().items()}
    return Memory(blocks, purposes(plan, outline, held, tiled, kv, recent))


def purposes(
    plan: Plan,
    outline: Outline,
    held: SequenceMemory,
    tiled: bool,
    kv: Mapping[str, Mapping[str, int]],
    recent: int,
) -> dict[str, dict[str, int]]:
    """Bytes by tier and purpose. kv: of packed K and V; recent: of their layers, not packed."""
    sequences = plan.batches * plan.batch_size
    # K and V as transformers' attention has them.
    padded = held.attended_bytes(plan.context, outline.heads)
    passes = [
        (rows, columns, (1 if held.alone else plan.batch_size) * padded)
        for rows, columns in ((1, plan.prefill_tokens), (plan.batch_size, 1))
    ]
    each = [working_bytes(outline, b, t, plan.context) + both for b, t, both in passes]
    kept = [kept_bytes(outline, b, t, plan.context) for b, t, _ in passes]
    if tiled:
        work = plan.batches * sum(each)
    else:
        lent = [lent_bytes(outline, b, t) for b, t, _ in passes]
        work = plan.batches * sum(lent)
        work += max(one - own for one, own in zip(each, lent, strict=True))
    work += plan.logits_bytes(outline.vocab_size)
    head = 4 * _LOGITS * plan.batch_size * outline.vocab_size
    on_cpu = not outline.caches_on_device
    work += max(head, plan.sampling_bytes(outline.vocab_size, on_cpu))
    shared = [scratch_bytes(outline, b, t, plan.context) for b, t, _ in passes]
    if on_cpu:
        drawn = plan.passes(outline.vocab_size).drawn
        shared.append(sampling_scratch(outline.vocab_size, drawn, of_torch=False))
    work += max(shared)
    work += sequences * held.state_bytes  # copies, while passes are under way
    hidden: dict[str, int] = {
        tier: plan.batches * sum(kept) if tier == DEVICE else 0 for tier in TIERS
    }
    found = by_purpose(kv, recent, hidden, {DEVICE: work})
    found[DEVICE]["states"] = sequences * held.nbytes(plan.context)
    found[DEVICE]["weights outside of layers"] = outline.outer_bytes
    return found

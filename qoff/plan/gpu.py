"""The bytes that a plan takes on a GPU and in the host memory beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from qoff.errors import ArgumentError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import kept_blocks
from qoff.kernels.processor import pool_threads
from qoff.kernels.triton.attention.offloaded import chosen_bytes, host_bytes
from qoff.kernels.triton.indexed.choose import choose_bytes
from qoff.kernels.triton.linear.linear import CUBLAS_BYTES, linear_bytes, scratch_bytes
from qoff.kernels.triton.moe.experts import experts_bytes
from qoff.kernels.triton.ops import attention_bytes, states_bytes
from qoff.kvcache.device.plan import DeviceBlockPlan, DeviceBlockPlans
from qoff.kvcache.device.rings import Rings
from qoff.kvcache.device.tables import tables_bytes
from qoff.kvcache.groups import LayerGroup
from qoff.kvcache.store.placement import DEVICE, DISK, HOST, TIERS
from qoff.kvcache.store.plan import BlockPlan, BlockPlans
from qoff.models.native.caches import check_top_on_gpu
from qoff.models.native.cpu_pairs import cpu_pairs_bytes
from qoff.models.native.graph_steps import MOST
from qoff.models.native.pass_bytes import embedded_bytes, held_bytes, layer_bytes, logits_bytes
from qoff.models.native.rope import table_bytes
from qoff.models.native.scratch import packed_bytes
from qoff.models.spec import DecoderSpec

from .gpu_scratch import scratch_sizes
from .manual import Memory, Plan, by_purpose


def check_gpu_plan(plan: Plan) -> None:
    """Raise ArgumentError, naming all of them, for options that a GPU does not support."""
    kv, offloads = plan.kv, plan.kv_placement.device_fraction < 1
    wrong = [
        text
        for text, there in (
            ("sink tokens (use sinks=0)", kv.sinks > 0),
            (
                "cpu_attention='never' with attention to a part of offloaded blocks (use 'auto', "
                "or attention_top=1)",
                kv.attention_top < 1 and offloads and not plan.attends_on_cpu,
            ),
        )
        if there
    ]
    if wrong:
        raise ArgumentError(f"not supported on a GPU: {'; '.join(wrong)}")


def decided_on_gpu(plan: Plan, spec: DecoderSpec) -> Plan:
    """The plan, with what the model leaves no choice in.

    An index chooses among tokens that are on the GPU, so offloaded blocks come there. Raises
    ArgumentError where the CPU should attend to them.
    """
    if spec.index is None or not attends_on_host(plan):
        return plan
    if plan.cpu_attention == "always":
        raise ArgumentError(
            "cpu_attention='always' (--cpu-attention always), but an index of this model chooses "
            "among tokens that are on the GPU, where offloaded KV blocks come: use 'never'"
        )
    return replace(plan, cpu_attention="never")


def memory_on_gpu(
    plan: Plan,
    spec: DecoderSpec,
    shapes: Sequence[HeadShape],
    device: torch.device,
    dtype: torch.dtype,
    tiled: bool = False,
    recorded: int = 0,
) -> Memory:
    """What a plan takes for a model that computes there in `dtype`, float16 or bfloat16.

    tiled: whose layers stream in tiles. recorded: sequences of the largest batch whose decode steps
    are recorded, 0 for none; recordings have working space of their own. Working space is the sum
    of what each module says that it allocates at most, in the step of a pass that takes most.
    """
    check_top_on_gpu(shapes, plan.kv)
    forms = plan.kv.packed_forms(shapes)
    blocks = device_block_plans(plan, shapes, forms)
    recent = Rings.bytes_for(shapes, plan.batch_size, plan.kv.window, dtype)
    kinds = set(zip(shapes, forms, strict=True))
    model = (spec, kinds, device, dtype)
    scratch = scratch_sizes(plan, spec, device, dtype)
    on_device = _pass_bytes(plan, *model, tiled) + scratch.nbytes
    on_device += all_tables_bytes(plan, len(blocks.groups)) + table_bytes(spec, plan.context + 1)
    on_device += plan.logits_bytes(spec.vocab_size)  # which stay from step to step
    held = plan.prefill_tokens + plan.decode_tokens  # each batch may do both in a round
    on_device += plan.batches * held_bytes(spec, held, dtype)
    if recorded:
        # Recordings are of more blocks than there are: see `tables.pass_tables`.
        context = plan.context + max(plan.context // 4, 1024)
        steps = replace(
            plan,
            batch_size=recorded,
            prefill_tokens=1,
            draft_tokens=0,
            draft_model=None,
            context=context,
        )
        on_device += _pass_bytes(steps, *model, piece=0 if scratch.held else scratch.piece)
        on_device += _fixed_bytes(recorded, spec, dtype) + held_bytes(spec, recorded, dtype)
    work = {DEVICE: on_device, HOST: 0}
    if attends_on_host(plan):
        work[HOST] += attention_bytes_on_host(plan, kinds, dtype, spec.vocab_size)
    if plan.cpu_experts and spec.experts is not None:
        most = plan.pass_tokens if plan.passing_from is None else plan.passing_from - 1
        tokens = [min(count, most) for count in plan.tokens_of_passes]
        work[HOST] += cpu_pairs_bytes(spec, tokens, dtype) if most else 0
    hidden = plan.hidden_bytes(spec.hidden_width, dtype)
    purposes = by_purpose(blocks.tier_bytes(), plan.batches * recent, hidden, work)
    if spec.recurrent is not None:
        purposes[DEVICE]["states"] = plan.states_bytes(spec, dtype)
        purposes[HOST]["states"] = plan.saved_states_bytes(spec)
    return Memory(BlockPlans(), purposes, blocks)


def device_block_plans(
    plan: Plan, shapes: Sequence[HeadShape], forms: Sequence[KVFormat]
) -> DeviceBlockPlans:
    """Sizes of the packed KV cache of all sequences, and of what it passes through."""
    found = list[tuple[LayerGroup, DeviceBlockPlan]]()
    for group in plan.layer_groups(shapes, on_gpu=True):
        kinds = [(shapes[layer].kv_heads, forms[layer]) for layer in group.layers]
        found.append(
            (group, _windowed_plan(plan, group, kinds) if group.reach else _whole_plan(plan, kinds))
        )
    return DeviceBlockPlans(tuple(found))


_Kinds: TypeAlias = Sequence[tuple[int, KVFormat]]  # KV heads and form of each layer of a group


def _records(kinds: _Kinds) -> tuple[int, ...]:
    return tuple(heads * form.nbytes for heads, form in kinds)


def _windowed_plan(plan: Plan, group: LayerGroup, kinds: _Kinds) -> DeviceBlockPlan:
    """Of layers that free blocks, which are on the device."""
    size, records = plan.batch_size, _records(kinds)
    each = group.blocks_at_once(plan.context, plan.kv.window)
    # A pass that decodes has a spare block (see `DeviceCachePass`), and one beside it that reads.
    made = 2 + group.made_at_once(plan.pass_tokens, size, plan.kv.window, plan.context)
    kept = size * min(plan.blocks_per_sequence, each)
    most = min(kept + made, size * plan.blocks_per_sequence)
    nowhere = BlockPlan(records, dict.fromkeys(TIERS, 0), plan.batches * size, 0, True)
    return DeviceBlockPlan(resident=plan.batches * most, offloaded=nowhere)


def _whole_plan(plan: Plan, kinds: _Kinds) -> DeviceBlockPlan:
    """Of layers that keep all blocks."""
    chooses = kinds if plan.kv.attention_top < 1 else ()
    one = plan.kv_placement.capacity(plan.blocks_per_sequence)
    size, sequences = plan.batch_size, plan.batches * plan.batch_size
    offloaded_each = one[HOST] + one[DISK]
    offloaded = BlockPlan(
        _records(kinds),
        {DEVICE: 0, HOST: one[HOST] * sequences, DISK: one[DISK] * sequences},
        sequences,
        size * one[DISK] if plan.attends_on_cpu else 0,
        True,
        choice_bytes=sum(heads for heads, _ in chooses),
    )
    staged_sequences = 0
    if not plan.attends_on_cpu:
        staged_sequences = size
    elif plan.cpu_attention == "auto" and (
        plan.context > plan.prefill_tokens or plan.share_prefixes
    ):
        staged_sequences = 1
    # A token may complete the block of each sequence, 64 more one each.
    pieces = min(size, plan.prefill_tokens)
    new = max(size, pieces + (plan.prefill_tokens - pieces) // BLOCK_TOKENS)
    return DeviceBlockPlan(
        resident=one[DEVICE] * sequences,
        offloaded=offloaded,
        prefetched=staged_sequences * offloaded_each,
        prefetched_from_disk=staged_sequences * one[DISK],
        write_back=min(new, size * offloaded_each),
        bound_bytes=tuple(heads * form.bound_bytes for heads, form in chooses),
    )


def _pass_bytes(
    plan: Plan,
    spec: DecoderSpec,
    kinds: Collection[tuple[HeadShape, KVFormat]],
    device: torch.device,
    dtype: torch.dtype,
    tiled: bool = False,
    piece: int = 0,
) -> int:
    """Bytes of the device that the step of a pass allocates which takes most.

    kinds: attention and form of a block, of each kind of layer. piece: of dequantized weights, for
    each product of its own.
    """
    attention = max(
        attention_bytes(
            plan.pass_tokens,
            plan.batch_size,
            plan.blocks_per_sequence,
            shape,
            form,
            dtype,
            device,
            offloaded=attends_on_host(plan),
            values_rotated=plan.kv.values_rotated,
            top=plan.kv.attention_top,
            chosen=spec.chosen_width,
        )
        for shape, form in kinds
        if not shape.indexes
    )
    tokens = plan.pass_tokens
    if spec.index is not None:
        ring = plan.kv.window + BLOCK_TOKENS
        longest = plan.blocks_per_sequence * BLOCK_TOKENS + ring + tokens
        attention += choose_bytes(tokens, longest, spec.index.shape, dtype)

    def linear(count: int, rows: int, columns: int, gated: bool = True) -> int:
        own = scratch_bytes(count, rows, columns, device, piece) if piece else 0
        return own + linear_bytes(count, rows, columns, dtype, device, silu_mul=gated)

    layer = layer_bytes(
        spec,
        tokens,
        dtype,
        linear_bytes=linear,
        experts_bytes=partial(experts_bytes, dtype=dtype),
        attention_bytes=attention,
        states_bytes=partial(states_bytes, sequences=plan.batch_size, dtype=dtype),
        tiled=tiled,
    )
    head = linear(plan.decode_tokens, spec.vocab_size, spec.hidden_size, gated=False)
    head += logits_bytes(spec, plan.decode_tokens, dtype)
    embedded = embedded_bytes(spec, tokens, dtype)
    sampling = plan.sampling_bytes(spec.vocab_size, on_cpu=False)
    work = CUBLAS_BYTES + max(embedded, layer, head, sampling)
    return work + (plan.tile_bytes(spec, dtype) if tiled else 0)


def all_tables_bytes(plan: Plan, groups: int) -> int:
    """Bytes of the device that the tables of passes take, for each of so many groups of layers."""
    tables = tables_bytes(
        plan.batch_size,
        plan.blocks_per_sequence,
        plan.prefill_tokens + plan.decode_tokens,
        plan.kv_placement.device_fraction < 1,
    )
    return 2 * plan.batches * groups * tables  # each may decode and read prompts in a round


def _fixed_bytes(rows: int, spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of what recordings read and leave: tokens or hidden states, products of the head, and
    tokens of steps that follow each other.

    For each number of rows, each about half of the next, up to this many.
    """
    values = (spec.hidden_width + spec.vocab_size) * dtype.itemsize
    return 2 * rows * (8 + values + 8 * MOST)


def _lists_bytes(plan: Plan, shape: HeadShape) -> int:
    """Bytes of host memory of the blocks that a GPU has chosen for the CPU to attend to."""
    if plan.kv.attention_top == 1:
        return 0
    kept = kept_blocks(plan.kv.attention_top, plan.blocks_per_sequence)
    return chosen_bytes(plan.batch_size, shape.kv_heads, kept)


def attends_on_host(plan: Plan) -> bool:
    """Whether some blocks are attended on the CPU."""
    return plan.attends_on_cpu and plan.kv_placement.device_fraction < 1


def attention_bytes_on_host(
    plan: Plan, kinds: Collection[tuple[HeadShape, KVFormat]], dtype: torch.dtype, vocab: int
) -> int:
    """Queries, results and lists of such attention, in `dtype`, and what the CPU works in.

    kinds: attention and form of a block, of each kind of layer.
    """
    moved = max(host_bytes(plan.pass_tokens, shape, dtype) for shape, _ in kinds)
    moved += max(_lists_bytes(plan, shape) for shape, _ in kinds)
    passes, threads = plan.passes(vocab), pool_threads()
    return moved + max(packed_bytes(form, shape.heads, passes, threads) for shape, form in kinds)

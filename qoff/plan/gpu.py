"""The bytes that a plan takes on a GPU and in the host memory beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qoff.errors import ArgumentError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.triton.attention.prefill import scratch_bytes
from qoff.kernels.triton.linear.linear import ScratchConfig
from qoff.kvcache.device.plan import DeviceBlockPlan
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.kvcache.store.tiered import BlockPlan
from qoff.memory.activations import ActivationStore
from qoff.models.forward_pass import LayerWorkspace
from qoff.models.native.rope import table_bytes
from qoff.models.spec import DecoderSpec

from .manual import Memory, Plan

_PROGRAMS = 4096  # of a GPU that share decode attention, at most


@dataclass(frozen=True)
class Gpu:
    """Where a model computes, and in which type: float16 or bfloat16."""

    device: torch.device
    dtype: torch.dtype


def check_gpu_plan(plan: Plan) -> None:
    """Raise ArgumentError, naming all of them, for options that a GPU does not have."""
    kv = plan.kv
    offloaded = plan.kv_placement.device_fraction < 1
    wrong = [
        text
        for text, there in (
            ("sink tokens (use sinks=0)", kv.sinks > 0),
            ("attention to a part of the blocks (use attention_top=1)", kv.attention_top < 1),
            (
                "tokens' scales of K in blocks that the CPU attends to (use k_form='channel', "
                "cpu_attention='never' or all blocks on the device)",
                kv.k_form == "token" and offloaded and plan.attends_on_cpu,
            ),
        )
        if there
    ]
    if wrong:
        raise ArgumentError(f"on a GPU there are no {'; no '.join(wrong)}")


def memory_on_gpu(
    plan: Plan, spec: DecoderSpec, shapes: Sequence[HeadShape], gpu: Gpu, tiled: bool = False
) -> Memory:
    """What a plan takes for a model; tiled: whose layers stream in tiles.

    What is counted as working space is a bound: as if nothing that a layer computes were freed
    before its end.
    """
    forms = plan.kv.packed_forms([shape.head_dim for shape in shapes])
    blocks = device_block_plan(plan, forms, [shape.kv_heads for shape in shapes])
    kv = blocks.tier_bytes()
    item = gpu.dtype.itemsize
    tokens = max(plan.prefill_tokens, plan.batch_size)
    ring = plan.kv.window + BLOCK_TOKENS
    recent = sum(2 * item * ring * shape.kv_heads * shape.head_dim for shape in shapes)
    if plan.activations == "device":
        held = plan.batches * (plan.prefill_tokens + plan.batch_size) * spec.hidden_size
        hidden = {DEVICE: item * held, HOST: 0, DISK: 0}
    else:
        hidden = ActivationStore.bytes_for(
            plan.activations, 2 * plan.batches, tokens, spec.hidden_size, gpu.dtype
        )
    work = {
        DEVICE: _device_work(plan, spec, shapes, forms, gpu, tiled),
        HOST: _host_work(plan, spec, tokens, item),
        DISK: 0,
    }
    purposes = {
        tier: {
            **kv[tier],
            "recent KV": plan.batches * plan.batch_size * recent if tier == DEVICE else 0,
            "hidden states": hidden[tier],
            "working space": work[tier],
        }
        for tier in (DEVICE, HOST, DISK)
    }
    return Memory(blocks.offloaded, purposes, blocks)


def device_block_plan(
    plan: Plan, forms: Sequence[KVFormat], kv_heads: Sequence[int]
) -> DeviceBlockPlan:
    """Sizes of the packed KV cache of all sequences, and of what it passes through."""
    one = plan.kv_placement.capacity(plan.blocks_per_sequence)
    size, sequences = plan.batch_size, plan.batches * plan.batch_size
    offloaded_each = one[HOST] + one[DISK]
    records = tuple(h * form.nbytes for h, form in zip(kv_heads, forms, strict=True))
    offloaded = BlockPlan(
        records,
        {DEVICE: 0, HOST: one[HOST] * sequences, DISK: one[DISK] * sequences},
        size * one[DISK] if plan.attends_on_cpu else 0,
        True,
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
    )


def _device_work(
    plan: Plan,
    spec: DecoderSpec,
    shapes: Sequence[HeadShape],
    forms: Sequence[KVFormat],
    gpu: Gpu,
    tiled: bool,
) -> int:
    """Bytes of what a pass computes, of logits and of tables."""
    item, size = gpu.dtype.itemsize, plan.batch_size
    tokens, wide = max(plan.prefill_tokens, size), spec.q_rows + 2 * spec.kv_rows
    # Rows in the order of the slots, norms, rotations, results, and those of both processors.
    attention = item * tokens * (2 * wide + 9 * spec.q_rows + 2 * spec.kv_rows + spec.hidden_size)
    attention += 16 * tokens * spec.num_heads  # log-sum-exps
    blocks = plan.blocks_per_sequence
    attention += max(
        max(
            _decode_parts(shape, size, blocks, item),
            scratch_bytes(size, blocks, shape.kv_heads, form, gpu.device),
        )
        for shape, form in zip(shapes, forms, strict=True)
    )
    chunk = LayerWorkspace.nbytes(spec, tokens, tiled) // 4 - tokens * (wide + spec.q_rows)
    mlp = item * (3 * chunk + 2 * tokens * spec.hidden_size)
    embedded = 4 * tokens * spec.hidden_size
    longest = max(spec.hidden_size, spec.intermediate_size, spec.q_rows)
    matrix = max(ScratchConfig().nbytes, 2 * 128 * longest)
    rows = plan.batches * size
    logits = 4 * rows * spec.vocab_size + item * size * (spec.vocab_size + spec.hidden_size)
    rotary = table_bytes(spec, plan.context + 1)
    columns = 16 * (blocks // 16 + 2)
    tables = 8 * plan.batches * (4 * size * columns + 7 * (size + 4) + 6 * tokens)
    work = max(attention, mlp, embedded) + matrix + logits + rotary + tables
    if tiled:  # each pass has its own between the tiles of a layer
        for most in (plan.prefill_tokens, size):
            work += plan.batches * LayerWorkspace.nbytes(spec, most, tiled=True) // 4 * item
    return work


def _decode_parts(shape: HeadShape, sequences: int, blocks: int, item: int) -> int:
    """Bytes of the parts that decode attention is merged of."""
    parts = 1 + min(blocks, -(-_PROGRAMS // (sequences * shape.kv_heads)))
    return (parts + 2) * sequences * shape.heads * (item * shape.head_dim + 4)


def _host_work(plan: Plan, spec: DecoderSpec, tokens: int, item: int) -> int:
    """Bytes of logits, and of queries and results of attention on the CPU.

    torch locks memory in powers of two.
    """
    work = 4 * plan.batches * plan.batch_size * spec.vocab_size
    if plan.attends_on_cpu and plan.kv_placement.device_fraction < 1:
        work += tokens * (spec.q_rows * (2 * 2 * item + 8) + 8 * spec.num_heads)
    return work

"""DeepSpeed's ZeRO-3 with weights and optimizer states on disk, training all weights of a model.

A process of its own: `python -m bench.peers.deepspeed_zero JSON`, with the keys of `Work`, or
`build` instead. It prints a line of JSON when the model is there and after each step. Every line
has all until then, so what a process that is killed leaves counts, too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

from bench.control_group import status_bytes
from bench.peers.packages import use_deepspeed

_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


class Work(TypedDict):
    """model: folder of a Llama of transformers; batches: file of ids [micro-batches, 1, tokens];
    states: folder that weights and states go to."""

    model: str
    batches: str
    states: str
    steps: int


def configuration(work: Work, largest: int, count: int) -> dict[str, Any]:
    """DeepSpeed's own, with the fewest bytes of memory.

    largest: elements of the largest parameter, which a buffer holds. count: micro-batches of a
    step.
    """
    where = {"device": "nvme", "nvme_path": work["states"], "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "bf16": {"enabled": True},
        "aio": _AIO,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1,  # a parameter is updated at a time
            "reduce_bucket_size": largest,
            "stage3_max_reuse_distance": 0,  # a weight has its buffer while it is computed with
            "stage3_prefetch_bucket_size": 0,  # weights read ahead would take all buffers
            "offload_param": where | {"buffer_count": 5, "buffer_size": largest, "max_in_cpu": 0},
            "offload_optimizer": where | {"buffer_count": 4},  # weights, gradients, moments
        },
    }


def _largest(path: Path) -> int:
    """Elements of a checkpoint's largest tensor."""
    from safetensors import safe_open

    sizes = []
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                rows, *columns = tensors.get_slice(name).get_shape()
                sizes.append(rows * (columns[0] if columns else 1))
    return max(sizes)


def _fill(model: Any, path: Path) -> None:
    """Copy a checkpoint into partitioned parameters, one at a time."""
    import torch
    from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-not-found]
    from safetensors import safe_open

    parameters = dict(model.named_parameters())
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                p = parameters.pop(name)
                with torch.no_grad(), GatheredParameters([p], modifier_rank=0):
                    p.copy_(tensors.get_tensor(name))
    if parameters:
        raise ValueError(f"{path} lacks {', '.join(parameters)}")


def _engine(work: Work, count: int) -> Any:
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed(dist_backend="gloo")
    path = Path(work["model"])
    wanted = configuration(work, _largest(path), count)
    with deepspeed.zero.Init(config_dict_or_path=wanted):
        model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(path))
    _fill(model, path)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-5, weight_decay=0.01, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model.train(), optimizer=optimizer, config=wanted)
    return engine


def trained(work: Work) -> Iterator[dict[str, Any]]:
    """Seconds of the start and of each step, losses and bytes at the peak, as far as it is.

    The first step has 64 tokens of each micro-batch: DeepSpeed records the order of weights in it.
    """
    import torch

    start = time.perf_counter()
    ids = torch.load(work["batches"])
    engine = _engine(work, len(ids))
    found: dict[str, Any] = {"began_s": time.perf_counter() - start, "seconds": [], "losses": []}
    yield found
    for step in range(work["steps"] + 1):
        start, losses = time.perf_counter(), []
        for batch in ids[..., :64] if step == 0 else ids:
            loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found["seconds"].append(time.perf_counter() - start)
        found["losses"].append(sum(losses) / len(losses))
        yield found


def build() -> None:
    """Compile its kernels, where that is not done yet: minutes, and more memory than a limit."""
    from deepspeed.ops.op_builder import (  # type: ignore[import-not-found]
        AsyncIOBuilder,
        CPUAdamBuilder,
    )

    for builder in (AsyncIOBuilder, CPUAdamBuilder):
        builder().load(verbose=False)


def main() -> None:
    """Run it from the command line."""
    answers = os.fdopen(os.dup(1), "w")  # what DeepSpeed prints goes where errors go
    os.dup2(2, 1)
    use_deepspeed()
    if sys.argv[1] == "build":
        build()
        return
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for found in trained(json.loads(sys.argv[1])):
        found |= {"at": time.time(), "rss": status_bytes("VmHWM")}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()

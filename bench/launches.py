"""What a decoder layer on a GPU costs the host: launches, and Python, without a GPU.

The decoder runs on the Triton ops with memory of the CPU, and launches are stubbed, so all that is
left is what the host does: counted, and timed in CPU time of its thread, for models of two depths;
the cost of a layer is their difference over their layers. Kernels: Triton's, and operations of
torch that would be kernels. Microseconds: without and with what comes before a launch, which is to
find the compiled kernel by the arguments, Triton's way or a bound kernel's; not with the launch,
and with what torch computes here. Of each kind the fastest of many steps: other processes disturb.
Of a step that is replayed as one CUDA graph: all that is left to the host but the graph's launch.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit

from bench.gpu_limits import WARP
from bench.harness import Report, arguments
from bench.random_model import SMALL, write_random_checkpoint
from bench.variants.variant import empty
from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.triton import ops as triton_ops
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kvcache import KVQuant
from qoff.memory.instrumentation import Instrumentation
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.graphs import Record
from qoff.models.runtime import Runtime

_DEPTHS = (4, 12)
_CAPABILITY = 90
_STEPS, _STEPS_QUICK = 100, 5
_CONTEXTS = (1, 63, 64, 200, 449, 1024, 5000, 33000, 131072)
_COUNTS = ("start", "row_start", "length", "packed", "after")  # of a pass
_PROMPT = 200  # tokens: some blocks are packed
# Operations of torch that move no data on a GPU.
_FREE = frozenset(
    {"alias", "as_strided", "detach", "expand", "flatten", "permute", "reshape", "select", "slice"}
    | {"split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze"}
    | {
        "view",
        "_reshape_alias",
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
    }
)


@dataclass(frozen=True)
class HostCost:
    """Of one decode step."""

    kernels: Counter[str]
    torch_ops: Counter[str]
    bare_s: tuple[float, ...]  # launches do nothing
    bound_s: tuple[float, ...]  # launches bind and specialize their arguments
    replayed_s: tuple[float, ...]  # of one graph, whose launch does nothing


class _CountOps(TorchDispatchMode):
    """Counts operations of torch that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _FREE:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for a launch."""


class _Compiled:
    """What a bound kernel keeps, and launches at the next call, as long as the bench runs."""

    on_launch: Callable[..., None]

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(_Compiled.on_launch, self._kernel)


@contextmanager
def launches(
    on_launch: Callable[..., None], on_bound: Callable[..., None] | None = None
) -> Iterator[None]:
    """Every launch of a Triton kernel calls `on_launch(kernel, *args, **kwargs)` instead.

    on_bound: called for launches of what a bound kernel has found before; default: as for others.
    """

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> _Compiled:
        on_launch(self, *args, **kwargs)
        return _Compiled(self)

    _Compiled.on_launch = staticmethod(on_bound or on_launch)
    with patch.object(jit.JITFunction, "run", run):
        yield


def binder(found: Callable[[Any, str], object] = nothing) -> Callable[..., None]:
    """Does what Triton does before it launches a kernel that is compiled.

    found: told the kernel, and the key that what is compiled is found by.
    """
    backend = CUDABackend(GPUTarget("cuda", _CAPABILITY, WARP))
    bind: dict[int, Callable[..., Any]] = {}

    def on_launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        bound = bind.get(id(kernel))
        if bound is None:
            bound = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
            bind[id(kernel)] = bound
        _, specialization, options = bound(*args, debug=False, **kwargs)
        found(kernel, str((tuple(specialization), str(options))))

    return on_launch


def new_forms(sequences: int) -> dict[int, int]:
    """Forms of kernels that attention at decode compiles anew in each context of an answer.

    As on a GPU of many processors, on meta tensors; at each context a block is packed too.
    """
    form, shape = KVFormat(128), HeadShape(32, 8, 128, 0.1)
    found: set[str] = set()
    seen = {}
    bind = binder(lambda kernel, key: found.add(f"{kernel.fn.__name__} {key}"))
    table = empty(torch.float32, _CONTEXTS[-1] + 1, 64)
    with launches(bind, nothing), patch.object(Gpu, "of", lambda device: Gpu(_CAPABILITY, 132)):
        for context in _CONTEXTS:
            before = len(found)
            cache = _cache_of(form, sequences, context)
            ragged = Ragged.of([1] * sequences, [context] * sequences)
            qkv = empty(torch.float16, sequences, shape.qkv_width)
            triton_ops.attention(qkv, shape, cache, ragged, rotary=(table, table))
            seen[context] = len(found) - before
    return seen


def _cache_of(form: KVFormat, sequences: int, context: int) -> DeviceLayerCache:
    counts: dict[str, Any] = {
        name: empty(torch.int32, sequences + (name == "row_start")) for name in _COUNTS
    }
    blocks = -(-context // BLOCK_TOKENS)
    step = PassTables(
        **counts,
        table=empty(torch.int32, sequences, -(-(blocks + 1) // 16) * 16),
        positions=counts["start"],
        max_rows=1,
        max_packed=BLOCK_TOKENS * blocks,
        max_new_blocks=1,
    )
    recent = empty(torch.float16, sequences, 128, 8, form.head_dim)
    pool = empty(torch.uint8, blocks + 1, 8, form.nbytes)
    return DeviceLayerCache(form, pool, recent, recent, step, values_rotated=True)


def measure(folder: Path, layers: int, sequences: int, steps: int) -> HostCost:
    """The cost of a decode step of a model with so many layers."""
    path = folder / f"{layers}"
    write_random_checkpoint(path, SMALL | {"num_hidden_layers": layers}, packing="split32")
    kernels: Counter[str] = Counter()
    with torch.inference_mode():
        with _opened(path, sequences) as step:
            with launches(nothing):
                step(_PROMPT)
                with patch.object(BoundKernel, "__call__", nothing):
                    bare = tuple(_seconds(step) for _ in range(steps))
            with launches(binder(), nothing):
                step(1)
                bound = tuple(_seconds(step) for _ in range(steps))
            counting = launches(lambda kernel, *a, **k: kernels.update([kernel.fn.__name__]))
            with counting, _CountOps() as counted:
                step(1)
        with launches(nothing), _opened(path, sequences, _record) as step:
            for tokens in (_PROMPT, 1, 1):
                step(tokens)
            replayed = tuple(_seconds(step) for _ in range(steps))
    return HostCost(kernels, counted.seen, bare, bound, replayed)


def _record(work: Callable[[], None]) -> Callable[[], None]:
    """A recording whose replay does nothing."""
    return lambda: None


@contextmanager
def _opened(
    path: Path, sequences: int, record: Record | None = None
) -> Iterator[Callable[[int], None]]:
    """A model, as what reads so many tokens of each sequence, one behind the other."""
    instrumentation = Instrumentation(ops=triton_ops, record=record)
    with Runtime(path, kv=KVQuant(), instrumentation=instrumentation) as runtime:
        cache = runtime.new_cache(sequences)

        def step(tokens: int) -> None:
            ragged = Ragged.of([tokens] * sequences, cache.lengths)
            ids = torch.zeros(ragged.tokens, dtype=torch.int64)
            last = tokens * torch.arange(1, sequences + 1) - 1
            runtime.forward(ForwardPass(ids, ragged, cache, last))

        yield step


def _seconds(step: Callable[[int], None]) -> float:
    start = time.thread_time()
    step(1)
    return time.thread_time() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = arguments(__doc__, argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set: nothing is launched in this process", file=sys.stderr)
        return 2
    header = (
        "sequences",
        "Triton",
        "torch",
        "us, stubbed",
        "us, with binding",
        "us, replayed step",
    )
    title = "One decoder layer at decode: launches, and microseconds of the host"
    settings = {"quick": args.quick, "depths": _DEPTHS}
    report = Report("launches", settings, title, header, unit="us per layer")
    steps = _STEPS_QUICK if args.quick else _STEPS
    torch.set_num_threads(1)  # threads that start cost more than what they compute here
    for sequences in (1,) if args.quick else (1, 8, 64):
        with tempfile.TemporaryDirectory() as folder:
            few, many = (measure(Path(folder), d, sequences, steps) for d in _DEPTHS)
        _add(report, sequences, few, many, new_forms(sequences))
    print("wrote", report.publish(args.out))
    return 0


def _add(
    report: Report, sequences: int, few: HostCost, many: HostCost, forms: dict[int, int]
) -> None:
    layers = _DEPTHS[1] - _DEPTHS[0]
    kernels, torch_ops = many.kernels - few.kernels, many.torch_ops - few.torch_ops
    bare, bound = (
        1e6 * (min(b) - min(a)) / layers
        for a, b in ((few.bare_s, many.bare_s), (few.bound_s, many.bound_s))
    )
    counts = (kernels.total() / layers, torch_ops.total() / layers)
    replayed = 1e6 * statistics.median(many.replayed_s)
    times = tuple(f"{us:.0f}" for us in (bare, bound, replayed))
    report.rows.append((str(sequences), f"{counts[0]:.1f}", f"{counts[1]:.1f}", *times))
    report.measured[f"{sequences} sequences"] = {
        "triton_launches": counts[0],
        "torch_launches": counts[1],
        "host_us": bare,
        "host_us_with_binding": bound,
        "replayed_step_us": replayed,  # of all layers
        "triton": {name: count / layers for name, count in sorted(kernels.items())},
        "torch": {name: count / layers for name, count in sorted(torch_ops.items())},
        "attention_compiled_by_context": {str(context): count for context, count in forms.items()},
    }
    names = ", ".join(f"{name} {count / layers:g}" for name, count in kernels.most_common())
    report.notes.append(f"{sequences}: {names}")
    others = ", ".join(f"{name} {count / layers:g}" for name, count in torch_ops.most_common())
    report.notes.append(f"{sequences}: torch: {others}")


if __name__ == "__main__":
    sys.exit(main())

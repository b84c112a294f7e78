"""FlexGen's published figures, by its own cost model, and what qoff would do on that machine.

The formulas and constants are facts of FlexGen's `experimental/cost_model.py` (Apache-2.0); its
authors fitted the constants to their runs by gradient descent, so a figure of a run that was fitted
says little. What is a test here: OPT-30B in float16 from the shipped constants and plan, as it is;
and OPT-175B, where the disk's rate is fitted to prompts of 512 tokens, and 256 and 1024 follow.
Rows of compressed runs are fits: their one constant, the seconds of decompression, is fitted to the
row itself. qoff's figures are of its simulator, on a machine described by the same constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from typing import Any

from scipy.optimize import brentq

from bench.gpu_models.rows import opt
from bench.harness import Bar, Report
from qoff.engine.simulated import simulated
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.processor import Processor
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig

_GB, _T = 1 << 30, 1e12
_WITHIN = 0.1
_NEW = 32  # tokens of an answer in all of its runs


@dataclass(frozen=True)
class Shape:
    """An OPT model."""

    layers: int
    hidden: int
    heads: int

    @property
    def config(self) -> dict[str, Any]:
        return opt(self.hidden, self.layers, self.heads)

    @property
    def layer_bytes(self) -> int:
        """Of the matrices of a layer in float16: attention, and an MLP four times as wide."""
        return 2 * 12 * self.hidden**2


OPT_30B, OPT_175B = Shape(48, 7168, 56), Shape(96, 12288, 96)


@dataclass(frozen=True)
class Constants:
    """Of a T4 machine on Google's cloud, as FlexGen ships them: bytes and operations a second."""

    to_gpu: float = 12.89 * _GB
    cache_from_gpu: float = 0.97 * _GB
    hidden_from_gpu: float = 4.82 * _GB
    disk_read: float = 0.473 * _GB
    prompt_cache_to_disk: float = 0.746 * _GB
    to_disk: float = 2.015 * _GB
    prompt_matmul: float = 21.24 * _T
    prompt_attention: float = 9.97 * _T
    matmul: float = 4.3 * _T
    attention: float = 0.079 * _T
    cpu: float = 0.0123 * _T
    unpack: float = float("inf")  # bytes of float16 a second; not FlexGen's


@dataclass(frozen=True)
class Policy:
    """Sequences of a GPU batch, batches; parts of weights, cache and hidden states on GPU and CPU.

    What is on neither is on disk. packed: bytes by those of float16, of weights and of the cache.
    on_cpu: the CPU attends to what of the cache is not on the GPU; else that goes there.
    """

    size: int
    batches: int
    weights: tuple[float, float]
    cache: tuple[float, float]
    hidden: tuple[float, float]
    packed: tuple[float, float] = (1.0, 1.0)
    on_cpu: bool = True

    @property
    def sequences(self) -> int:
        return self.size * self.batches


def layer_s(shape: Shape, policy: Policy, by: Constants, prompt: int) -> tuple[float, float]:
    """Seconds of a layer: while prompts are read, and for a new token of each sequence."""
    h, count, (w_packed, packed) = shape.hidden, policy.sequences, policy.packed
    weights = shape.layer_bytes * w_packed
    whole = shape.layer_bytes if w_packed < 1 else 0
    w_off, w_disk = 1 - policy.weights[0], 1 - sum(policy.weights)
    c_off, c_disk = 1 - policy.cache[0], 1 - sum(policy.cache)
    h_off, h_disk = 1 - policy.hidden[0], 1 - sum(policy.hidden)
    made = 4 * (prompt + 1) * h * count * packed  # bytes of the cache, K and V
    state = 2 * prompt * h * count
    up = (weights * w_off + state * h_off) / by.to_gpu
    down = made * c_off / by.cache_from_gpu + state * h_off / by.hidden_from_gpu
    read = (weights * w_disk + state * h_disk) / by.disk_read
    write = made * c_disk / by.prompt_cache_to_disk + state * h_disk / by.to_disk
    compute = count * prompt * 24 * h**2 / by.prompt_matmul
    compute += 4 * count * prompt**2 * h / by.prompt_attention + whole / by.unpack
    prefill = max(up + read, down + write, compute)
    held = 4 * count * (prompt + _NEW / 2) * h  # of the cache, halfway
    new = 2 * h * count
    moved = 0.0 if policy.on_cpu else held * c_off * packed
    up = (weights * w_off + new * h_off + moved) / by.to_gpu
    down = new * h_off / by.hidden_from_gpu
    read = (held * packed * c_disk + new * h_disk) / by.disk_read
    read += weights * w_disk / (0.95 * by.disk_read)
    write = (4 * count * h * packed * c_disk + new * h_disk) / by.to_disk
    near = 1 - (c_off if policy.on_cpu else 0)
    compute = count * 24 * h**2 / by.matmul + held * near / by.attention
    compute += held * (1 - near) / (by.cpu * _cpu_share(policy.size, h))
    compute += (whole + (held if packed < 1 else 0)) / by.unpack
    return prefill, up + max(down, read, write, compute)


def _cpu_share(size: int, hidden: int) -> float:
    """Of the CPU's rate, what small batches and models reach."""
    few, narrow = max(0.0, log2(64 / size)), max(0.0, log2(4096 / hidden))
    return max(0.1, 1 + 0.0168 * few * narrow - 0.0328 * few - 0.0621 * narrow)


def tokens_per_s(shape: Shape, policy: Policy, by: Constants, prompt: int) -> float:
    """New tokens a second, prompts included, as FlexGen counts them."""
    prefill, decode = layer_s(shape, policy, by, prompt)
    return policy.sequences * _NEW / (shape.layers * (prefill + (_NEW - 1) * decode))


_FAR = (0.0, 1.0)  # all of it on the CPU
FLOAT16 = {
    "OPT-30B": {
        256: (Policy(160, 2, (0.1, 0.9), _FAR, _FAR), 16.01),
        512: (Policy(48, 3, (0.2, 0.8), _FAR, _FAR), 7.32),
        1024: (Policy(20, 4, (0.04, 0.96), _FAR, _FAR), 3.50),
    },
    "OPT-175B": {
        256: (Policy(64, 8, (0, 0.5), (0, 0), (0, 1)), 1.36),
        512: (Policy(32, 8, (0, 0.5), (0, 0), (0, 1)), 0.69),
        1024: (Policy(12, 12, (0, 0.5), (0, 0), (0, 1)), 0.35),
    },
}  # plans of its bench_suite.py; new tokens/s of its README, suite and paper (table 2)
_PACKED = 9 / 32  # 4 bits, with scale and minimum of groups of 64 in float16, by 16 bits
PACKED = {
    "OPT-30B": {
        256: (Policy(128, 8, (0, 1), _FAR, _FAR, packed=(1, _PACKED), on_cpu=False), 16.86),
        512: (Policy(64, 8, (0, 1), _FAR, _FAR, packed=(1, _PACKED), on_cpu=False), 8.38),
        1024: (Policy(20, 12, (0, 1), _FAR, _FAR, packed=(1, _PACKED), on_cpu=False), 3.98),
    },
    "OPT-175B": {
        256: (Policy(96, 3, (0, 1), _FAR, _FAR, packed=(_PACKED, _PACKED), on_cpu=False), 2.26),
        512: (Policy(48, 3, (0, 1), _FAR, _FAR, packed=(_PACKED, _PACKED), on_cpu=False), 1.12),
        1024: (Policy(12, 4, (0, 1), _FAR, _FAR, packed=(_PACKED, _PACKED), on_cpu=False), 0.42),
    },
}
SHAPES = {"OPT-30B": OPT_30B, "OPT-175B": OPT_175B}


def disk_fitted(shape: Shape, policy: Policy, prompt: int, wanted: float) -> Constants:
    """The constants with the disk so many times as fast that a run takes what it took."""
    by = Constants()

    def scaled(times: float) -> Constants:
        return replace(
            by,
            disk_read=by.disk_read * times,
            prompt_cache_to_disk=by.prompt_cache_to_disk * times,
            to_disk=by.to_disk * times,
        )

    def off(times: float) -> float:
        return tokens_per_s(shape, policy, scaled(times), prompt) - wanted

    return scaled(brentq(off, 0.05, 50.0))


def unpack_fitted(shape: Shape, policy: Policy, prompt: int, wanted: float) -> Constants:
    """The constants with such a rate of decompression that a run takes what it took.

    Without any seconds for it where the others already take longer.
    """

    def off(log_rate: float) -> float:
        by = Constants(unpack=10**log_rate)
        return tokens_per_s(shape, policy, by, prompt) - wanted

    return Constants() if off(15) < 0 else Constants(unpack=10 ** brentq(off, 7, 15))


def measure(quick: bool) -> Report:
    """All rows; quick: qoff's of OPT-30B only."""
    result = Report(
        "planner-flexgen",
        {"quick": quick},
        "FlexGen on a T4 with 208 GB, 32 new tokens: new tokens/s",
        ("run", "published", "predicted", "error", "what it is"),
    )
    for name, rows in FLOAT16.items():
        shape, by = SHAPES[name], Constants()
        policy, wanted = rows[512]
        fitted = name == "OPT-175B"
        if fitted:
            by = disk_fitted(shape, policy, 512, wanted)
            rate = by.disk_read / Constants().disk_read
            result.notes.append(f"{name}: the disk is fitted at 512: {rate:.2f} times as shipped")
        for prompt, (one, published) in rows.items():
            kind = "prediction" if fitted and prompt != 512 else "disk fitted to this row"
            error = _row(result, name, prompt, one, published, by, kind if fitted else "shipped")
            if (prompt == 512) != fitted and (prompt == 512 or prompt == 1024):
                what = f"{name}, prompt {prompt}: 1 - error"
                result.bars.append(Bar(what, 1 - _WITHIN, 1 - abs(error)))
    for name, rows in PACKED.items():
        by = unpack_fitted(SHAPES[name], rows[512][0], 512, rows[512][1])
        for prompt, (one, published) in rows.items():
            _row(result, f"{name} compressed", prompt, one, published, by, "fit to 512")
    for name in ("OPT-30B",) if quick else SHAPES:
        _ours(result, name, 512)
    return result


def _row(
    result: Report,
    name: str,
    prompt: int,
    policy: Policy,
    published: float,
    by: Constants,
    kind: str,
) -> float:
    found = tokens_per_s(SHAPES[name.removesuffix(" compressed")], policy, by, prompt)
    error = found / published - 1
    label = f"{name}, prompt {prompt}"
    result.rows.append((label, f"{published:.2f}", f"{found:.2f}", f"{error:+.1%}", kind))
    result.measured[label] = {"published": published, "predicted": found, "kind": kind}
    return error


def _ours(result: Report, name: str, prompt: int) -> None:
    """What qoff's plan reaches in virtual time, with 4-bit weights and KV cache."""
    shape, requests = SHAPES[name], 512
    sizes = NativeSizes.of(shape.config, QuantConfig(packing="split32"))
    work = Workload(Lengths.of(prompt), Lengths.of(_NEW), requests)
    policy, wanted = FLOAT16["OPT-175B"][512]
    machine = t4(disk_fitted(OPT_175B, policy, 512, wanted))
    found = find_plan(sizes, machine, work)
    run = simulated(found, sizes, machine, work)
    rate = requests * _NEW / run.seconds
    label = f"{name}, qoff, prompt {prompt}"
    result.rows.append((label, "", f"{rate:.2f}", "", "simulated; 4-bit weights and KV cache"))
    plan = found.plan
    result.measured[label] = {
        "simulated": rate,
        "cost_model": requests * _NEW / found.seconds,
        "plan": f"{plan.batches} x {plan.batch_size}, {plan.schedule}",
        "limit": found.decode.limit,
    }


def t4(by: Constants) -> MachineProfile:
    """The machine that the constants are of, as qoff's planner takes one."""
    gpu = Processor.of(bytes_per_s=300e9, flops_per_s=by.prompt_matmul)
    host = Processor.of(bytes_per_s=40e9, flops_per_s=0.5e12)
    return MachineProfile(
        "T4, 208 GB",
        True,
        16,
        gpu,
        host,
        Link(by.disk_read, 1e-4, 1e-10),
        Link(by.to_disk, 1e-4, 1e-10),
        Link(by.to_gpu, 1e-5),
        Link(by.hidden_from_gpu, 1e-5),
        {"device": 15 * _GB, "host": 200 * _GB, "disk": 1400 * _GB},
    )

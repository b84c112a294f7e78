"""What peers plan for the same budgets of main memory, run: who keeps them, and who is how fast.

accelerate: `infer_auto_device_map` for the float demo model in bfloat16, the rest on disk.
llama.cpp: `--fit` for 4-bit weights, with the margin that leaves the budget; it changes the context
alone here. qoff: its planner's plan. All answer the same requests as one batch, each in a process
of its own. What counts is memory that no file backs: without what the process had before, but for
llama.cpp's, whose libraries and vocabulary are in it. Each may take its budget, 1 %, and the bytes
of qoff's tokenizer, which are measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import torch

from bench.control_group import status_bytes
from bench.demo import fetch_checkpoint, fetch_float
from bench.harness import Bar, Report
from bench.peers.native import PeerNotBuiltError
from bench.peers.servers import completed, llama_server
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.errors import BudgetError, QoffError
from qoff.plan.machine import assumed_profile
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload

from .budgets import tokenizer_bytes

_MIB = 1 << 20
_COUNT, _PROMPT = 4, 256  # requests, and tokens of their prompts
_SAMPLE_S = 0.005


class Ran(NamedTuple):
    """Bytes planned and at the peak, seconds, the tokenizer's bytes, what else is to be said."""

    planned: int
    peak: int
    seconds: float
    tokenizer: int = 0
    said: str = ""


def measure(quick: bool) -> Report:
    """All peers that are there, on each budget."""
    new = 4 if quick else 16
    result = Report(
        "planner-peers",
        {"quick": quick, "requests": _COUNT, "prompt": _PROMPT, "new": new},
        "main memory that plans of peers take of a budget, and seconds for the same requests",
        (
            "budget",
            "planner",
            "planned MiB",
            "at the peak MiB",
            "of the budget",
            "seconds",
            "by qoff's",
        ),
    )
    kept, fastest = True, float("inf")
    for budget in (160,) if quick else (96, 160, 320):
        ran = dict(_ran(result, budget * _MIB, new))
        ours = ran.get("qoff")
        allowed = budget * _MIB * 1.01 + (0 if ours is None else ours.tokenizer)
        for name, one in ran.items():
            over = one.peak > allowed
            share = f"{one.peak / budget / _MIB:.0%}{' over' if over else ''}"
            by = "" if ours is None else f"{one.seconds / ours.seconds:.2f}"
            mib = f"{one.planned / _MIB:.0f}", f"{one.peak / _MIB:.0f}"
            result.rows.append((f"{budget} MiB", name, *mib, share, f"{one.seconds:.2f}", by))
            result.measured[f"{budget} MiB, {name}"] = one._asdict()
            if one.said:
                result.notes.append(f"{budget} MiB, {name}: {one.said}")
            if name == "qoff":
                kept = kept and not over
            elif not over and ours is not None:
                fastest = min(fastest, one.seconds / ours.seconds)
    result.bars.append(Bar("qoff keeps all budgets", 1, float(kept)))
    if fastest < float("inf"):
        result.bars.append(Bar("seconds of a peer that keeps its budget, by qoff's", 1, fastest))
    return result


def _ran(result: Report, budget: int, new: int) -> Iterator[tuple[str, Ran]]:
    for name, kind in (("qoff", "qoff"), ("accelerate, bfloat16", "accelerate")):
        try:
            yield name, _in_process(kind, budget, new)
        except QoffError as error:
            result.notes.append(f"{budget // _MIB} MiB, {name}: {error}")
    try:
        yield "llama.cpp --fit, Q4_0", _llama_cpp(budget, new)
    except PeerNotBuiltError as error:
        result.notes.append(f"llama.cpp: {error}")


def _in_process(kind: str, budget: int, new: int) -> Ran:
    """Raises QoffError for a budget that is refused, and a process that fails."""
    command = [sys.executable, "-m", __name__, kind, str(budget), str(new)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise QoffError(done.stderr.strip().rpartition("\n")[2])
    return Ran(*json.loads(done.stdout.splitlines()[-1]))


def _llama_cpp(budget: int, new: int) -> Ran:
    """Raises PeerNotBuiltError."""
    ids = [prompt.tolist() for prompt in _prompts()]
    with llama_server(_COUNT, fit=budget) as address:
        base = address.url.removesuffix("/v1")
        ask = partial(completed, base, tokens=new)
        with urlopen(f"{base}/props") as answer:
            context = json.loads(answer.read())["default_generation_settings"]["n_ctx"]
        with watched(address.pid) as most, ThreadPoolExecutor(_COUNT) as pool:
            list(pool.map(ask, ids))
            start = time.perf_counter()
            list(pool.map(ask, ids))
            seconds = time.perf_counter() - start
    said = f"fits {context} tokens of context for each of {_COUNT} sequences"
    return Ran(budget, most(), seconds, said=said)


@contextmanager
def watched(pid: int | str = "self") -> Iterator[Callable[[], int]]:
    """Yield what says the most bytes that a process has had that no file backs, from now on."""
    most, stop = [_anonymous(pid)], threading.Event()

    def look() -> None:
        while not stop.wait(_SAMPLE_S):
            most[0] = max(most[0], _anonymous(pid))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        stop.set()
        thread.join()


def _anonymous(pid: int | str = "self") -> int:
    return status_bytes("RssAnon", pid)


def _prompts() -> torch.Tensor:
    return torch.randint(1000, (_COUNT, _PROMPT), generator=torch.Generator().manual_seed(1))


def _qoff(budget: int, new: int) -> tuple[int, float]:
    """Bytes planned, and seconds of the batch."""
    path = fetch_checkpoint()
    sizes = NativeSizes.of_checkpoint(Checkpoint.open(path))
    machine = assumed_profile(torch.device("cpu"), Path(tempfile.gettempdir()))
    work = Workload(Lengths.of(_PROMPT), Lengths.of(new), _COUNT)
    plan = find_plan(sizes, machine.with_memory(device=budget, host=0), work).plan
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    with LLM(path, replace(plan, adapt=False), device="cpu") as llm:
        start = time.perf_counter()
        llm.generate(_prompts().tolist(), params)
        tiers = llm.memory_by_tier()
        used = sum(sum(tiers[tier].values()) for tier in ("device", "host"))
        return used, time.perf_counter() - start


def _accelerate(budget: int, new: int) -> tuple[int, float]:
    """The same of a model whose modules accelerate has placed."""
    from accelerate import infer_auto_device_map, init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    path, dtype = fetch_float(), torch.bfloat16
    with init_empty_weights():
        empty: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    empty.tie_weights()
    places = infer_auto_device_map(
        empty, {"cpu": budget}, no_split_module_classes=empty._no_split_modules, dtype=dtype
    )
    planned = 0
    for name, p in empty.named_parameters():
        inside = [module for module in places if not module or f"{name}.".startswith(f"{module}.")]
        planned += p.nbytes * (str(places[max(inside, key=len)]) == "cpu")
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, device_map=places, offload_folder=folder
        )
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                _prompts(), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return planned, time.perf_counter() - start


def _child(argv: Sequence[str] | None = None) -> None:
    """Answer twice; prints bytes planned and at the peak of the second time, and its seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("qoff", "accelerate"))
    parser.add_argument("budget", type=int)
    parser.add_argument("new", type=int)
    args = parser.parse_args(argv)
    answer = {"qoff": _qoff, "accelerate": _accelerate}[args.kind]
    answer(args.budget, args.new)  # compiles, and allocates what a process keeps
    own = tokenizer_bytes(fetch_checkpoint())
    before = _anonymous()
    with watched() as most:
        planned, seconds = answer(args.budget, args.new)
    print(json.dumps([planned, most() - before, seconds, own]))


if __name__ == "__main__":
    try:
        _child()
    except BudgetError as error:
        sys.exit(str(error))

"""Servers of OpenAI's API, each in processes of its own, for `bench.serve` to ask."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from bench.demo import fetch_float, fetch_gguf
from bench.peers import llama_cpp, native
from bench.peers.native import PeerNotBuiltError
from bench.peers.qoff_server import CONTEXT, Address, serving

_START_S = 600  # vLLM compiles the model, and others read it from a slow disk
_ANSWER_S = 3600
_ANY_SLOTS = 64


Start = Callable[[int], AbstractContextManager[Address]]  # with so many clients


@contextmanager
def qoff(clients: int, model: str = "", options: Sequence[str] = ()) -> Iterator[Address]:
    """`qoff serve`, by default the demo model with a place for each client."""
    with serving(clients, model, options) as served:
        yield served.address


@contextmanager
def llama_server(
    clients: int, slots: int | None = None, fit: int | None = None
) -> Iterator[Address]:
    """llama.cpp's, with Q4_0, its fastest 4 bits. slots: None: one for each client.

    fit: bytes of main memory that it fits its context into.
    """
    tool = native.built("llama-server")
    path, port = llama_cpp.quantized(fetch_gguf(), "Q4_0"), free_port()
    count, threads = slots or clients, str(len(os.sched_getaffinity(0)))
    command = [str(tool), "--model", str(path), "--port", str(port), "--parallel", str(count)]
    command += ["--threads", threads, "--log-disable"]
    if fit is None:
        command += ["--ctx-size", str(count * CONTEXT)]
    else:  # it takes all of the machine's memory to be free
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        command += ["--load-mode", "none", "--fit", "on", "--fit-target", str((there - fit) >> 20)]
        command += ["--fit-ctx", str(CONTEXT)]
    with process(command, port) as pid:
        yield Address(f"http://127.0.0.1:{port}/v1", "default", {"cache_prompt": False}, pid)


@contextmanager
def vllm_cpu(clients: int) -> Iterator[Address]:
    """vLLM's for CPUs, in bfloat16."""
    python = native.vllm_python()
    if python is None:
        raise PeerNotBuiltError("vllm-cpu is not installed: run `python -m bench.peers vllm`")
    port, path = free_port(), fetch_float()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--served-model-name", "default", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(CONTEXT), "--gpu-memory-utilization", "0.2"]
    command += ["--max-num-seqs", str(_ANY_SLOTS), "--no-enable-prefix-caching"]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1"}
    with process(command, port, environment | {"HF_HUB_OFFLINE": "1"}):
        yield Address(f"http://127.0.0.1:{port}/v1", "default")


_8_BIT = ("--activation-bits", "8")
_WHOLE = ("--prefill-tokens", "4096", "--least-prefill-tokens", "4096")  # a pass, as vLLM has it
OURS: dict[str, tuple[str, ...]] = {  # with their options
    "qoff": (),
    "qoff, 8-bit": _8_BIT,
    "qoff, 8-bit, whole prompts": _8_BIT + _WHOLE,
}
PEERS: dict[str, Start] = {
    "llama-server": llama_server,
    "llama-server, one slot": partial(llama_server, slots=1),  # as Ollama has it by default
    "vllm-cpu": vllm_cpu,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def process(
    command: Sequence[str],
    port: int,
    environment: dict[str, str] | None = None,
    join: Callable[[], None] | None = None,
) -> Iterator[int]:
    """A server that answers at /health when it is ready, by its number.

    join: called in its process, before the command. Raises PeerNotBuiltError if it ends.
    """
    log = native.folder() / f"{Path(command[0]).name}-{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            preexec_fn=join,
        )
    try:
        until = time.monotonic() + _START_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise PeerNotBuiltError(f"{command[0]} does not start: {log} says why")
            time.sleep(0.2)
        yield process.pid
        log.unlink()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def asked(url: str, body: object) -> Any:
    """What a server answers to JSON, as JSON."""
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(url, data, kind), timeout=_ANSWER_S) as answer:
        return json.load(answer)


def completed(base: str, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """Have a llama-server continue a prompt by so many tokens; its timings."""
    fixed = {"ignore_eos": True, "cache_prompt": False, "temperature": 0}
    found = asked(f"{base}/completion", {"prompt": ids, "n_predict": tokens, **fixed})
    timings: dict[str, Any] = found["timings"]
    return timings


def _healthy(port: int) -> bool:
    with suppress(URLError, OSError), closing(urlopen(f"http://127.0.0.1:{port}/health")) as answer:
        return bool(answer.status == 200)
    return False

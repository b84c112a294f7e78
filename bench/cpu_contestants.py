"""Who takes part in `bench.cpu_decode`, and the samples that each gives of a kind of work."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Literal, Self

import torch
from torch import Tensor

from bench import gemma_shape, greedy
from bench.arithmetic import products_per_s
from bench.bandwidth import ReadBandwidth, read_all
from bench.demo import fetch_checkpoint, fetch_float, fetch_gguf
from bench.greedy import Timing
from bench.peers import llama_cpp, native, transformers_model, vllm_cpu
from bench.random_model import write_random_checkpoint
from bench.sampling import timed, torch_threads
from qoff.checkpoint import Checkpoint
from qoff.eval.perplexity.models import open_float
from qoff.hf.load import load
from qoff.kvcache import KVQuant
from qoff.measure.model_rates import Sequences
from qoff.models.runtime import Runtime
from qoff.plan.native_sizes import NativeSizes

GENERATE, GENERATE_8 = "qoff generate", "generate, 8-bit"
RUNTIME, RUNTIME_8, FLOAT_KV = "qoff runtime", "runtime, 8-bit", "runtime, float32 KV"
TRANSFORMERS, LLAMA, VLLM = "transformers fp32", "llama.cpp", "vllm-cpu bf16"
# No contestants: what processor and memory could do at most.
PRODUCTS, READING = "16-bit products alone", "weights read alone"
_MIB = 1 << 20  # less than this would not be read
Call = Callable[[], float]  # measures once, tokens per second
Generate = Callable[[Tensor, int], tuple[Tensor, Timing]]


@dataclass(frozen=True)
class Work:
    """A prompt of some sequences, the tokens to generate, and the rate that is asked for.

    deep: the prompt is read once, into a cache of 4 bits (one of float32 beside it), and each
    sample decodes after it. gemma: by random weights in the shape of Gemma 3 270M.
    """

    name: str
    batch: int
    prompt: int
    new: int
    rate: Literal["prefill", "decode", "total"]
    deep: bool = False
    gemma: bool = False

    def of(self, timing: Timing) -> float:
        """Tokens per second of one generation."""
        if self.rate == "prefill":
            return self.batch * self.prompt / timing.prefill_s
        return timing.decode_rate if self.rate == "decode" else timing.total_rate

    def products(self, layers: int, head: int) -> int:
        """Multiply-adds with weights for one token that counts. layers, head: weights of these."""
        if self.rate == "decode":
            return layers + head
        all_layers, heads = self.prompt + self.new - 1, self.new  # of a sequence
        counted = self.prompt if self.rate == "prefill" else self.new
        return (all_layers * layers + heads * head) // counted

    def prompts(self, vocab: int) -> Tensor:
        """Ordinary token ids, int64 [batch, prompt]."""
        numbers = 100 + torch.arange(self.batch * self.prompt) * 7919 % 1000
        return (numbers % vocab).view(self.batch, self.prompt)


def sample(generate: Generate, work: Work, vocab: int) -> Call:
    """Return a measurement of a whole generation."""
    ids = work.prompts(vocab)
    return lambda: work.of(generate(ids, work.new)[1])


class Deep:
    """Decoding again and again from the depth of one prompt, in the runtime's own loop."""

    def __init__(self, runtime: Runtime, work: Work) -> None:
        self._sequences = Sequences(runtime, 1, work.prompt + work.new)
        self._first = self._sequences.read(work.prompts(runtime.spec.vocab_size))
        self._new = work.new

    def __call__(self) -> float:
        with torch_threads(1):
            start = perf_counter()
            deque(self._sequences.generate(self._first, self._new), maxlen=0)
            seconds = perf_counter() - start
        self._sequences.forget(self._new)
        return self._new / seconds


def best(calls: Mapping[str, Call]) -> tuple[str, Call]:
    """Measure each once; return the name and the call of the fastest."""
    return max(((call(), name, call) for name, call in calls.items()), key=lambda x: x[0])[1:]


class Contestants:
    """Models and peers, opened when they are first needed; a context manager that closes them.

    quick: no peers but transformers. forms: what llama.cpp ran each work in, its best.
    """

    def __init__(self, quick: bool = False) -> None:
        self._stack = ExitStack()
        self._gemma = gemma_shape.QUICK if quick else gemma_shape.CONFIG
        self.threads = torch.get_num_threads()
        self.llama = llama_cpp.installed() and not quick
        self.vllm = vllm_cpu.installed() and not quick
        self.forms: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def calls(self, work: Work) -> dict[str, Call]:
        """What measures each alternative that does this work; all have run once."""
        if work.gemma:
            loops = {name: partial(own_loop, r) for name, r in self._gemma_runtimes.items()}
            calls = {name: sample(g, work, self._gemma["vocab_size"]) for name, g in loops.items()}
        elif work.deep:
            calls = {name: Deep(runtime, work) for name, runtime in self._deep.items()}
        else:
            calls = {name: sample(g, work, self.vocab) for name, g in self.generators.items()}
            if work.rate == "decode":
                del calls[TRANSFORMERS]  # a tenth as fast
        for call in calls.values():
            call()  # compiles and allocates
        calls |= self._limits(work)
        if self.llama and work.batch == 1:
            self.forms[work.name], calls[LLAMA] = best(self._llama(work))
        if self.vllm and work.rate == "total":
            context = work.prompt + work.new + 1
            peer = vllm_cpu.VllmCpu(fetch_float(), work.batch, context)
            self._stack.enter_context(peer)
            calls[VLLM] = partial(peer.total, work.prompts(self.vocab), work.new)
            calls[VLLM]()
        return calls

    def _limits(self, work: Work) -> dict[str, Call]:
        """What the machine could do of this work at most, where it is one thing that limits it."""
        checkpoint = self._gemma_runtimes[RUNTIME].checkpoint if work.gemma else self._demo
        sizes = NativeSizes.of_checkpoint(checkpoint)
        if work.rate != "decode":
            if work.gemma:
                return {}
            each = 2 * work.products(sizes.layer_columns, sizes.head_columns)
            return {PRODUCTS: lambda: products_per_s() / each}
        if work.deep:
            return {}  # it reads K and V, too
        nbytes = sum(sizes.layer_bytes) + sizes.head_bytes
        copy = ReadBandwidth(nbytes + _MIB).buffer
        read = timed(lambda: read_all(copy))
        return {READING: lambda: copy.nbytes / nbytes / read()}

    @cached_property
    def _demo(self) -> Checkpoint:
        return Checkpoint.open(fetch_checkpoint())

    @cached_property
    def generators(self) -> dict[str, Generate]:
        """Every way to generate from the demo model in this process."""
        (wide, self.tokenizer), (narrow, _) = (
            load(fetch_checkpoint(), activation_bits=bits) for bits in (16, 8)
        )
        for model in (wide, narrow):
            self._stack.callback(model.close)
        self.vocab = int(wide.config.vocab_size)
        return {
            GENERATE: partial(transformers_model.generate, wide),
            RUNTIME: partial(own_loop, wide.runtime),
            GENERATE_8: partial(transformers_model.generate, narrow),
            RUNTIME_8: partial(own_loop, narrow.runtime),
            TRANSFORMERS: partial(transformers_model.generate, open_float(fetch_gguf())),
        }

    @cached_property
    def _deep(self) -> dict[str, Runtime]:
        ways = {RUNTIME: (16, KVQuant()), RUNTIME_8: (8, KVQuant()), FLOAT_KV: (16, None)}
        return {
            name: self._stack.enter_context(Runtime(fetch_checkpoint(), activation_bits=b, kv=kv))
            for name, (b, kv) in ways.items()
        }

    @cached_property
    def _gemma_runtimes(self) -> dict[str, Runtime]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "gemma")
            write_random_checkpoint(path, self._gemma)
            return {
                name: self._stack.enter_context(Runtime(path, activation_bits=bits))
                for name, bits in ((RUNTIME, 16), (RUNTIME_8, 8))
            }

    def _llama(self, work: Work) -> dict[str, Call]:
        """llama.cpp by format; deep down its fastest format by the type of K and V."""
        if work.gemma:
            return {"Q4_K_M": self._llama_call(work, gemma_gguf())}
        files = {form: llama_cpp.quantized(fetch_gguf(), form) for form in llama_cpp.FORMATS}
        found = {form: self._llama_call(work, path) for form, path in files.items()}
        if not work.deep:
            return found
        short = replace(work, prompt=16)
        form, _ = best({form: self._llama_call(short, path) for form, path in files.items()})
        return {
            f"{form}, {kv} KV": self._llama_call(work, files[form], kv) for kv in llama_cpp.KV_TYPES
        }

    def _llama_call(self, work: Work, path: Path, kv: str = llama_cpp.KV_TYPES[0]) -> Call:
        peer = llama_cpp.LlamaCpp(path, self.threads, kv)
        if work.rate == "prefill":
            return partial(peer.prefill, work.prompt)
        return partial(peer.decode, work.new, work.prompt)


def own_loop(runtime: Runtime, ids: Tensor, new: int) -> tuple[Tensor, Timing]:
    """Generate in the runtime's own loop, with one thread of torch, as `generate` of qoff has."""
    with torch_threads(1):
        return greedy.generate(runtime, ids, new)


def gemma_gguf() -> Path:
    """Gemma 3 270M's shape as a GGUF file in Q4_K_M, written once and kept with the peers."""
    source = native.folder() / "models" / "gemma-3-270m-shape.gguf"
    if not llama_cpp.quantized_path(source, "Q4_K_M").exists():
        gemma_shape.write_gguf(source)
    found = llama_cpp.quantized(source, "Q4_K_M")
    source.unlink(missing_ok=True)
    return found

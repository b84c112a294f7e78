"""What a token costs beside the decoder's pass, by the door it is asked for through.

The pass is replaced by one that gives the same logits at once. What is timed is the rest: the
runtime's loop, choosing the token, and what `generate` and `qoff.LLM` do around them.

    python -m bench.overhead CHECKPOINT [--tokens 300] [--batch 1]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

import qoff
from bench import greedy
from qoff.cli.generate import answer
from qoff.engine import LLM, SamplingParams
from qoff.hf.load import Opened
from qoff.hf.model import QoffForCausalLM
from qoff.kernels.torch_threads import one_torch_thread
from qoff.kvcache import KVCache
from qoff.kvcache.slots import SlotSubset
from qoff.memory import HEAD
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from qoff.plan import Plan

_PROMPT = 8  # tokens
_HOT: dict[str, Any] = {"temperature": 0.8}
_NARROW: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}


class StubbedPass:
    """Stands in for a decoder's pass: fixed logits, and the cache as long as if it had run.

    gaps: seconds from the end of one pass to the beginning of the next.
    """

    def __init__(self, runtime: Runtime) -> None:
        vocab = runtime.spec.vocab_size
        self._logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(0))
        self._logits[:, :16] = -50.0  # special tokens: no answer ends
        self.gaps: list[float] = []
        self._ended = 0.0
        vars(runtime.decoder)["steps"] = self.steps

    def steps(self, run: ForwardPass) -> Generator[Any, Any, torch.Tensor]:
        """One pass, as `Decoder.steps`."""
        self.gaps.append(perf_counter() - self._ended)
        yield HEAD
        if isinstance(run.cache, SlotSubset):
            for slot, span in zip(run.cache.slots, run.ragged.spans, strict=True):
                run.cache.cache.lengths[slot] += span.count
        else:
            assert isinstance(run.cache, KVCache)
            run.cache.lengthen(run.ragged)
        found = self._logits[: len(run.ragged.spans if run.logit_rows is None else run.logit_rows)]
        self._ended = perf_counter()
        return found

    def microseconds(self, call: Callable[[], object]) -> float:
        """Median of the time between two passes of a call."""
        self.gaps.clear()
        call()
        return 1e6 * median(self.gaps[1:])


class _Streamer(BaseStreamer):
    """Takes tokens and does nothing."""

    def put(self, value: torch.Tensor) -> None:
        value.tolist()

    def end(self) -> None:
        pass


def _loop(model: QoffForCausalLM, prompts: torch.Tensor, new: int) -> None:
    with one_torch_thread():
        greedy.generate(model.runtime, prompts, new)


def doors_of_model(
    model: QoffForCausalLM, tokenizer: PreTrainedTokenizerBase, batch: int, new: int
) -> dict[str, Callable[[], object]]:
    """The runtime's own loop, `generate`, and the command."""
    prompts = torch.arange(100, 100 + batch * _PROMPT).view(batch, -1)
    mask = torch.ones_like(prompts)

    def generate(**options: Any) -> Callable[[], object]:
        fixed = {"max_new_tokens": new, "do_sample": len(options.keys() & _NARROW.keys()) > 0}
        return lambda: model.generate(prompts, attention_mask=mask, **{**fixed, **options})

    found: dict[str, Callable[[], object]] = {
        "runtime's loop": lambda: _loop(model, prompts, new),
        "generate": generate(),
        "generate, sampling": generate(**_HOT),
        "generate, top-k and top-p": generate(**_NARROW),
    }
    if batch == 1:
        params = SamplingParams(temperature=0, max_tokens=new)
        opened = Opened(model.runtime, model.budget, "")
        found["generate, streamer"] = generate(streamer=_Streamer())
        found["qoff generate"] = lambda: answer(
            opened, tokenizer, prompts[0].tolist(), params, quiet=True
        )
    return found


def doors_of_llm(llm: LLM, batch: int, new: int) -> dict[str, Callable[[], object]]:
    """`qoff.LLM`."""
    prompts = torch.arange(100, 100 + batch * _PROMPT).view(batch, -1).tolist()

    def generate(**options: Any) -> Callable[[], object]:
        params = SamplingParams(max_tokens=new, ignore_eos=True, **options)
        return lambda: llm.generate(prompts, params)

    return {
        "LLM": generate(temperature=0),
        "LLM, sampling": generate(**_HOT),
        "LLM, top-k and top-p": generate(**_NARROW),
        "LLM, stop text": generate(temperature=0, stop="no such text"),
    }


def main() -> None:
    """Print microseconds a pass, by door."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    batch, new = given.batch, given.tokens
    plan = Plan(batch_size=batch, batches=1, context=_PROMPT + new + 8)
    model, tokenizer = qoff.load(given.checkpoint, device="cpu")
    with model, closing(LLM(given.checkpoint, plan, device="cpu")) as llm:
        doors = [
            (StubbedPass(model.runtime), doors_of_model(model, tokenizer, batch, new)),
            (StubbedPass(llm.runtime), doors_of_llm(llm, batch, new)),
        ]
        for stub, calls in doors:
            for name, call in calls.items():
                found = [stub.microseconds(call) for _ in range(given.rounds)]
                print(f"{name:28} {min(found):8.0f} us")


if __name__ == "__main__":
    main()

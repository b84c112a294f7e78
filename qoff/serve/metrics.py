"""What Prometheus reads, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from qoff.engine import LLM
from qoff.engine.round_stats import RoundStats
from qoff.errors import ArgumentError
from qoff.kernels.layout.kv_format import BLOCK_TOKENS

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
            20, 40, 80, 160, 640)  # fmt: skip
_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
                    960, 1920, 7680)  # fmt: skip
_ROUND_TOKENS = (1, *(1 << i for i in range(3, 15)))
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Counts of one server. model: its name, the label of all of them."""

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        label, names = {"model_name": model}, ("model_name",)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm:{name}", what, names, registry=registry).labels(**label)

        def seconds(name: str, what: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            found = Histogram(f"vllm:{name}_seconds", what, names, registry=registry,
                              buckets=buckets)  # fmt: skip
            return found.labels(**label)

        def tokens(name: str, what: str, buckets: Sequence[float] = _TOKENS) -> Histogram:
            found = Histogram(f"vllm:{name}", what, names, registry=registry, buckets=buckets)
            return found.labels(**label)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"vllm:{name}", what, names, registry=registry).labels(**label)

        self._running = gauge("num_requests_running", "Answers in the batches.")
        self._waiting = gauge("num_requests_waiting", "Answers that wait for a place.")
        self._cache = gauge("kv_cache_usage_perc", "Part of the KV blocks that is in use, 0 to 1.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generated = counter("generation_tokens", "Tokens of answers.")
        self.refused = counter("request_refused", "Requests refused with 429.")
        self.first_token = seconds("time_to_first_token", "From the request to the first token.")
        self.between_tokens = seconds("inter_token_latency", "From token to token.")
        self.whole = seconds("e2e_request_latency", "From the request to its last token.")
        self._queued = seconds(
            "request_queue_time", "Of an answer, waiting for a place.", _REQUEST_SECONDS
        )
        self._prefill = seconds(
            "request_prefill_time", "Of an answer, reading its prompt.", _REQUEST_SECONDS
        )
        self._decode = seconds(
            "request_decode_time", "From its first token to its last.", _REQUEST_SECONDS
        )
        self._inference = seconds("request_inference_time", "Both.", _REQUEST_SECONDS)
        self._round = tokens("iteration_tokens_total", "Tokens of a round.", _ROUND_TOKENS)
        self._queried = counter("prefix_cache_queries", "Tokens of prompts looked up.")
        self._shared = counter("prefix_cache_hits", "Tokens of prompts not read again.")
        self._drafts = counter("spec_decode_num_drafts", "Drafts.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens of drafts.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_at = Counter("vllm:spec_decode_num_accepted_tokens_per_pos",
                                    "The same by their place in a draft.",
                                    ("model_name", "position"), registry=registry)  # fmt: skip
        self._rounds_seen = -1
        self.prompt_length = tokens("request_prompt_tokens", "Tokens of a request's prompt.")
        self.answer_length = tokens("request_generation_tokens", "Tokens of an answer.")
        ends, what = ("model_name", "finished_reason"), "Answers by what ended them."
        self._ended = Counter("vllm:request_success", what, ends, registry=registry)
        self._model = model

    def count(self, prompt_tokens: int, generated: int) -> None:
        """Count tokens of batches."""
        self.prompt_tokens.inc(prompt_tokens)
        self.generated.inc(generated)

    def ended(self, reason: str) -> None:
        """Count an answer."""
        self._ended.labels(self._model, reason).inc()

    def phases(self, started: float, placed: float, first: float, last: float) -> None:
        """Count what an answer took, by the times of its request, place, first and last token."""
        self._queued.observe(max(0.0, placed - started))
        self._prefill.observe(first - placed)
        self._decode.observe(last - first)
        self._inference.observe(last - placed)

    def count_rounds(self, rounds: Sequence[RoundStats]) -> None:
        """Count the rounds since the last call."""
        seen = self._rounds_seen
        for one in takewhile(lambda one: one.number > seen, reversed(rounds)):
            self._rounds_seen = max(self._rounds_seen, one.number)
            self._round.observe(one.read + one.generated)
            self._queried.inc(one.queried)
            self._shared.inc(one.shared)
            self._drafts.inc(one.drafts)
            self._drafted.inc(one.drafted)
            self._accepted.inc(one.accepted)
            for place, accepted in enumerate(one.accepted_at):
                self._accepted_at.labels(self._model, str(place)).inc(accepted)

    def tell(self, llm: LLM) -> None:
        """Say what the KV cache of a model is, as labels, whenever the figures are read."""
        self._registry.register(_CacheConfig(llm))

    def follow(
        self, running: Callable[[], int], waiting: Callable[[], int], cache: Callable[[], float]
    ) -> None:
        """Ask these whenever the figures are read."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._cache.set_function(cache)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)


class _CacheConfig(Collector):
    """What the KV cache of a model is at present; nothing while it is reopened."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        with suppress(ArgumentError):
            plan, blocks = self._llm.plan, self._llm.kv_blocks
            told = {
                "block_size": BLOCK_TOKENS,
                "cache_dtype": f"{plan.kv.k_bits} and {plan.kv.v_bits} bits",
                "enable_prefix_caching": plan.share_prefixes,
                "num_gpu_blocks": blocks["device"],
                "num_cpu_blocks": blocks["host"],
            }
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=tuple(told))
            info.add_metric([str(value) for value in told.values()], 1)
            yield info

"""What Prometheus reads, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
            20, 40, 80, 160, 640)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Counts of one server. model: its name, the label of all of them."""

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        label, names = {"model_name": model}, ("model_name",)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm:{name}", what, names, registry=registry).labels(**label)

        def seconds(name: str, what: str) -> Histogram:
            found = Histogram(f"vllm:{name}_seconds", what, names, registry=registry,
                              buckets=_SECONDS)  # fmt: skip
            return found.labels(**label)

        def tokens(name: str, what: str) -> Histogram:
            found = Histogram(f"vllm:{name}", what, names, registry=registry, buckets=_TOKENS)
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

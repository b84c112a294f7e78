"""Figures of rounds in vLLM's names: each round is counted once."""

from __future__ import annotations

from qoff.engine.round_stats import RoundStats
from qoff.serve.metrics import Metrics

_TIMES = (1.0, 2.0, 0, 0, 0, 0, 0, 0)
READ = RoundStats(0, 100, 1, 0, 0, *_TIMES, queried=150, shared=50)
DRAFTED = RoundStats(1, 0, 6, 7, 4, *_TIMES, drafts=2, accepted_at=(2, 1, 1))


def value(metrics: Metrics, name: str, labels: str = 'model_name="m"') -> float:
    start = f"vllm:{name}{{{labels}}} "
    [line] = [x for x in metrics.text().decode().splitlines() if x.startswith(start)]
    return float(line.removeprefix(start))


def test_rounds_are_counted_once() -> None:
    metrics = Metrics("m")
    rounds = [READ]
    metrics.count_rounds(rounds)
    rounds.append(DRAFTED)
    for _ in range(2):
        metrics.count_rounds(rounds)
    del rounds[:1]  # as old ones are forgotten
    metrics.count_rounds(rounds)
    found = {
        "iteration_tokens_total_count": 2,
        "iteration_tokens_total_sum": 107,
        "prefix_cache_queries_total": 150,
        "prefix_cache_hits_total": 50,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 7,
        "spec_decode_num_accepted_tokens_total": 4,
    }
    assert {name: value(metrics, name) for name in found} == found
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    places = [value(metrics, name, f'model_name="m",position="{i}"') for i in range(3)]
    assert places == [2, 1, 1]

"""Resident set size while streaming: within the budget plus a stated slack."""

from __future__ import annotations

from pathlib import Path

from tests.memory.checkpoints import write_checkpoint
from tests.programs import printed

BUDGET = 32 << 20
SLACK = 16 << 20  # thread stacks, bounce buffers, allocator, code loaded on first use

STREAM = """
import sys, torch
from qoff.checkpoint import Checkpoint
from qoff.memory import WeightStore, plan_residency

def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096

torch.set_num_threads(1)
checkpoint = Checkpoint.open(sys.argv[1])
plan = plan_residency(checkpoint, int(sys.argv[2]))
before, most, total = rss(), 0, 0
with WeightStore(checkpoint, plan) as store:
    for unit in (*range(len(checkpoint.layers)), "head") * 2:
        with store.use(unit):
            most = max(most, rss())
    print(most - before, store.stats.bytes_read, store.stats.arena_peak, rss() - before)
print(rss() - before)
"""


def test_streaming_two_hundred_megabytes_stays_within_the_budget(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", layers=16, scale=720, alike=True)
    size = sum(file.nbytes for file in checkpoint.layers)
    assert size > 200e6
    numbers = printed("-c", STREAM, checkpoint.path, BUDGET).split()
    growth, read, peak, after_cycles, after_close = map(int, numbers)
    assert read > size  # it did stream
    assert peak <= BUDGET
    assert growth <= BUDGET + SLACK
    assert after_cycles <= BUDGET + SLACK
    assert after_close <= SLACK  # the arena went back to the system

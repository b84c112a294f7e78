"""A small file of requests goes through the whole job of the bench."""

from pathlib import Path

from bench.batch_lines import measure


def test_all_lines_are_answered_in_two_runs(tmp_path: Path) -> None:
    found = measure(tmp_path, 300)
    assert found["answered"] == 300
    assert found["rss_most_MiB"] >= found["rss_early_MiB"] > 0

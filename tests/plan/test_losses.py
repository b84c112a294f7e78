"""Losses that a sweep has measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from qoff.errors import FormatError
from qoff.plan.losses import measured_forms


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "3",
        '{"kv": 1}',
        "[1]",
        '[{"kv": "4,4, window 64", "mean_kl": 0.1}]',
        '[{"kv": "4,4, window 64", "mean_kl": 0.1, "weights": 4}]',
        '[{"kv": "5,4, window 64", "mean_kl": 0.1, "weights": "as they are"}]',
        '[{"kv": "4,4, window 64", "mean_kl": NaN, "weights": "as they are"}]',
    ],
)
def test_a_file_without_losses_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(FormatError, match=r"results\.json"):
        measured_forms(tmp_path)

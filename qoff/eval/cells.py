"""Results of a sweep's cells, each in a file of its own, so that a sweep can be taken up again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .texts import digest

VERSION = 1


@dataclass(frozen=True)
class CellResult:
    """What one cell gave. Bytes, tokens per second; `layer_errors` relative, of hidden states."""

    weights: str
    kv: str
    bits_per_weight: float
    kv_bytes_per_token: float
    tokens: int
    perplexity: float
    perplexity_error: float
    tokens_per_s: float | None
    perplexity_ratio: float | None = None
    perplexity_ratio_error: float | None = None
    mean_kl: float | None = None
    mean_kl_error: float | None = None
    median_kl: float | None = None
    kl_99: float | None = None
    same_top: float | None = None
    layer_errors: list[float] = field(default_factory=list)
    kl_by_place: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of weights and cache."""
        return f"{self.weights}; KV {self.kv}"


class CellStore:
    """A folder with a file for each cell that is done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, key: str) -> CellResult | None:
        """The result of a cell; None where there is none, or its file is damaged."""
        path = self._path(key)
        try:
            found = json.loads(path.read_text())
            content: dict[str, Any] = found["result"]
            if found["version"] != VERSION or found["digest"] != _digest(content):
                return None
            content["kl_by_place"] = [tuple(pair) for pair in content["kl_by_place"]]
            return CellResult(**content)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def exists(self, key: str) -> bool:
        """Whether there is a file of the cell, damaged or not."""
        return self._path(key).exists()

    def write(self, key: str, result: CellResult) -> None:
        """Keep a result, all or nothing."""
        content = json.loads(json.dumps(asdict(result)))
        text = json.dumps({"version": VERSION, "digest": _digest(content), "result": content})
        partial = self._path(key).with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self._path(key))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _digest(content: dict[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True))

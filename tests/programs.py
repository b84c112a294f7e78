"""Programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def printed(*arguments: object, timeout: float = 100, **options: Any) -> str:
    """What Python prints with these arguments; the errors of one that fails are the test's."""
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout

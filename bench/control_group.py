"""What processes have in memory, and control groups of memory, whose limit bounds it.

Such a group is one of v1, as root; it counts cached pages of files, too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from qoff.errors import ArgumentError

_GROUPS = Path("/sys/fs/cgroup/memory")


class ControlGroup:
    """A group that is there. folder: its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def join(self) -> None:
        """Put the calling process into it: for `preexec_fn`."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def run(
        self, command: Sequence[str], seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a process in it. Raises TimeoutExpired, and ends it, after some seconds."""
        return subprocess.run(
            command,
            check=False,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            preexec_fn=self.join,
            timeout=seconds,
        )

    def output(self, command: Sequence[str]) -> str:
        """What a process in it prints. Raises ArgumentError with its status where that is not 0."""
        done = self.run(command)
        if done.returncode:
            raise ArgumentError(f"{' '.join(command)}: {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    @property
    def peak(self) -> int:
        """Bytes that were in use at once, with cached pages."""
        return int((self.folder / "memory.max_usage_in_bytes").read_text())


@contextmanager
def control_group(limit: int | None) -> Iterator[ControlGroup]:
    """A memory control group, with a limit in bytes or without.

    Raises ArgumentError where there can be none.
    """
    folder = _GROUPS / f"qoff-bench-{os.getpid()}"
    with ExitStack() as undo:
        try:
            folder.mkdir()
            undo.callback(folder.rmdir)
            if limit is not None:
                (folder / "memory.limit_in_bytes").write_text(str(limit))
        except OSError as error:
            raise ArgumentError(
                f"{folder}: {error.strerror}; this needs cgroup v1 and root"
            ) from error
        yield ControlGroup(folder)


def status_bytes(name: str, pid: int | str = "self") -> int:
    """What a process's status says of its memory, such as VmRSS, VmHWM (its peak) or RssAnon."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))


def forget(folder: Path) -> None:
    """Have no page of a folder's files in memory."""
    for path in filter(Path.is_file, folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

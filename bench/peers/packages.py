"""Peers that a bench imports: packages in folders of their own, beside those of this environment.

`python -m bench.peers deepspeed`, `bitsandbytes` and `kt-kernel` install one. torch, transformers
and what else they need are this environment's.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from bench.peers import native

_WANTED = {
    "deepspeed": ("deepspeed==0.19.8", "hjson==3.1.0", "py-cpuinfo==9.0.0", "ninja==1.13.2",
                  "msgpack==1.2.4", "einops==0.8.2"),
    "bitsandbytes": ("bitsandbytes==0.50.2",),
    "kt-kernel": ("kt-kernel==0.7.2",),
}  # fmt: skip
NAMES = tuple(_WANTED)


def folder(name: str) -> Path | None:
    """Return the folder with a peer's packages; None if it is not installed."""
    path = native.folder() / name
    return path if path.exists() else None


def install(name: str) -> Path:
    """Install a peer and the little of its own that it imports, if it is not there; its folder.

    DeepSpeed's kernels are compiled by the first run, which takes minutes.
    """
    target = native.folder() / name
    if folder(name) is None:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
        options = ("--no-deps", "--no-build-isolation", "--target", partial)
        native.run(*pip, *options, *_WANTED[name])
        partial.rename(target)
    return target


def use(name: str) -> bool:
    """Make a peer importable; False where it is not installed."""
    found = folder(name)
    if found is None:
        return False
    if str(found) not in sys.path:
        sys.path.append(str(found))
    return True


def use_deepspeed() -> bool:
    """Make DeepSpeed importable, on CPUs; False where it is not installed.

    It compiles its kernels into the folder of all peers, when they are first used.
    """
    found = folder("deepspeed")
    if found is None:
        return False
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(native.folder() / "deepspeed-kernels")
    os.environ["PATH"] += f"{os.pathsep}{found / 'bin'}"  # ninja
    return use("deepspeed")

"""`python -m bench.peers [NAME...]`: build or install peers, or all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.peers import native, packages
from qoff.errors import QoffError

_PEERS: dict[str, Callable[[], Path]] = {
    "llama.cpp": native.build_llama_cpp,
    "vllm": native.install_vllm,
    "quantizers": native.install_quantizers,
    **{name: partial(packages.install, name) for name in packages.NAMES},
}


def main() -> None:
    """Build the peers named."""
    parser = argparse.ArgumentParser(description=native.__doc__)
    parser.add_argument("peers", nargs="*", choices=[[], *_PEERS], help="all by default")
    for name in parser.parse_args().peers or _PEERS:
        print(f"{name}: {_PEERS[name]()}")


if __name__ == "__main__":
    try:
        main()
    except (QoffError, OSError) as error:
        sys.exit(f"peers: {error}")

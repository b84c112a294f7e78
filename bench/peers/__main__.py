"""`python -m bench.peers [NAME...]`: build or install peers, or all."""

from __future__ import annotations

import argparse
import sys

from bench.peers import native
from qoff.errors import QoffError

_PEERS = {
    "llama.cpp": native.build_llama_cpp,
    "vllm": native.install_vllm,
    "quantizers": native.install_quantizers,
    "deepspeed": native.install_deepspeed,
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

"""Whether the planner is right: each measure alone with `--only`, or all of them.

links: rounds that a simulated disk bounds. rounds: real plans on two models, each predicted with
constants fitted on the other. regret: the chosen plan beside random ones that were run. grid:
beside all of a grid, in virtual time. budgets: bytes at the peak, and a cgroup that kills what
takes more. tokenizers: what made-up ones keep. flexgen: its published figures by its own model, and
qoff on its machine. peers: what accelerate and llama.cpp plan for the same budgets. training: `qoff
plan --train` of large models. running: a job whose disk slows down in the middle, with and without
a change of the plan. modules: forecasts for transformers' modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature

from bench.harness import Report, out_folder

_OWN = {"turns", "rivals", "plans"}
MEASURES = (
    *("links", "rounds", "regret", "grid", "budgets", "flexgen", "peers", "training"),
    *("tokenizers", "running", "modules"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measures that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    parser.add_argument("--turns", type=int, help="of rounds and regret, in each of which all run")
    parser.add_argument("--rivals", type=int, help="of regret: plans drawn at random")
    parser.add_argument("--plans", nargs="+", help="of budgets: words in the names of those to run")
    parser.add_argument("--out", type=out_folder, help="folder of the JSON; default bench/results")
    args = parser.parse_args(argv)
    for name in args.only:
        measure: Callable[..., Report] = import_module(f"bench.planner.{name}").measure
        given = {key: getattr(args, key) for key in signature(measure).parameters.keys() & _OWN}
        own = {key: value for key, value in given.items() if value is not None}
        report = measure(args.quick, **own)
        report.publish(args.out and args.out / f"{report.name}.json")


if __name__ == "__main__":
    main()

"""The bench of the demo model: its works, its peers without them being there, its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import cpu_contestants, cpu_decode
from bench.cpu_contestants import GENERATE, LLAMA, RUNTIME, Contestants, Deep, Work, best
from bench.greedy import Timing
from bench.greedy import generate as native_generate
from bench.peers import llama_cpp, native, transformers_model
from bench.peers.native import PeerNotBuiltError
from qoff.errors import ArgumentError, FormatError
from qoff.hf.load import load
from qoff.kvcache import KVQuant
from qoff.measure.samples import Samples
from qoff.models.runtime import Runtime
from tests.tiny_families import VOCAB
from tests.tiny_models import reference_model


def test_rates_of_a_generation() -> None:
    timing = Timing(start=10.0, stamps=(12.0, 13.0, 14.0), batch=4)
    rates = [Work("", 4, 6, 3, rate).of(timing) for rate in ("prefill", "decode", "total")]
    assert rates == [12.0, 4.0, 3.0]


def test_both_loops_generate_what_transformers_does(checkpoint: Path) -> None:
    theirs = reference_model(checkpoint)
    model, _ = load(checkpoint, kv=None)
    ids = torch.randint(3, VOCAB, (2, 9))
    wanted, clock = transformers_model.generate(theirs, ids, 5)
    assert wanted.shape == (2, 5)
    assert len(clock.stamps) == 5
    assert sorted(clock.stamps) == list(clock.stamps)
    assert torch.equal(transformers_model.generate(model, ids, 5)[0], wanted)
    assert torch.equal(native_generate(model.runtime, ids, 5)[0], wanted)
    model.close()


@torch.inference_mode()
def test_deep_decoding_starts_at_the_same_depth_each_time(checkpoint: Path) -> None:
    work = Work("", 1, 70, 5, "decode", deep=True)
    with Runtime(checkpoint, kv=KVQuant()) as runtime:
        deep = Deep(runtime, work)
        assert deep() > 0
        assert deep._sequences.length == 70


def test_the_fastest_is_chosen() -> None:
    rates = {"slow": 1.0, "fast": 3.0, "middle": 2.0}
    name, call = best({name: lambda rate=rate: rate for name, rate in rates.items()})
    assert (name, call()) == ("fast", 3.0)


def test_the_bench_runs(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_contestants, "fetch_checkpoint", lambda: checkpoint)
    monkeypatch.setattr(cpu_contestants, "fetch_gguf", lambda: checkpoint)
    monkeypatch.setattr(cpu_contestants, "open_float", reference_model)
    cpu_decode.main(["--quick", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    agreed = written["measured"]["greedy_agreement_with_transformers"]
    assert [found["equal"] for found in agreed.values()] == [4] * 2
    assert written["ratios"].keys() == {work.name for work in cpu_decode.QUICK_WORK.values()}
    assert [bar["what"] for bar in written["bars"]] == [
        f"{GENERATE} / {RUNTIME}, decode, short context"
    ]


def test_the_report_names_the_format_that_was_compared_with() -> None:
    work = cpu_decode.WORK["4096"]
    found = {"4096": {RUNTIME: Samples((90.0,)), LLAMA: Samples((50.0,))}}
    result = cpu_decode.report(found, cpu_decode.WORK, {work.name: "Q4_0, f16 KV"}, {"threads": 2})
    assert "50.0 (0%) Q4_0, f16 KV" in result.rows[0]
    assert result.ratios[work.name] == {f"{RUNTIME} / {LLAMA}": 1.8}
    assert [bar.met for bar in result.bars] == [False]


def test_an_unknown_work_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no work is called 'deep'"):
        cpu_decode.chosen("short,deep", cpu_decode.WORK)


_QUANTIZE = '#!/bin/sh\ncp "$2" "$3"\n'
_BENCH = """#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in
  *Q4_0*-ctk\\ q8_0*) echo '[{"avg_ts": 9.0}]' ;;
  *Q4_0*) echo '[{"avg_ts": 8.0}]' ;;
  *) echo '[{"avg_ts": 7.0}]' ;;
esac
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs that stand for llama.cpp's: Q4_0 is fastest, with K and V in q8_0."""
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path))
    folder = native.folder() / f"llama.cpp-{native.LLAMA_CPP}"
    folder.mkdir(parents=True)
    for name, text in (("llama-quantize", _QUANTIZE), ("llama-bench", _BENCH)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    source = tmp_path / "model.Q4_1.gguf"
    source.touch()
    monkeypatch.setattr(cpu_contestants, "fetch_gguf", lambda: source)
    return folder


def test_llama_cpp_is_compared_with_at_its_best(tools: Path) -> None:
    with Contestants() as contestants:
        assert contestants.llama
        short, deep, prefill = (
            best(contestants._llama(cpu_decode.WORK[key])) for key in ("short", "4096", "prefill")
        )
    assert (short[0], deep[0], prefill[0]) == ("Q4_0", "Q4_0, q8_0 KV", "Q4_0")
    deep[1]()
    *_, asked = (tools / "llama-bench.log").read_text().splitlines()
    assert asked.endswith("-r 1 -o json -fa 1 -ctk q8_0 -ctv q8_0 -p 0 -n 64 -d 4096")


def test_what_llama_cpp_says_when_it_fails_is_in_the_error(tools: Path) -> None:
    (tools / "llama-bench").write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(FormatError, match="exit status 3: no such model"):
        llama_cpp.LlamaCpp(tools, 2).prefill(16)


def test_a_peer_that_is_not_built_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path))
    assert not llama_cpp.installed()
    assert native.vllm_python() is None
    with pytest.raises(PeerNotBuiltError, match=r"python -m bench\.peers llama\.cpp"):
        llama_cpp.LlamaCpp(tmp_path / "model.gguf", 2).prefill(16)

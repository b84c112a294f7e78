"""New tokens and prompts as one pass, whose layers follow from the first: bits as they were."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.engine import LLM, SamplingParams
from qoff.engine.request import Completion
from qoff.kernels.cpu.jit.alike import AlikeLayers, KnownJobs
from qoff.kernels.cpu.jit.pool import Told
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import KVQuant, PackedCache
from qoff.kvcache.host.mixed import MixedCache
from qoff.kvcache.states import StateCache
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from qoff.plan import Plan
from tests.adapters import save_adapter
from tests.tiny_models import QUANT, save_model

LETTERS = random.Random(7)
# Pieces end within prompts, so rounds have both; answers complete blocks.
PROMPTS = [[LETTERS.randrange(4, 128) for _ in range(n)] for n in (150, 20, 333, 97, 64, 210, 40)]
PLAN = Plan(batch_size=3, context=500, prefill_tokens=70, kv=KVQuant(window=16))
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
HEAD64 = {"head_dim": 64, "max_position_embeddings": 1024}
DEEP = {**HEAD64, "num_hidden_layers": 8}
WIDE = {"hidden_size": 256, "max_position_embeddings": 1024, "num_hidden_layers": 8}
TURNS = ["sliding_attention", "full_attention"] * 4
CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention"] * 6,  # the first two may find working space to grow
    "num_hidden_layers": 12,
    "max_position_embeddings": 1024,
}
# Their changes, and whether layers follow from others: experts are told each time, and so is latent
# attention.
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "llama-biased": (DEEP, True),
    "apertus": (DEEP, True),  # each layer's activation has numbers of its own
    "gemma3": (DEEP | {"sliding_window": 100, "layer_types": TURNS}, True),
    "laguna": (
        DEEP
        | {
            "sliding_window": 100,
            "layer_types": TURNS,
            "num_attention_heads_per_layer": [4, 2] * 4,
            "mlp_layer_types": ["dense"] * 8,
        },
        True,
    ),
    "step-3.5": (
        DEEP
        | {
            "sliding_window": 100,
            "num_hidden_layers": 12,
            "layer_types": TURNS[:2] * 6,
            "mlp_layer_types": ["dense"] * 12,
            "swiglu_limits": None,
            "swiglu_limits_shared": [0.05, 0.05, 0.02, 0.02] * 3,
        },
        True,
    ),
    "mimo-v2": (
        DEEP
        | {
            "sliding_window": 100,
            "head_dim": 192,
            "v_head_dim": 128,
            "layer_types": TURNS,
            "mlp_layer_types": ["dense"] * 8,
        },
        True,
    ),
    "gpt-neox": (WIDE, True),  # attention and MLP side by side
    "opt": (WIDE, True),  # learned positions
    "qwen3-moe": (DEEP, False),
    "phimoe": (DEEP | {"rope_scaling": None, "sliding_window": 100}, False),  # a bias of the head
    "qwen3-next-head64": (
        CONVOLUTIONS
        | {
            "layer_types": ["linear_attention", "full_attention"] * 6,
            "mlp_only_layers": list(range(12)),
        },
        True,
    ),
    "kimi-linear": (
        {
            "max_position_embeddings": 1024,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense"] * 3,
        },
        False,
    ),
    "ling3": (
        {
            "max_position_embeddings": 1024,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense"] * 3,
        },
        False,
    ),
    "olmo-hybrid": (
        CONVOLUTIONS | {"layer_types": ["linear_attention", "full_attention"] * 6},
        True,
    ),
    "nemotron-h": (
        {
            "max_position_embeddings": 1024,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 3,
        },
        True,
    ),
    "lfm2": (CONVOLUTIONS, True),
    "falcon-h1": ({"num_hidden_layers": 8, "max_position_embeddings": 1024}, True),
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many passes of so many parts were computed as one."""
    found, join = Counter[int](), Decoder.join

    def noted(self: Decoder, runs: Sequence[Any]) -> Any:
        one = join(self, runs)
        found[len(runs) if one is not None else 0] += 1
        return one

    monkeypatch.setattr(Decoder, "join", noted)
    return found


@contextmanager
def told_apart() -> Iterator[None]:
    """Each pass by itself, with all of its layers told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "join", lambda self, runs: None)
        patch.setattr(KnownJobs, "of", staticmethod(lambda layers: None))
        yield


def followed(runtime: Runtime) -> int:
    """Layers that were not told."""
    decoder = runtime.decoder
    assert isinstance(decoder, Decoder)
    assert decoder._whole is not None
    layers: AlikeLayers | None = decoder._whole._alike
    return 0 if layers is None else layers.followed


def values(answers: Sequence[Completion]) -> list[object]:
    return [(one.token_ids, one.logprobs, one.error) for one in answers]


def converted(folder: Path, family: str) -> Path:
    save_model(folder / "model", family, **FAMILIES[family][0])
    return convert(folder / "model", folder / "checkpoint", quant=QUANT)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_passes_apart(
    family: str, joined: Counter[int], tmp_path: Path
) -> None:
    path = converted(tmp_path, family)
    with LLM(path, PLAN, device="cpu") as llm:
        found = values(llm.generate(PROMPTS, PARAMS))
        assert joined[2] > 10
        assert (followed(llm.runtime) > 0) == FAMILIES[family][1]
    with told_apart(), LLM(path, PLAN, device="cpu") as llm:
        assert values(llm.generate(PROMPTS, PARAMS)) == found
        assert not followed(llm.runtime)


def test_adapters_of_new_tokens_and_of_prompts(checkpoint: Path, tmp_path: Path) -> None:
    save_adapter(checkpoint, tmp_path / "one")

    which: list[Any] = ["one", None, "inner", None, "one", "inner", None]
    modules = {"target_modules": ["o_proj", "up_proj"], "layers_to_transform": [3]}
    save_adapter(checkpoint, tmp_path / "inner", seed=1, **modules)

    def answers() -> list[object]:
        folders = {name: tmp_path / name for name in ("one", "inner")}
        with LLM(checkpoint, PLAN, adapters=folders, device="cpu") as llm:
            calls = [llm.generate(PROMPTS, PARAMS, adapter=of) for of in (None, "inner", which)]
            return [value for call in calls for value in values(call)]

    found = answers()
    with told_apart():
        assert answers() == found


@pytest.mark.parametrize("family", ["llama-biased", "lfm2"])
def test_layers_follow_in_caches_that_grow_and_take_turns(family: str, tmp_path: Path) -> None:
    """What a layer has of its own lies elsewhere then, and is told again."""
    checkpoint = converted(tmp_path, family)
    counts = [70, 70, 130, 40, 70, 300, 70, 70]

    def logits() -> Iterator[Tensor]:
        with Runtime(checkpoint, kv=KVQuant(window=16)) as runtime:
            caches = [runtime.new_cache(size) for size in (1, 3)]
            for turn, count in enumerate(counts):
                cache = caches[turn % 2]
                ragged = Ragged.of([count] * cache.sequences, cache.lengths)
                tokens = torch.arange(ragged.tokens) % 120 + turn
                last = torch.tensor([span.start + span.count - 1 for span in ragged.spans])
                yield runtime.forward(ForwardPass(tokens, ragged, cache, last))
            followed_layers.append(followed(runtime))

    followed_layers = list[int]()
    found = list(logits())
    with told_apart():
        expected = list(logits())
    assert followed_layers[0] > 0 == followed_layers[1]
    for mine, known in zip(found, expected, strict=True):
        assert torch.equal(mine, known)


def test_layers_of_a_cache_whose_memory_changes_are_told_again(checkpoint: Path) -> None:
    """Memory of the first layer may be where it was once, and that of others elsewhere."""
    with Runtime(checkpoint, kv=KVQuant(window=16)) as runtime:
        cache, seen = runtime.new_cache(2), set[object]()
        assert isinstance(cache, PackedCache)
        for turn in range(3):
            ragged = Ragged.of([3, 3], cache.lengths)
            run = ForwardPass(torch.arange(6), ragged, cache, torch.tensor([5]))
            runtime.forward(run)
            assert run.cached is not None
            key = run.cached.layers_key()
            assert isinstance(key, tuple)
            assert (key in seen) == (turn == 1)
            seen.add(key)
            if turn == 1:
                before = cache.recent.values[-1]
                cache.recent.values[-1] = before.clone()  # as `select` does with all of them


def test_layers_whose_states_lie_elsewhere_are_told_again(tmp_path: Path) -> None:
    with Runtime(converted(tmp_path, "lfm2"), kv=KVQuant(window=16)) as runtime:
        cache = runtime.new_cache(2)
        assert isinstance(cache, MixedCache)
        states = next(part for part in cache._parts if isinstance(part, StateCache))
        for turn in range(4):
            ragged = Ragged.of([3, 3], cache.lengths)
            found = runtime.forward(ForwardPass(torch.arange(6), ragged, cache, torch.tensor([5])))
            assert found.isfinite().all()
            assert (followed(runtime) > 0) == (turn > 0)
            if turn > 0:
                before = states.conv[-1]
                states.conv[-1] = before.clone()
                before.fill_(torch.nan)


class Arguments(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_int64), ("tokens", ctypes.c_int64), ("x", ctypes.c_int64))
    OF_LAYER = ("weight",)


class Undeclared(ctypes.Structure):
    _fields_ = Arguments._fields_


def jobs(weight: int, tokens: int, x: int, kind: type = Arguments) -> list[Told]:
    """A layer of two jobs, of which the second has no weight of its own."""
    return [Told(1, kind(weight, tokens, x), None), Told(2, kind(7, tokens, x), None)]


def memory(known: KnownJobs) -> list[tuple[int, int, int, int]]:
    """What threads would find: function, weight, tokens and x of each job."""
    steps = (ctypes.c_int64 * (2 * known.count)).from_address(known.address)
    found = []
    for function, at in zip(steps[::2], steps[1::2], strict=True):
        args = Arguments.from_address(at)
        found.append((function, args.weight, args.tokens, args.x))
    return found


def test_layers_that_follow_have_their_own_and_what_the_first_is_told() -> None:
    known = KnownJobs.of([jobs(100 + i, 5, 50) for i in range(4)])
    assert known is not None
    assert (known.leading, known.layers) == (1, 3)
    assert known.update([jobs(100, 6, 60)])
    expected = [((1, 101 + i, 6, 60), (2, 7, 6, 60)) for i in range(3)]
    assert memory(known) == [job for layer in expected for job in layer]


def test_layers_of_two_kinds_follow_each_its_own() -> None:
    known = KnownJobs.of([jobs(100 + i, 5, 50 + i % 2) for i in range(6)])
    assert known is not None
    assert (known.leading, known.layers) == (2, 4)
    assert known.update([jobs(100, 6, 60), jobs(101, 6, 70)])
    assert memory(known)[::2] == [(1, 102 + i, 6, 60 + 10 * (i % 2)) for i in range(4)]


def test_nothing_follows_where_the_first_layer_is_another() -> None:
    known = KnownJobs.of([jobs(100 + i, 5, 50) for i in range(4)])
    assert known is not None
    before = memory(known)
    assert not known.update([jobs(200, 6, 60)])  # its weights lie elsewhere
    assert not known.update([jobs(100, 6, 60)[::-1]])
    assert memory(known) == before


def test_layers_without_anything_in_common_are_all_told() -> None:
    assert KnownJobs.of([jobs(100 + i, 5, 50 + i) for i in range(4)]) is None
    assert KnownJobs.of([jobs(100, 5, 50, Undeclared) for _ in range(4)]) is None

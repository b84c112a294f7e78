"""Where experts lie: as a GPU reads them, at multiples of 16 bytes and at equal distances."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qoff.checkpoint import Checkpoint, CheckpointWriter, writer
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory import place_in_host, plan_residency
from qoff.memory.experts import ExpertWave
from qoff.memory.plan import ChosenExperts, Residency
from qoff.memory.plan.experts import matrices
from qoff.memory.store import EXPERTS
from tests.kernels.operands import random_weight
from tests.memory.checkpoints import Truth, check_pass, same_bits
from tests.memory.kinds import PACKING, STAGING, opened

pytestmark = pytest.mark.usefixtures("no_thread_left")
LAYERS, COUNT = 2, 3  # experts of each layer
ORDER = (0, 1, 2)


@pytest.fixture(params=["as written now", "earlier version"])
def mixture(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Checkpoint:
    """Layers with a single value before their experts, like Gemma 4's."""
    if request.param == "earlier version":
        monkeypatch.setattr(writer, "_keeps_aligned", lambda _: 16)  # weights in their order
    return write_mixture(tmp_path / "model")


def write_mixture(
    path: Path,
    bits: tuple[int, int] = (4, 4),
    inner: int = 512,
    order: tuple[int, ...] = ORDER,
    gated: bool = True,
) -> Checkpoint:
    """A mixture whose experts lie in the given order, with matrices of `bits`."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    with CheckpointWriter(path) as writing:
        for i in range(LAYERS):
            layer: dict[str, QTensor | torch.Tensor] = {
                "input_layernorm.weight": torch.randn(64),
                "layer_scale": torch.randn(1),
            }
            for n in order:
                first, second = matrices(gated)
                up = random_weight((1 + gated) * inner, 64, bits[0], packing=PACKING)
                layer[f"mlp.experts.{n}.{first}"] = up
                down = random_weight(64, inner, bits[1], packing=PACKING)
                layer[f"mlp.experts.{n}.{second}"] = down
            layer["self_attn.qkv_proj"] = random_weight(192, 64, bits[0], packing=PACKING)
            writing.write_layer(i, {f"model.layers.{i}.{name}": w for name, w in layer.items()})
        outer = {"model.embed_tokens": random_weight(32, 64, 8, packing=PACKING)}
        writing.write_outer({**outer, "model.norm.weight": torch.randn(64)})
        writing.finish({**config, "num_hidden_layers": LAYERS})
    return Checkpoint.open(path)


def planned(
    kind: str, mixture: Checkpoint, device_memory: int | None, one_by_one: bool = False
) -> Residency:
    staging = STAGING[kind]
    return plan_residency(
        mixture, device_memory, packing=PACKING, host_staging=staging, one_by_one=one_by_one
    )


def assert_aligned(matrix: object) -> None:
    assert isinstance(matrix, QTensor)
    for part in (matrix.codes, matrix.scale_min):
        assert part.storage_offset() * part.element_size() % 16 == 0


def check_layers(kind: str, mixture: Checkpoint, gated: bool = True) -> None:
    """That experts of a layer are one `QExperts`, where all stay and where layers stream."""
    everything = planned(kind, mixture, None)
    for memory in (None, everything.device_bytes - 1):
        plan = planned(kind, mixture, memory)
        assert bool(plan.slots) == (memory is not None)
        with opened(kind, mixture, plan) as store:
            check_pass(store, Truth(mixture, PACKING))
            for layer in range(LAYERS):
                with store.use(layer) as weights:
                    experts = [weights[name] for name in weights if ".experts." in name]
                    assert len(experts) == 2 * COUNT
                    for matrix in experts:
                        assert_aligned(matrix)
                    for name in matrices(gated):
                        mine = [weights[f"mlp.experts.{n}.{name}"] for n in range(COUNT)]
                        packed = [m for m in mine if isinstance(m, QTensor)]
                        assert QExperts.of(packed).count == COUNT
            assert store.stats.arena_peak == plan.device_bytes


def test_those_of_a_layer_together(kind: str, mixture: Checkpoint) -> None:
    check_layers(kind, mixture)


@pytest.mark.parametrize("bits", [(2, 2), (3, 3), (5, 5), (6, 6), (4, 3), (6, 8)])
@pytest.mark.parametrize("inner", [512, 1024])  # of 1024, experts are whole pages of the file
def test_codes_that_are_widened(
    kind: str, tmp_path: Path, bits: tuple[int, int], inner: int
) -> None:
    check_layers(kind, write_mixture(tmp_path / "model", bits, inner))


@pytest.mark.parametrize("bits", [3, 4])
def test_files_in_another_order(kind: str, tmp_path: Path, bits: int) -> None:
    check_layers(kind, write_mixture(tmp_path / "model", (bits, bits), order=(0, 2, 1)))


def test_one_by_one(kind: str, mixture: Checkpoint) -> None:
    """From their files, and from host memory."""
    check_one_by_one(kind, mixture)


@pytest.mark.parametrize("bits", [(4, 4), (3, 6)])
def test_without_a_gate(kind: str, tmp_path: Path, bits: tuple[int, int]) -> None:
    mixture = write_mixture(tmp_path / "model", bits, gated=False)
    check_layers(kind, mixture, gated=False)
    check_one_by_one(kind, mixture, gated=False)


def check_one_by_one(kind: str, mixture: Checkpoint, gated: bool = True) -> None:
    truth = Truth(mixture, PACKING)
    memory = planned(kind, mixture, None).device_bytes * 3 // 4
    plan = planned(kind, mixture, memory, one_by_one=True)
    for host_memory in (None, 1 << 20):
        plan = place_in_host(mixture, plan, host_memory, STAGING[kind])
        assert plan.expert_slots
        with opened(kind, mixture, plan) as store:
            for layer in (*range(LAYERS), 0):
                left = set(range(COUNT))
                while left:
                    chosen = ChosenExperts(layer, tuple(sorted(left)))
                    with store.use(chosen) as weights:
                        wave = weights[EXPERTS]
                        assert isinstance(wave, ExpertWave)
                        for number in wave.numbers:
                            slot = int(wave.table[number])
                            both = wave.gate_up, wave.down
                            for name, packed in zip(matrices(gated), both, strict=True):
                                matrix = packed.expert(slot)
                                assert_aligned(matrix)
                                stored = f"mlp.experts.{number}.{name}"
                                assert same_bits(matrix, truth.units[layer][stored])
                        left -= set(wave.numbers)
            assert store.stats.arena_peak == plan.device_bytes
            assert store.host_arena.used == plan.host_bytes

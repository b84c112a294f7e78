"""Tiny random models of every family, as checkpoints and as transformers models."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import qoff
from qoff.checkpoint import Checkpoint, read_weight
from qoff.errors import BudgetError
from qoff.kernels.embedding import embedding
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.memory import WeightStore
from qoff.memory.plan import (
    EMBEDDING,
    HEAD,
    LM_HEAD,
    PER_LAYER,
    Unit,
    local_names,
    unit_files,
)
from qoff.models import names
from qoff.models.convert.convert import convert
from qoff.models.families.family import TensorNames
from qoff.models.forward_pass import ForwardPass
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.native.decoder import Decoder
from qoff.models.native.linear import Steps
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.quant import QuantConfig
from tests.step_model import register_step
from tests.tiny_families import BOS, EOS, FAMILIES, PAD, TINY, VOCAB

QUANT = QuantConfig(group_size=32, solver="rtn")
# transformers 5.24 has the class, but its AutoModel does not find it.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("mistral4", "Mistral4ForCausalLM")
register_step()


def save_model(directory: Path, family: str = "llama", **changes: Any) -> None:
    """Save a random model of a family in float32, without a tokenizer.

    Skips the test where the installed transformers does not know the family yet.
    """
    given = {**TINY, **FAMILIES[family], **changes}
    if given["model_type"] not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {given['model_type']}")
    torch.manual_seed(len(family))
    config = AutoConfig.for_model(**given)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name or "scale" in name), std=0.1)
        for name, buffer in model.named_buffers():
            if "correction" in name or "scalar" in name:
                buffer.normal_(mean=float("scalar" in name), std=0.1)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    # transformers 5.24 would cut a convolution of OLMo Hybrid into equal parts.
    model.save_pretrained(directory, save_original_format=given["model_type"] != "olmo_hybrid")


def save_tokenizer(directory: Path, size: int = VOCAB) -> None:
    """Save a tokenizer with one token a character, and a chat template."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = [chr(c) for c in range(32, 32 + size) if c != 127][: size - len(special)]
    vocab = {token: i for i, token in enumerate(special + letters)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    tokenizer.save_pretrained(directory)


def save_gguf(path: Path) -> None:
    """Save a random llama of one layer in float32, with a byte-level tokenizer."""
    letters = list(bytes_to_unicode().values())
    shapes = {
        "token_embd.weight": (260, 64),
        "output_norm.weight": (64,),
        "output.weight": (260, 64),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (128, 64),
        "blk.0.ffn_up.weight": (128, 64),
        "blk.0.ffn_down.weight": (64, 128),
    }
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*letters, "<s>", "</s>", "<pad>", "th"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, shape in shapes.items():
        writer.add_tensor(name, (torch.randn(shape) * 0.1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_model(base: Path, family: str = "llama") -> Path:
    """The saved model of a family with its tokenizer, under `base`; made once."""
    path = base / "tiny-models" / family
    if not path.exists():
        save_model(path, family)
        save_tokenizer(path, FAMILIES[family].get("vocab_size", VOCAB))
    return path


def tiny_checkpoint(
    base: Path, family: str = "llama", packing: str = "rows16", bits: int = QUANT.bits
) -> Path:
    """The checkpoint of `tiny_model`, under `base`; made once."""
    path = base / "tiny-checkpoints" / f"{family}-{packing}-{bits}"
    if not path.exists():
        quant = replace(QUANT, bits=bits)
        convert(tiny_model(base, family), path, quant=quant, for_cpu=packing == "rows16")
    return path


def budgets(path: Path, slots: int = 2) -> tuple[int, int]:
    """The least budget of a `Runtime`, and the one for everything, as the refusal of 0 says."""
    return refused(lambda: Runtime(path, device_memory=0, slots=slots))


def load_budgets(path: Path, **options: Any) -> tuple[int, int]:
    """The same of `qoff.load`, whose budget bounds caches and passes, too."""
    return refused(lambda: qoff.load(path, device_memory=0, **options))


def refused(run: Callable[[], object]) -> tuple[int, int]:
    """The least budget and the one for everything, in the refusal of what `run` does."""
    with pytest.raises(BudgetError) as refusal:
        run()
    found = re.search(r"take ([\d,]+) bytes.*at least ([\d,]+)", str(refusal.value))
    assert found is not None
    everything, least = (int(number.replace(",", "")) for number in found.groups())
    return least, everything


def reference_model(path: Path) -> Any:
    """The transformers model, in float32, with the dequantized weights of a checkpoint."""
    checkpoint = Checkpoint.open(path)
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    state = {name: tensor.contiguous() for name, tensor in stored_tensors(checkpoint)}
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder, "model.safetensors"), {"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config))
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    assert not any(loading.values()), loading
    model.generation_config = GenerationConfig.from_pretrained(path)
    return model.float().eval()


def stored_tensors(
    checkpoint: Checkpoint, called: TensorNames | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of Hugging Face that the weights of a checkpoint were made of.

    called: their names, by default those of the family.
    """
    spec = DecoderSpec.from_config(checkpoint.config)
    units = [
        (names.layer_prefix(i), layer_weights(spec, i, called), file)
        for i, file in enumerate(checkpoint.layers)
    ]
    experts: dict[str, dict[int, Tensor]] = {}  # parts of one tensor
    for prefix, weights, file in [*units, ("", outer_weights(spec, called), checkpoint.outer)]:
        for weight in weights:
            stored = read_weight(file, file.weights[prefix + weight.name])
            value = stored.dequantize() if isinstance(stored, QTensor) else stored
            for i, part in enumerate(weight.parts):
                rows = value[weight.destination(i, 0, part.rows)] - part.plus
                rows = rows.reshape(len(rows) // part.rows_each, -1) if value.dim() > 1 else rows
                rows = rows.T if part.transposed else rows
                if part.expert is not None:
                    experts.setdefault(part.source, {})[part.expert] = rows
                    continue
                yield part.source, rows if part.stored is None else rows.view(part.stored)
    for source, found in experts.items():
        yield source, torch.stack([found[e] for e in range(len(found))])


def in_one_memory(weights: Mapping[str, QTensor | Tensor]) -> dict[str, QTensor | Tensor]:
    """The same weights, the quantized ones one behind the other, as in a slot."""
    parts = [(w.codes, w.scale_min) for w in weights.values() if isinstance(w, QTensor)]
    memory = torch.empty(
        sum(-(-x.nbytes // 64) * 64 for both in parts for x in both), dtype=torch.uint8
    )
    at = 0

    def placed(x: Tensor) -> Tensor:
        nonlocal at
        view = memory[at : at + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        at += -(-x.nbytes // 64) * 64
        return view

    return {
        name: replace(w, codes=placed(w.codes), scale_min=placed(w.scale_min))
        if isinstance(w, QTensor)
        else w
        for name, w in weights.items()
    }


def interleave16(gate: Tensor, up: Tensor) -> Tensor:
    """Join two tensors [rows, ...] in blocks of 16 rows in turn, as `mlp.gate_up_proj` is."""
    blocks = [torch.unflatten(x, 0, (-1, 16)) for x in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def read_all(path: Path) -> dict[str, QTensor | Tensor]:
    """The weights of a checkpoint, by their names."""
    return {
        name: read_weight(file, entry)
        for file in Checkpoint.open(path).all_files
        for name, entry in file.weights.items()
    }


class PlainRun:
    """The decoder on weights that are all in memory: no store, no slots, no threads of ours."""

    def __init__(self, path: Path, ops: Ops, **options: Any) -> None:
        checkpoint = Checkpoint.open(path)
        self._units: dict[Unit, Mapping[str, QTensor | Tensor]] = {}
        for unit, file in unit_files(checkpoint).items():
            local = local_names(unit, file.weights)
            self._units[unit] = in_one_memory(
                {
                    local[name]: w.for_kernels(ops.PACKING) if isinstance(w, QTensor) else w
                    for name, entry in file.weights.items()
                    for w in [read_weight(file, entry)]
                }
            )
        outer = self._units[HEAD]
        table = outer[EMBEDDING]
        assert isinstance(table, QTensor)
        self._units[HEAD] = {LM_HEAD: table, **outer}
        spec = DecoderSpec.from_config(checkpoint.config)
        layers = outer.get(PER_LAYER)

        def of_layers(ids: Tensor, scale: float) -> Tensor:
            assert isinstance(layers, QTensor)
            rows = embedding(ids, layers, scale=scale, rows_each=spec.num_layers)
            return rows.view(len(ids), -1)

        self.decoder = Decoder(
            spec,
            ops,
            lambda ids, scale: embedding(ids, table, scale=scale),
            embed_layers=of_layers,
            **options,
        )

    def forward(self, run: ForwardPass) -> Tensor:
        return drive(self.decoder, run, self._units)


def take_turns(passes: Sequence[Steps], store: WeightStore) -> list[Tensor]:
    """The logits of passes that all take a unit before any takes the next one."""
    wanted, found = {next(one) for one in passes}, list[Tensor]()
    while wanted:
        (unit,) = wanted
        wanted = set()
        with store.use(unit) as weights:
            for one in passes:
                try:
                    wanted.add(one.send(weights))
                except StopIteration as finished:
                    found.append(finished.value)
    return found


def drive(
    decoder: Decoder, run: ForwardPass, units: Mapping[Unit, Mapping[str, QTensor | Tensor]]
) -> Tensor:
    """Send a forward pass the weights it asks for; returns its logits."""
    steps = decoder.steps(run)
    unit = next(steps)
    while True:
        try:
            unit = steps.send(units[unit])
        except StopIteration as finished:
            return finished.value

"""What a conversion takes of memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.programs import printed
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import save_model

MEASURE = """
import sys, resource
import torch
from pathlib import Path
from qoff.models.convert.convert import convert
from qoff.quant import QuantConfig
from qoff.models.spec import DecoderSpec
torch.set_num_threads(1)
quant = QuantConfig(group_size=32, solver="rtn")
convert(sys.argv[1], sys.argv[3], quant=quant)  # a small model: everything is imported and warm
def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = rss()
Path("/proc/self/clear_refs").write_text("5")  # restarts VmHWM
convert(sys.argv[2], sys.argv[4], quant=quant)
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024
print(peak - before)
"""


def test_memory_stays_below_twice_the_largest_layer(tmp_path: Path) -> None:
    """Converting two layers of 32 MiB (bfloat16) never takes 64 MiB more than before."""
    config = TINY | FAMILIES["llama"] | {"hidden_size": 1024, "intermediate_size": 4096}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    config |= {"num_hidden_layers": 2, "vocab_size": 8192}
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    layer, tensors = 0, {}
    for name, parameter in model.named_parameters():
        tensors[name] = torch.rand(parameter.shape, dtype=torch.bfloat16)
        layer += tensors[name].nbytes * name.startswith("model.layers.0.")
    assert 31 << 20 < layer < 34 << 20
    big = tmp_path / "big"
    big.mkdir()
    (big / "config.json").write_text(json.dumps(config))
    save_file(tensors, big / "model.safetensors", {"format": "pt"})
    del tensors
    save_model(tmp_path / "small", "llama")
    places = [tmp_path / name for name in ("small", "big", "small-out", "big-out")]
    assert 0 < int(printed("-c", MEASURE, *places, timeout=300)) < 2 * layer

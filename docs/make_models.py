"""Write docs/models.md: the families that run natively, from their specs and tests.

`python -m docs.make_models` writes it; tests/test_docs.py checks that it is what would be written.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from qoff.models.convert import open_source
from qoff.models.families import FAMILIES, SOURCES, converted
from qoff.models.spec import DecoderSpec
from tests.tiny_models import FAMILIES as TESTED
from tests.tiny_models import save_model

PATH = Path(__file__).with_name("models.md")
_HEAD = """# Models

<!-- Written by `python -m docs.make_models` from the specs and the tested configurations. -->

Each family below is run by qoff's own decoder. It is tested with tiny random models: logits at
prefill and at ten decode steps equal to transformers' on the dequantized weights, within float32
rounding, for ragged batches and paddings (`tests/models/test_decoder.py`), one configuration for
each entry of the last column. Weights of other architectures are refused with the list of these.

"""


def table() -> str:
    """The file's text."""
    rows = [("`model_type`", "models", "what its layers have", "tested as")]
    rows.append(("---", "---", "---", "---"))
    for name, family in {**FAMILIES, **SOURCES}.items():
        tested = [key for key, config in TESTED.items() if config["model_type"] == name]
        traits: dict[str, None] = {}
        for key in tested:
            traits |= dict.fromkeys(_traits(_spec(key)))
        if name in SOURCES:
            traits = {"those of `gemma3_text`, which it becomes": None}
        rows.append((f"`{name}`", family.models, "; ".join(traits), ", ".join(tested)))
    return _HEAD + "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _spec(family: str) -> DecoderSpec:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), family)
        source = open_source(folder)
        config, _ = converted(source.config(), lambda name: source.info(name) is not None)
        return DecoderSpec.from_config(config)


def _traits(spec: DecoderSpec) -> list[str]:
    norm = {"rms": "RMSNorm", "layer": "LayerNorm"}[spec.norm]
    places = {"before": spec.pre_norm, "after": spec.post_norm, "after adding": spec.norm_after_add}
    found = [f"{norm} {' and '.join(place for place, used in places.items() if used)}"]
    rope = spec.rope
    if rope is not None:
        part = "" if rope.dim == spec.head_dim else f" of {rope.dim / spec.head_dim:.0%} of a head"
        found.append(f"RoPE ({rope.kind}){part}")
    switches = {
        "some layers without RoPE": rope is not None and not all(spec.rope_layers),
        "another RoPE in windows": spec.local_rope is not None,
        "learned positions": spec.learned_positions,
        "sliding windows": any(spec.sliding_window),
        "norms of query and key heads": spec.qk_norm == "head",
        "norms of all queries and keys": spec.qk_norm == "all",
        "soft caps": spec.attention_soft_cap or spec.logit_soft_cap,
        "sinks": spec.sinks,
        "biases": spec.qkv_bias or spec.mlp_bias,
        "attention and MLP side by side": spec.parallel,
        "scaled embeddings": spec.embedding_scale != 1,
        "scaled residuals": spec.residual_scale != 1,
        "tied embeddings": spec.tie_word_embeddings,
        "experts": spec.experts is not None,
        "a shared expert": spec.experts is not None and spec.experts.shared_size,
    }
    activation = spec.activation if spec.experts is None else spec.experts.activation
    found.append(f"{'gated ' if spec.gated else ''}{activation}")
    return found + [name for name, used in switches.items() if used]


if __name__ == "__main__":
    PATH.write_text(table())

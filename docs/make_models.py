"""Write docs/models.md: the families that run natively, from their specs and tests, and the rest.

`python -m docs.make_models` writes it; tests/test_docs.py checks that it is what would be written.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from qoff.models.convert.convert import open_source
from qoff.models.families import FAMILIES, SOURCES, converted
from qoff.models.spec import DecoderSpec
from tests.module_models import MODULES
from tests.tiny_families import FAMILIES as TESTED
from tests.tiny_models import save_model

PATH = Path(__file__).with_name("models.md")
_HEAD = """# Models

<!-- Written by `python -m docs.make_models` from the specs and the tested configurations. -->

qoff's own decoder runs the families below. Each is tested with tiny random models, one
configuration for each entry of the last column: logits at prefill and at ten decode steps equal
those of transformers on the dequantized weights, within float32 rounding, for ragged and padded
batches (`tests/models/test_decoder.py`). Other architectures: see below.

"""
_REST = """
Weights in FP8, in which DeepSeek V3, R1, Kimi K2 and MiniMax M2 are published, are read as they are
([formats.md](formats.md)). Experts may be tensors of their own or one tensor for a layer, whatever
form their family is published in; those of gpt-oss and Granite are in one.

The KV cache of models with latent attention keeps of a token what the heads' keys and values come
of, and the part of the keys that RoPE rotates: 324 bytes a layer of DeepSeek V2 and V3, packed to 4
bits ([kv-layout.md](kv-layout.md#latent-records)), on a CPU and on a GPU. Keys and values are the
same numbers, so they have the same bits. Adapters of `kv_b_proj` are refused.

Models with linear attention run on CPUs and GPUs. A layer with it keeps no K and V, but states of a
fixed size for each sequence, float32 and on the device: 2.1 MiB of Qwen3-Next, as much as 3,900
tokens of K and V packed to 4 bits in one of its other layers ("states" in a plan's memory). They
sum up all tokens: sequences are copied and go on from any prompt, in pieces, too, but do not go
back to an earlier token. So `draft_tokens`, such a draft model and cropping a `QoffCache` are
refused. With `share_prefixes` one state more than there are sequences is kept in host memory: those
behind the part of a prompt that is packed when it is read, and behind what another one begins with,
too. A further turn of a conversation reads the newest answer and what is new. A prompt takes a
round more for each place where states are kept. Bits of `--kv` for single layers count the layers
that attend. The matrix of what is forgotten (`in_proj_ba`) has 8 bits; convolutions are floats.

Gemma 4 runs on CPUs and GPUs; K and V of its heads of 256 and 512 channels are packed. Where keys
are values as well, their matrix is stored twice. E2B and E4B have embeddings of their layers: a
table of more than 2 billion numbers, of which a token reads 256 for each layer. It stays in memory
where everything does; otherwise its rows come from host memory, where a budget has room for all of
it, or from disk, 7 to 9 KB of a token at 6 bits. Their last layers attend to keys and values of
earlier ones, and plans count a KV cache for the earlier ones alone. Gemma 3n has all of this,
too. Its layers keep several streams of hidden states, so what a plan counts for hidden states is
four times as much as the hidden size says. The matrices that make and join streams have the bits of
the head (`head_bits`), those of LAuReL 8, and routers of streams are floats. Gates of which few
numbers are left are computed like others. Tokens without a row in the table have that of token 0,
as in transformers.

## Other architectures

Safetensors models of any other architecture that transformers has a causal language model for,
in floats or FP8, run through transformers' own modules, with `qoff.load`, `qoff.LLM` and their
commands. Their weights are resident or offloaded under the same budgets, and their logits are those
of transformers on the dequantized weights. What differs from the families above:

- The KV cache, or whatever states the model keeps, is transformers' own, padded like the batch, in
  float32, or on a GPU float16 or bfloat16 like everything that is not quantized. A packed KV cache
  replaces it, without padding, in models whose attention goes through transformers' attention
  interface, is causal or has a sliding window, and has heads of 64, 80, 96, 128, 256 or 512
  channels for keys and values alike.
  Layers may attend to the keys and values of earlier ones.
  Recurrent states stay transformers'. Other models are refused with the reason, which a trial
  without weights finds when the model is loaded.
- Linear layers of decoder layers are quantized (also the transposed ones of GPT-2, and Falcon's),
  and so are experts in transformers' three-dimensional form, the embedding and the head, except
  where the group size does not divide a matrix. Everything else is stored as floats, computed in
  float32 on a CPU, and streams with its layer: convolutions, state matrices, norms, routers that
  are not linear layers, experts of classes outside of transformers' interface for them. Weights
  outside of layers, embedding and head (learned positions, final norms) stay in memory.
- With `qoff.load`, padding is on the left: after the first pass every sequence gets the same
  number of tokens. Models with recurrent states then read one token of each sequence at a time, so
  a prompt cannot be continued, and their cache cannot be cropped.
- `qoff.LLM` and `qoff batch` pad each pass anew, so sequences come and go. Packed K and V are on
  any tier; K and V that cannot be packed, and recurrent states, are on the device as transformers
  computes them, with room for the plan's context, and so are hidden states. A prompt of a model
  with recurrent states is read in one pass, of at most `prefill_tokens` tokens. Answers are those
  of `generate` for each prompt alone.
  Refused there, with a hint at `qoff.load`: models that count padding among their positions (the
  decoders of BART and its kin), those that attend by an index of keys (GLM MoE with DSA,
  DeepSeek V3.2), those that compute layers several times in a pass and keep K and V of each
  (Inkling 2 Loop), and those whose cache forgets tokens that their mask shows (Moshi, where its
  `sliding_window` is smaller than `max_position_embeddings`).
- `AutoModelForCausalLM.from_pretrained` reads their checkpoints too, streams their layers, and
  `qoff finetune` trains adapters beside these ([transformers.md](transformers.md)).
- Of GGUF files seven architectures run so ([formats.md](formats.md)).

Tested with tiny random models (`tests/models/test_modules.py`, `tests/hf/test_modules.py`):
logits at prefill with left padding and at four decode steps, resident, within the minimal budget,
with all matrices in tiles, and with passes that take turns at every layer; with qoff's cache, the
models of `tests/models/test_modules_packed.py`; in batches, `tests/engine/test_llm_modules.py`:

"""
_REFUSED = """
Lara Mini, Apertus 1.5 and Inkling 2 Loop, which transformers has since 5.24, are compared within
the minimal budget, and the first two in batches.

Refused, each with a message: encoder-decoder models and encoders; models that keep their states
within their modules (RecurrentGemma) or in a cache of their own (RWKV, xLSTM, MiniMax 01); models
whose layers share weights (Zamba and Zamba 2 with `tie_word_embeddings`; without it transformers
gives each layer its own, and they run); models whose passes are unlike those of the others
(CPM-Ant, ProphetNet) or whose head is more than a matrix (Dory); X-MOD without a
`default_language`; a `model_type` that transformers does not know, unless the model's own code is
trusted with `trust_remote_code=True` (`--trust-remote-code`).
"""
_TRAITS = {
    "stablelm": "StableLM: LayerNorm, part of each head rotated",
    "bloom": "BLOOM: ALiBi, a norm after the embedding, tied embeddings",
    "minicpm3": "MiniCPM 3: latent attention, scaled layers",
    "jamba": "Jamba: Mamba and attention in turn, experts",
    "falcon": "Falcon: one key head for all, attention of its own in transformers",
    "gpt2": "GPT-2: transposed linear layers, learned positions",
    "vaultgemma": "VaultGemma: sliding windows, capped logits",
    "falcon_h1": "Falcon H1: Mamba 2 and attention side by side",
    "gemma3n": "Gemma 3n as earlier versions converted it: keys and values of earlier layers",
    "mamba2": "Mamba 2: no attention",
}


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
            traits = {"those of the model that it becomes": None}
        rows.append((f"`{name}`", family.models, "; ".join(traits), ", ".join(tested)))
    native = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    others = "".join(f"- `{name}`: {_TRAITS[name]}\n" for name in MODULES)
    return _HEAD + native + _REST + others + _REFUSED


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
        whole = spec.rope_head_dim if spec.full_heads is None else spec.full_heads.head_dim
        part = "" if rope.dim == whole else f" of {rope.dim / whole:.0%} of a head"
        found.append(f"RoPE ({rope.kind}){part}")
    switches = {
        "some layers without RoPE": rope is not None and not all(spec.rope_layers),
        "another RoPE in windows": spec.local_rope is not None,
        "learned positions": spec.learned_positions,
        "sliding windows": any(spec.sliding_window) and not spec.chunked,
        "attention in chunks": any(spec.sliding_window) and spec.chunked,
        "norms of query and key heads": spec.qk_norm in ("head", "unweighted", "rotated"),
        "norms of all queries and keys": spec.qk_norm == "all",
        "soft caps": spec.attention_soft_cap or spec.logit_soft_cap,
        "queries scaled by position": spec.query_scale is not None,
        "sinks": spec.sinks,
        "normalized values": spec.value_norm,
        "larger heads without a window": spec.full_heads is not None,
        "scaled layers": spec.layer_scale,
        "embeddings of layers": spec.per_layer is not None,
        "streams of hidden states": spec.streams is not None,
        "sparse gates": any(spec.sparsity or ()),
        "keys and values of earlier layers": spec.shared_kv,
        "latent attention": spec.latent is not None,
        "linear attention": spec.linear is not None,
        "gated attention": spec.gated_attention,
        "compressed queries": spec.latent is not None and spec.latent.query_latent,
        "biases": spec.qkv_bias or spec.mlp_bias,
        "attention and MLP side by side": spec.parallel,
        "scaled embeddings": spec.embedding_scale != 1,
        "scaled residuals": spec.residual_scale != 1,
        "scaled logits": spec.logit_scale != 1,
        "tied embeddings": spec.tie_word_embeddings,
        "experts": spec.experts is not None,
        "an MLP beside experts": spec.experts is not None and spec.experts.beside,
        "routers with a correction": spec.experts is not None and spec.experts.correction,
        "groups of experts": spec.experts is not None and spec.experts.groups > 1,
        "a shared expert": spec.experts is not None and spec.experts.shared_size,
    }
    activation = spec.activation if spec.experts is None else spec.experts.activation
    found.append(f"{'gated ' if spec.gated else ''}{activation}")
    return found + [name for name, used in switches.items() if used]


if __name__ == "__main__":
    PATH.write_text(table())

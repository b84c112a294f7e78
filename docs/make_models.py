"""Write docs/models.md: the families that run natively, from their specs and tests, and the rest.

`python -m docs.make_models` writes it; tests/test_docs.py checks that it is what would be written.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from qoff.models.convert.convert import open_source
from qoff.models.families import FAMILIES, SOURCES, converted
from qoff.models.recurrent_spec import LinearSpec, MambaSpec, ShortConvSpec
from qoff.models.spec import DecoderSpec
from tests.module_models import MODULES
from tests.tiny_families import FAMILIES as TESTED
from tests.tiny_models import save_model

PATH = Path(__file__).with_name("models.md")
_HEAD = """# Models

<!-- Written by `python -m docs.make_models` from the specs and the tested configurations. -->

qoff runs the families of the first table with its own decoder. Safetensors models of
[other architectures](#other-architectures) run through transformers' own modules. To try one:

```
qoff generate HuggingFaceTB/SmolLM2-1.7B-Instruct "Why is the sky blue?"
```

## Native families

Norms are before a sublayer, after it, or after its output was added. Each family is tested with
tiny random models, one configuration for each entry of the last column. For ragged and padded
batches, logits at prefill and at ten decode steps equal those of transformers on the dequantized
weights, within float32 rounding (`tests/models/test_decoder.py`).

"""
_REST = """
Multimodal families run without images, as their text models. If only their processor has a chat
template, that becomes the tokenizer's. If a template reads messages as lists of parts, `qoff.LLM`
and commands give it text as one part; the tokenizer's own `apply_chat_template` does not.

transformers' `AutoModelForCausalLM` does not find Mistral Small 4, so `from_pretrained` and
`qoff finetune` do not take its checkpoints. `qoff.load` and `qoff.LLM` do.

### FP8 weights and experts

FP8 weights, in which DeepSeek V3, R1, Kimi K2 and MiniMax M2 are published, are read as they are
([formats.md](formats.md)). Experts may be one tensor each or one tensor per layer, as gpt-oss and
Granite have them, whichever form their family is published in.

### SparseMixer

PhiMoE weighs each of its two experts by a softmax of the scores close to that expert's, within
`router_jitter_noise`, as transformers does. llama.cpp has a softmax of all scores there, divided by
the sum of both, and RMSNorm in place of LayerNorm. GGUF files do not say which they mean; they are
computed as transformers' models are, with a noise of 0.01, and the factor that a file has for RoPE.
Adapters of the routers are refused.

### Latent attention

The KV cache keeps the latent of each token, from which keys and values of all heads come, and the
part of the keys that RoPE rotates, or would. In DeepSeek V2 and V3 that is 324 bytes a token and
layer, packed to 4 bits ([kv-layout.md](kv-layout.md#latent-records)), on CPUs and GPUs. Keys and
values are the same numbers, so they have the same bits. Adapters of `kv_b_proj` are refused.

### Value heads of fewer channels

In MiMo V2 Flash heads of keys have 192 channels and heads of values 128. The KV cache keeps both as
wide, V with zeros behind: of its bytes a sixth are these zeros, which plans count. Weights have
their own sizes. A GGUF file counts what a token sees before it in a window; as in transformers, the
token itself counts here. Its layers for multi-token prediction are left out.

### An index of keys

In DeepSeek V3.2 and GLM 5 an index chooses 2,048 tokens for each new one to attend to (DeepSeek
Sparse Attention). Its keys are cached beside the latents, 8 bits each whatever K and V have, on the
same tiers: 136 bytes a token and layer. Shorter sequences attend to all their tokens. In GLM 5.2
most layers attend to what an earlier one chose. `attention_top` below 1 is refused.

On a GPU the choice is among tokens that are there. KV blocks in host memory or on disk come there
for each pass, never to the CPU: `cpu_attention="always"` is refused where some are off the GPU.

### Linear attention

A layer with linear attention keeps no K and V. It keeps states of a fixed size for each sequence,
float32 and on the device ("states" in a plan's memory): 2.1 MiB in Qwen3-Next, as much as 3,900
tokens of K and V packed to 4 bits in one of its other layers. These models run on CPUs and GPUs.

- States sum up all tokens. A sequence can be copied and can go on from any prompt, also in pieces,
  but cannot go back to an earlier token. So a draft model of this kind and cropping a `QoffCache`
  are refused.
- `draft_tokens` works: a pass over drafts computes on copies of the states, a layer's at a time,
  and the next pass adds what was accepted. Plans count the copies under "states". Such passes are
  not recorded, so models in memory gain less by drafts than those that stream.
- With `share_prefixes`, host memory keeps as many states as there are sequences, and one more:
  those behind the part of a prompt that is packed when it is read, and behind what another prompt
  begins with. A further turn of a conversation reads the newest answer and what is new. A prompt
  takes one more round for each place where states are kept.
- `--kv` for single layers counts only the layers that attend.
- The matrix of what is forgotten (`in_proj_ba`) has 8 bits; convolutions are floats.

OLMo Hybrid has Gated DeltaNet, too, beside OLMo 2's attention, with RoPE or without it.

- A state may also turn the sign of what it gives for a key (`linear_allow_neg_eigval`).
- Layers with states have their norms before attention and MLP, others after them.
- `a_proj` and `b_proj` have 8 bits. Adapters of these two are refused, as their 30 rows are no
  whole blocks of 16.
- transformers 5.24 saves a model's convolutions in three equal parts, which they are not where
  values have more channels than keys. Such a file is refused by its shapes; one as it is published,
  or saved with `save_original_format=False`, is read.

Kimi Linear has Kimi Delta Attention (KDA), in which each channel of keys forgets by itself, beside
latent attention without RoPE. What is said above holds here, too.

- Its states take 2.1 MiB for a sequence and layer, as much as 6,900 tokens in one of its layers
  with latent attention, packed to 4 bits.
- The matrices of what is forgotten have 8 bits: `f_a_proj`, `f_b_proj` and `b_proj`, and
  `g_a_proj`, which lies beside them.
- On a GPU a prompt is computed in chunks of 64 tokens, as in Qwen3-Next. No GPU has run these
  kernels yet. They are tested in Triton's interpreter, and compiled for six architectures.
- A `config.json` whose `mla_use_nope` is false is refused.

Ling 3 has KDA, too, beside latent attention with RoPE and a gate of each head.

- What remains of a state has a least logarithm (`kda_lower_bound`), unless `kda_safe_gate` is
  false.
- What is forgotten comes of one large matrix, `f_proj`, beside `b_proj`. Both have 8 bits.
- Its states are as large as Kimi Linear's. Its kernels on a GPU are the same, and tested as these.

### Short convolutions

Most layers of LFM2 are gated convolutions over three tokens. Their states are the inputs of the two
newest tokens: 16 KiB for a sequence and layer of LFM2 8B-A1B. What is said above of states and of
`--kv` holds here, too. Convolutions are floats. A `config.json` with `conv_bias` is refused.

### Mamba 2

Most mixers of Granite 4, Bamba, Nemotron H and 3 are Mamba 2, a state space model. Its states take
2.1 MiB for a sequence and layer of Nemotron 3 Nano, 4.1 MiB of Granite 4 H-Small. What is said
above of states and of `--kv` holds here, too. `in_proj`, which makes the steps of what is forgotten
as well, has the bits of other matrices; what else there is, is floats. A `config.json` with
`mamba_proj_bias`, or bounds in `time_step_limit`, is refused.

A layer of Nemotron has attention, Mamba, an MLP or experts: one of them. Experts of Nemotron 3
Super get a narrower projection of the hidden states, and their sum is projected back.

### Multi-token prediction

Many models have a layer behind their last one that predicts the token after the next. Conversion
keeps it, in a file of its own, and `draft_model="mtp"` drafts with it
([throughput.md](throughput.md#drafts)). Nothing else reads it.

- Layers as DeepSeek V3, V3.2, GLM 4.5 to 5 and Hunyuan 3 have them (`model.layers.N.eh_proj`), as
  Qwen3-Next, Qwen 3.5, K-EXAONE and Mellum 2 do (`mtp.fc`), and as GGUF files do (`nextn`). What
  they leave of a token and predict is compared with transformers' for DeepSeek V3, GLM 4.5,
  Mellum 2, Qwen3-Next and Qwen 3.5 (`tests/models/test_mtp.py`).
- A layer without a tensor that this needs is left out, and a line says so. So are those with other
  names, as of MiMo, ERNIE 4.5 and Nemotron 3.
- Published checkpoints that tools have quantized often lack the layer.

### Gemma 4 and Gemma 3n

They run on CPUs and GPUs. K and V of Gemma 4's heads of 256 and 512 channels are packed. If keys
are values as well, their matrix is stored twice.

- Gemma 4 E2B, E4B and Gemma 3n have per-layer embeddings. In E2B and E4B that is a table of more
  than 2 billion numbers, of which a token reads 256 for each layer. It is in memory if everything
  is. Otherwise its rows come from host memory, if a budget has room for all of it, or from disk: 7
  to 9 KB a token at 6 bits. Tokens without a row in the table have that of token 0, as in
  transformers.
- Their last layers attend to keys and values of earlier ones. Plans count a KV cache only for the
  earlier layers.
- Gemma 3n's layers have several streams of hidden states, so plans count four times the memory for
  hidden states that the hidden size suggests. The matrices that make and join streams have the bits
  of the head (`head_bits`), those of LAuReL 8, and routers of streams are floats. Sparse gates are
  computed like others.

## Other architectures

Safetensors models of any other architecture for which transformers has a causal language model, in
floats or FP8, run through transformers' own modules, with `qoff.load`, `qoff.LLM` and their
commands. Their weights are resident or offloaded under the same budgets. Their logits are those of
transformers on the dequantized weights. Of GGUF files six architectures run this way
([formats.md](formats.md#which-architectures)).

What differs from the native families:

- **Weights.** Linear layers of decoder layers are quantized (also the transposed ones of GPT-2, and
  Falcon's), and so are experts in transformers' three-dimensional form, the embedding and the head,
  unless the group size does not divide a matrix. Everything else is stored as floats, computed in
  float32 on a CPU, and streams with its layer: convolutions, state matrices, norms, routers that
  are not linear layers, and experts of classes outside of transformers' interface for them. Weights
  outside of layers, embedding and head (learned positions, final norms) stay in memory. Experts in
  transformers' three-dimensional form come one by one where memory is short, as those of native
  families do; guesses and `cpu_experts` are for these alone.
- **KV cache.** A packed cache, without padding, is used if attention goes through transformers'
  attention interface, is causal or has a sliding window, and has heads of 64, 80, 96, 128, 192, 256
  or 512 channels for keys and values alike. Layers may attend to keys and values of earlier ones.
  Other models keep transformers' own cache, padded like the batch, in float32, or on a GPU float16
  or bfloat16 like everything that is not quantized. If you ask for a packed one, they are refused
  with the reason, which a trial without weights finds when the model is loaded. Recurrent states
  are always transformers'.
- **`qoff.load`** pads on the left, and after the first pass every sequence gets the same number of
  tokens. Models with recurrent states then read one token of each sequence at a time, so a prompt
  cannot be continued, and their cache cannot be cropped. Models that sum up blocks of tokens
  (DeepSeek V4) count padding among them, as in transformers: give them one prompt, or use
  `qoff.LLM`.
- **`qoff.LLM` and `qoff batch`** pad each pass anew, so sequences come and go. Packed K and V are
  on any tier. K and V that cannot be packed, recurrent states and hidden states are on the device
  as transformers computes them, with room for the plan's context. A prompt of a model with
  recurrent states is read in one pass, of at most `prefill_tokens` tokens. Answers are those of
  `generate` for each prompt alone.
- `AutoModelForCausalLM.from_pretrained` reads their checkpoints, too, and streams their layers;
  `qoff finetune` trains adapters beside them ([transformers.md](transformers.md)).

`qoff.LLM` computes some of these models one sequence at a time, with a cache of transformers for
each. The weights still come once for all sequences of a pass. These are models of which only their
own modules know what a cache holds (DeepSeek V4), that attend by an index of keys (A.X K2, Qwen 4
Exp, MiniMax M3, GLM 5 Next, Mistral Large 4, Hunyuan 4), that keep K and V of layers that are
computed several times in a pass (Inkling 2 Loop), that count padding among their positions (the
decoders of BART and its kin), or whose cache forgets tokens that their mask shows (Moshi). Prompts
are read in one pass, and nothing is packed. What a cache takes is found by a trial without weights.

**Models that see** run without what they see with, if the language model in them has no family
above: MiniMax M3, GLM 5 Next, Mistral Large 4, Hunyuan 4, Inkling 2, Muse Spark, Command A Vision
and some 30 others (each class named "ForConditionalGeneration" that reads text without an image).
Images are not read. `AutoModelForImageTextToText.from_pretrained` reads their
checkpoints, as language models.

### Tested

With tiny random models: logits at prefill with left padding and at four decode steps, resident,
within the minimal budget, in tiles, and with passes that take turns at every layer
(`tests/models/test_modules.py`, `tests/hf/test_modules.py`); qoff's cache in
`tests/models/test_modules_packed.py`, batches in `tests/engine/test_llm_modules.py`. Lara Mini,
Apertus 1.5 and Inkling 2 Loop, which transformers has since 5.24, are compared within the minimal
budget and in batches, like Inkling 2 and Command A Vision; so are, one sequence at a time
(`tests/engine/test_llm_own_caches.py`), DeepSeek V4, A.X K2, Qwen 4 Exp, MiniMax M3, GLM 5 Next,
Mistral Large 4 and Hunyuan 4.

"""
_REFUSED = """
### Refused

Each of these gets a message:

- encoder-decoder models and encoders;
- models that keep their states within their modules (RecurrentGemma) or in a cache of their own
  (RWKV, xLSTM, MiniMax 01);
- models whose layers share weights (Zamba and Zamba 2 with `tie_word_embeddings`; without it
  transformers gives each layer its own, and they run);
- models whose passes are unlike those of the others (CPM-Ant, ProphetNet), or whose head is more
  than a matrix (Dory);
- X-MOD without a `default_language`;
- a `model_type` that transformers does not know, unless the model's own code is trusted with
  `trust_remote_code=True` (`--trust-remote-code`).
"""
_TRAITS = {
    "stablelm": "StableLM: LayerNorm, part of each head rotated",
    "bloom": "BLOOM: ALiBi, a norm after the embedding, tied embeddings",
    "minicpm3": "MiniCPM 3: latent attention, scaled layers",
    "jamba": "Jamba: alternating Mamba and attention, experts",
    "falcon": "Falcon: multi-query attention, its own attention code in transformers",
    "gpt2": "GPT-2: transposed linear layers, learned positions",
    "vaultgemma": "VaultGemma: sliding windows, soft-capped logits",
    "falcon_h1": "Falcon H1 as earlier versions converted it: Mamba 2 and attention in parallel",
    "gemma3n": "Gemma 3n as earlier versions converted it: KV shared with earlier layers",
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
            traits = {"those of its text model": None}
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
    before = spec.pre_norm or spec.states_pre_norm
    places = {"before": before, "after": spec.post_norm, "after adding": spec.norm_after_add}
    found = [f"{norm} {' and '.join(place for place, used in places.items() if used)}"]
    rope, wide = spec.rope, spec.full_heads
    full = (spec.num_kv_heads, spec.head_dim) if wide is None else (wide.kv_heads, wide.head_dim)
    if rope is not None:
        whole = spec.rope_head_dim if spec.full_heads is None else full[1]
        part = "" if rope.dim == whole else f" of {rope.dim / whole:.0%} of a head"
        found.append(f"RoPE ({rope.kind}){part}")
    switches = {
        "some layers without RoPE": rope is not None and not all(spec.rope_layers),
        "another RoPE in windowed layers": spec.local_rope is not None,
        "learned positions": spec.learned_positions,
        "sliding windows": any(spec.sliding_window) and not spec.chunked,
        "chunked attention": any(spec.sliding_window) and spec.chunked,
        "norm of each query and key head": spec.qk_norm in ("head", "unweighted", "rotated"),
        "norm over all query and key heads": spec.qk_norm == "all",
        "soft-capped logits": spec.attention_soft_cap or spec.logit_soft_cap,
        "queries scaled by position": spec.query_scale is not None,
        "attention sinks": spec.sinks == "all",
        "attention sinks in windows": spec.sinks == "windows",
        "normalized values": spec.value_norm,
        "larger heads in layers without a window": full[1] > spec.head_dim,
        "fewer KV heads in layers without a window": full[0] < spec.num_kv_heads,
        "narrower value heads": spec.value_dim,
        "scaled layers": spec.layer_scale,
        "per-layer embeddings": spec.per_layer is not None,
        "several streams (AltUp)": spec.streams is not None,
        "sparse gates": any(spec.sparsity or ()),
        "KV shared with earlier layers": spec.shared_kv,
        "latent attention": spec.latent is not None,
        "an index of keys": spec.index is not None,
        "linear attention": isinstance(spec.recurrent, LinearSpec),
        "decays of key channels (KDA)": isinstance(spec.recurrent, LinearSpec)
        and spec.recurrent.by_channel,
        "negative eigenvalues": isinstance(spec.recurrent, LinearSpec)
        and spec.recurrent.learns > 1,
        "bounded decays": isinstance(spec.recurrent, LinearSpec) and spec.recurrent.floor,
        "norms before in layers with states": spec.states_pre_norm,
        "short convolutions": isinstance(spec.recurrent, ShortConvSpec),
        "Mamba 2": isinstance(spec.recurrent, MambaSpec),
        "a mixer or an MLP in each layer": spec.mixers is not None,
        "attention beside it": spec.has_both,
        "gated attention": spec.gated_attention and not spec.head_gates,
        "attention with a gate of each head": spec.head_gates,
        "numbers of query heads by layer": spec.layer_heads is not None,
        "compressed queries": spec.latent is not None and spec.latent.query_latent,
        "a bias of the head": spec.head_bias,
        "biases": spec.qkv_bias or spec.mlp_bias,
        "parallel attention and MLP": spec.parallel,
        "scaled embeddings": spec.embedding_scale != 1,
        "scaled residuals": spec.residual_scale != 1 or spec.mlp_output_scale != 1,
        "scaled logits": spec.logit_scale != 1,
        "tied embeddings": spec.tie_word_embeddings,
        "experts": spec.experts is not None,
        "an MLP beside experts": spec.experts is not None and spec.experts.beside,
        "limited gates": spec.limits is not None,
        "soft-capped router scores": spec.experts is not None and spec.experts.score_cap,
        "a SparseMixer as router": spec.experts is not None and spec.experts.shares == "mixer",
        "a correction in the router": spec.experts is not None and spec.experts.correction,
        "expert groups": spec.experts is not None and spec.experts.groups > 1,
        "experts in a narrower space": spec.latent_width,
        "a shared expert": spec.experts is not None and spec.experts.shared_size,
    }
    activation = spec.activation if spec.experts is None else spec.experts.activation
    found.append(f"{'gated ' if spec.gated else ''}{activation}")
    return found + [name for name, used in switches.items() if used]


if __name__ == "__main__":
    PATH.write_text(table())

"""`qoff convert | generate | batch | bench | eval | verify | env | run`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import qoff
from qoff.errors import QoffError
from qoff.units import format_size

from .bench import bench
from .eval import evaluate
from .output import errors_in_one_line, print_json, print_table, progress_bar
from .run import Passing, run

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="A qoff checkpoint, another model, or a hub id.")]
Device = Annotated[str, typer.Option(help="cpu, or a GPU such as cuda.")]
DType = Annotated[
    str, typer.Option(help="Of hidden states on a GPU: float16, bfloat16; auto: the model's.")
]
Slots = Annotated[int, typer.Option(min=2, help="Buffers that offloaded layers pass through.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens of the answer, at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from the k likeliest tokens; 0: from all.")]
TopP = Annotated[
    float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this probability.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed for sampling.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")]
Trace = Annotated[Path | None, typer.Option(help="Write a Chrome trace to this file.")]
AttentionTop = Annotated[
    float, typer.Option(help="Fraction of the packed KV blocks that a new token attends to.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qoff {qoff.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Run language models larger than memory: 4-bit weights, streamed from disk."""


@app.command()
@errors_in_one_line
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A directory with safetensors (floats, GPTQ, AWQ, compressed-tensors or "
            "bitsandbytes), a GGUF file, or a hub id."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Directory to create.")],
    bits: Annotated[int, typer.Option(help="Bits of the layers' matrices: 4 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale: 32, 64, 128.")] = 64,
    solver: Annotated[str, typer.Option(help="hqq, mse or rtn; gptq calibrates.")] = "hqq",
    head_bits: Annotated[int, typer.Option(help="Bits of embedding and head: 4 or 8.")] = 8,
    weight: Annotated[
        list[str] | None,
        typer.Option(help="Another format for some matrices, like '*.down_proj=8,64'; repeatable."),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(help="Choose each matrix's format for a size: bits a weight, like 4.5."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Choose each matrix's format for a loss: nats a token, like 0.02."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text for these two and for gptq."),
    ] = None,
    for_: Annotated[str, typer.Option("--for", help="Device to pack for: any or cpu.")] = "any",
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Quantize again what cannot be taken over exactly.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Convert a model to a qoff checkpoint. Quantized weights keep their codes."""
    from qoff.checkpoint import Checkpoint
    from qoff.hf.load import local_source
    from qoff.models.convert.convert import convert as run
    from qoff.quant import QuantConfig

    from . import convert as work

    if for_ not in ("any", "cpu"):
        raise QoffError(f"--for is 'any' or 'cpu', not {for_!r}")
    target = work.Target(target_bits, max_kl)
    text = target.text(solver, weight, calibration)
    quant = QuantConfig(bits, group_size, solver, head_bits, weights=work.formats_of(weight or ()))
    path = local_source(source, trust_remote_code)
    ids = None if text is None else work.calibration_ids(path, text)
    chosen: dict[str, Any] = {}
    if target.given and ids is not None:
        with progress_bar("measuring", quiet=as_json) as progress:
            mix = work.mixed(path, ids, quant, target, progress)
        quant = replace(quant, weights=mix.formats)
        chosen = work.described(mix)
    with progress_bar("converting", quiet=as_json) as progress:
        run(
            path,
            out,
            quant=quant,
            for_cpu=for_ == "cpu",
            requantize=requantize,
            overwrite=overwrite,
            progress=progress,
            trust_remote_code=trust_remote_code,
            calibration=ids if solver in work.CALIBRATED else None,
        )
    checkpoint = Checkpoint.open(out)
    files = (*checkpoint.layers, checkpoint.outer)
    total = sum(file.nbytes for file in files)
    result = {"path": str(out), "layers": len(checkpoint.layers), "bytes": total, **chosen}
    if as_json:
        print_json(result)
        return
    typer.echo(f"{out}: {len(checkpoint.layers)} layers, {format_size(total)}")
    if chosen:
        typer.echo(work.sentence(chosen))


@app.command()
@errors_in_one_line
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    device: Device = "auto",
    dtype: DType = "auto",
    device_memory: Annotated[
        str | None, typer.Option(help="Bound of everything on the device, like 24MiB or 8GB.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Bound of everything in host memory; the rest streams from disk."),
    ] = None,
    slots: Slots = 2,
    activation_bits: Annotated[
        int, typer.Option(help="16; or 8: faster prefill, less accurate.")
    ] = 16,
    kv: Annotated[
        str,
        typer.Option(
            help="Bits of the KV cache: 4, 8, or 8,4 for K and V; 4/0-3:8,4/9:8 uses "
            "other bits in some layers; none: not packed."
        ),
    ] = "auto",
    attention_top: AttentionTop = 1.0,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    raw: Raw = False,
    trust_remote_code: TrustRemoteCode = False,
    trace: Trace = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print what each token waited for.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt, and print what it cost."""
    from qoff.engine import SamplingParams
    from qoff.memory.io.timeline import Timeline, checked_path

    from .generate import answer, cache_form, open_for

    if trace is not None:
        checked_path(trace)
    timeline = None if trace is None else Timeline()
    SamplingParams(temperature=temperature)  # refuses what would overflow
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    with progress_bar("converting", quiet=as_json) as progress:
        loaded, tokenizer = open_for(
            prompt,
            max_new_tokens,
            model,
            raw=raw,
            device=device,
            dtype=dtype,
            device_memory=device_memory,
            host_memory=host_memory,
            slots=slots,
            activation_bits=activation_bits,
            kv=cache_form(kv, attention_top),
            progress=progress,
            timeline=timeline,
            trust_remote_code=trust_remote_code,
        )
    try:
        result = answer(loaded, tokenizer, prompt, raw=raw, quiet=as_json, seed=seed, **options)
    finally:
        loaded.close()
        if timeline is not None and trace is not None:
            timeline.write(trace)
    if stats:
        header = ("token", "ms", "waited for the disk")
        print_table("tokens", result.round_rows(), header, stderr=True)
    if as_json:
        print_json(result.as_dict())
    else:
        print_table("", result.rows())


@app.command()
@errors_in_one_line
def batch(
    model: Model,
    prompts: Annotated[
        Path,
        typer.Argument(
            help='File with a prompt a line, text or {"prompt": ...}; "-": standard input.'
        ),
    ],
    device: Device = "auto",
    dtype: DType = "auto",
    device_memory: Annotated[
        str | None, typer.Option(help="Bound of everything on the device, like 8GB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Bound of everything in host memory.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = 8,
    batches: Annotated[
        int, typer.Option(min=1, help="Batches that go through a layer before the next is read.")
    ] = 1,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of prompt and answer together.")
    ] = 2048,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of one pass.")] = 1024,
    kv: Annotated[str, typer.Option(help="Bits of the KV cache: 4, 8, or 8,4.")] = "4",
    attention_top: AttentionTop = 1.0,
    kv_device: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of the KV cache on the device.")
    ] = 1.0,
    kv_host: Annotated[
        float,
        typer.Option(min=0, max=1, help="Fraction of it in host memory; the rest is on disk."),
    ] = 0.0,
    cpu_attention: Annotated[
        str, typer.Option(help="The CPU attends to offloaded KV: auto, always or never.")
    ] = "auto",
    activations: Annotated[
        str, typer.Option(help="Tier of waiting batches' activations: device, host or disk.")
    ] = "device",
    schedule: Annotated[
        str,
        typer.Option(help="block: all batches go through a layer before the next; or sequential."),
    ] = "block",
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Prompts that begin alike share KV blocks.")
    ] = False,
    slots: Slots = 2,
    activation_bits: Annotated[int, typer.Option(help="16; or 8: faster, less accurate.")] = 16,
    max_tokens: NewTokens = 128,
    min_tokens: Annotated[int, typer.Option(min=0, help="Tokens of the answer, at least.")] = 0,
    temperature: Temperature = 0.0,
    top_k: Annotated[
        int, typer.Option(min=-1, help="Sample from the k likeliest tokens; 0 or -1: from all.")
    ] = 0,
    top_p: TopP = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0, max=1, help="Drop tokens less likely than this times the best.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and answer become less likely.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(min=-2, max=2, help="Lower the logits of tokens in the answer by this.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(min=-2, max=2, help="The same for each time that the token is there.")
    ] = 0.0,
    n: Annotated[int, typer.Option(min=1, help="Answers for each prompt.")] = 1,
    seed: Seed = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="Token that ends an answer; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end at the model's end token.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="Print log-probabilities of each token and so many likeliest."),
    ] = None,
    raw: Raw = False,
    trust_remote_code: TrustRemoteCode = False,
    trace: Trace = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print what each round waited for.")
    ] = False,
) -> None:
    """Answer many prompts in large batches, a line of JSON for each.

    Answers are printed when they are done. A prompt that cannot be answered yields a line with
    its error, and exit status 1 at the end.
    """
    from qoff.engine import LLM, SamplingParams
    from qoff.kvcache import KVQuant
    from qoff.kvcache.store.placement import KVPlacement
    from qoff.plan import Plan

    from . import batch as work

    plan = Plan(
        device_memory=device_memory,
        host_memory=host_memory,
        batch_size=batch_size,
        batches=batches,
        context=context,
        prefill_tokens=prefill_tokens,
        kv=KVQuant.of(kv, attention_top=attention_top),
        kv_placement=KVPlacement(kv_device, kv_host),
        cpu_attention=cpu_attention,  # type: ignore[arg-type]  # checked there
        activations=activations,  # type: ignore[arg-type]
        schedule=schedule,  # type: ignore[arg-type]
        share_prefixes=share_prefixes,
        slots=slots,
        activation_bits=activation_bits,
    )
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        n=n,
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    texts = work.read_prompts(prompts)
    opened = partial(
        LLM,
        model,
        plan,
        device=device,
        dtype=dtype,
        trace=trace,
        trust_remote_code=trust_remote_code,
    )
    with work.ended_by_sigterm(), opened() as llm:
        ended = work.run(llm, texts, params, raw)
        if stats:
            work.print_stats(llm)
    if ended.get("error"):
        raise typer.Exit(1)


app.command()(bench)


@app.command()
@errors_in_one_line
def verify(
    checkpoint: Annotated[Path, typer.Argument(help="A qoff checkpoint directory.")],
    as_json: Json = False,
) -> None:
    """Compare every byte of a checkpoint with its checksums."""
    from qoff.checkpoint import verify as run

    with progress_bar("verifying", quiet=as_json) as progress:
        report = run(checkpoint, progress=progress)
    result = {"path": str(checkpoint), "files": report.files, "bytes": report.nbytes, "ok": True}
    if as_json:
        print_json(result)
    else:
        typer.echo(f"{checkpoint}: {report.files} files, {format_size(report.nbytes)}, all intact")


@app.command()
@errors_in_one_line
def env(
    path: Annotated[Path, typer.Option(exists=True, help="Folder whose disk to look at.")] = Path(),
    as_json: Json = False,
) -> None:
    """Show versions, processor, memory, disk and GPU."""
    from .env import describe

    found = describe(path)
    if as_json:
        print_json(found)
    else:
        print_table("", [(name, str(value)) for name, value in found.items()])


app.command("eval")(evaluate)
app.command(cls=Passing)(run)

if __name__ == "__main__":
    app()

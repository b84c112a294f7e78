"""`qoff batch`: a file of requests in, a line of JSON for each answer out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer import Argument, Context, Option

from qoff.errors import ArgumentError
from qoff.units import format_size

from .command import command, named
from .options import CacheOptions, DrawOptions, Model, Raw, RunOptions, Trace, model_name
from .output import print_table
from .progress import job_progress

if TYPE_CHECKING:
    from qoff.engine import LLM
    from qoff.jobs.file import FileJob
    from qoff.jobs.runner import Counts
    from qoff.plan import Plan


# What the planner chooses: where an option says one of these, it chooses nothing.
_CHOSEN = (
    *("batch_size", "batches", "prefill_tokens", "cpu_attention", "activations", "schedule"),
    *("kv_device", "kv_host", "cpu_experts", "cpu_expert_tokens"),
)
_BOUNDS = ("device_memory", "host_memory", "max_memory")


@dataclass(frozen=True)
class PlanOptions:
    """Fields of `qoff.Plan`."""

    # What options may say anew of a saved plan: `qoff plan` takes these fields as told (--shared,
    # --spill-folder), or leaves them out.
    free: ClassVar[frozenset[str]] = frozenset(
        {"draft_tokens", "draft_model", "share_prefixes", "spill_folder"}
    )

    batch_size: int = Option(8, min=1, help="Sequences per batch.")
    batches: int = Option(1, min=1, help="Batches that pass a layer before the next layer is read.")
    context: int = Option(2048, min=1, help="Most tokens of prompt and answer together.")
    prefill_tokens: int = Option(1024, min=1, help="Prompt tokens of one pass.")
    cpu_attention: str = Option("auto", help="CPU attends to offloaded KV: auto, always, never.")
    cpu_experts: bool = Option(
        False, "--cpu-experts", help="On a GPU: the CPU computes the experts in host memory."
    )
    cpu_expert_tokens: int | None = Option(
        None,
        min=0,
        help="With --cpu-experts: most tokens of such a pass; longer ones use the GPU.",
    )
    activations: str = Option(
        "device", help="Tier of waiting batches' hidden states: device, host or disk."
    )
    schedule: str = Option("block", help="block: layer by layer; sequential: batch by batch.")
    draft_tokens: int = Option(
        0, min=0, help="Most tokens drafted per answer and checked in one pass; 0: none."
    )
    draft_model: str | None = Option(
        None,
        help="Small model with the same tokenizer that drafts, or 'mtp': the model's own layer "
        "for multi-token prediction; default: prompt lookup.",
    )
    share_prefixes: bool = Option(
        False, "--share-prefixes", help="Prompts with the same beginning share KV blocks."
    )
    spill_folder: Path | None = Option(
        None,
        exists=True,
        file_okay=False,
        help="Folder of the disk tier; default: that of temporary files.",
    )
    kv_device: float = Option(1.0, min=0, max=1, help="Fraction of the KV cache on the device.")
    kv_host: float = Option(
        0.0, min=0, max=1, help="Fraction of the KV cache in host memory; the rest is on disk."
    )
    lora_modules: list[str] | None = Option(
        None, help="LoRA adapter as NAME=FOLDER, used by requests for model NAME; repeatable."
    )

    def plan(
        self, called: Context, model: str, how: RunOptions, cache: CacheOptions
    ) -> tuple[Plan | None, dict[str, Any]]:
        """The plan, None for one that fits what is free, and the options of `qoff.LLM` beside it.

        Without bounds these have `_bind`, and `_plain` for what options say of a plan that is yet
        to be chosen. Of a saved plan, `free` can be given anew. Raises ArgumentError for a KV
        cache that is not packed, a bound that would bind nothing, and for others of its fields,
        FormatError for a saved plan that is none.
        """
        from qoff.budgets import check_host_bound, memory_bounds, resolve_device
        from qoff.kvcache import KVPlacement, KVQuant
        from qoff.plan import Plan

        if how.plan is not None:
            for option in named(called, vars(self).keys() - self.free - {"lora_modules"}).values():
                raise ArgumentError(f"--plan says what {option} would; leave one of them out")
        kv = cache.quant(model, how)
        if kv is None:
            raise ArgumentError("the KV cache of a batch is packed; leave out --kv none")
        given, opening = dict(vars(self)), how.opening()
        opening["cache_dir"] = how.cache_dir
        opening["adapters"] = _adapters(given.pop("lora_modules"))
        slots, bits = opening.pop("slots"), opening.pop("activation_bits")
        if how.plan is not None:
            del opening["device_memory"], opening["host_memory"]
            anew = {name: given[name] for name in named(called, self.free)}
            return replace(how.saved_plan(), **anew), opening
        plan = Plan(
            kv=kv if isinstance(kv, KVQuant) else KVQuant(),
            kv_placement=KVPlacement(given.pop("kv_device"), given.pop("kv_host")),
            slots=slots,
            activation_bits=bits,
            **given,
        )
        bounds = {name: opening[name] for name in _BOUNDS}
        if any(bound is not None for bound in bounds.values()):
            if not plan.offloads:  # `qoff.LLM` would say so after the conversion
                where = resolve_device(how.device)
                check_host_bound(*memory_bounds(**bounds, device=where), where)
            return plan, opening
        opening["_bind"] = True
        if named(called, _CHOSEN):
            return plan, opening
        return None, opening if plan == Plan() else {**opening, "_plain": plan}


def _adapters(given: list[str] | None) -> dict[str, str]:
    """Folders by name. Raises ArgumentError, and what `adapter_config` does."""
    if not given:
        return {}
    from qoff.models.adapters import adapter_config

    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder or name in found:
            raise ArgumentError(f"--lora-modules {one}: use NAME=FOLDER, and each name once")
        if not Path(folder).is_dir():
            raise ArgumentError(f"--lora-modules {one}: there is no folder {folder}")
        adapter_config(folder)
        found[name] = folder
    return found


@dataclass(frozen=True)
class SamplingOptions(DrawOptions):
    """Fields of `qoff.SamplingParams`: all but structured outputs."""

    max_tokens: int = Option(128, min=1, help="Most tokens of the answer.")
    min_tokens: int = Option(0, min=0, help="Fewest tokens of the answer.")
    min_p: float = Option(
        0.0, min=0, max=1, help="Drop tokens less likely than this times the likeliest."
    )
    repetition_penalty: float = Option(
        1.0, help="Above 1: tokens of prompt and answer become less likely."
    )
    presence_penalty: float = Option(
        0.0, min=-2, max=2, help="Lower the logits of the answer's tokens by this."
    )
    frequency_penalty: float = Option(
        0.0, min=-2, max=2, help="The same for each time that the token occurs."
    )
    n: int = Option(1, min=1, help="Answers for each prompt.")
    stop: list[str] | None = Option(None, help="Text that ends an answer; repeatable.")
    stop_token_ids: list[int] | None = Option(None, help="Token that ends an answer; repeatable.")
    ignore_eos: bool = Option(False, "--ignore-eos", help="Do not end at the model's end token.")
    logprobs: int | None = Option(
        None, min=0, max=20, help="Log-probabilities of each token and this many likeliest ones."
    )


@command
def batch(
    called: Context,
    model: Model,
    how: RunOptions,
    cache: CacheOptions,
    planned: PlanOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        Path | None,
        Argument(help='A request per line: OpenAI\'s, text or {"prompt": ...}; "-" reads stdin.'),
    ] = None,
    input_file: Path | None = Option(None, "--input", "-i", help="The same file, as an option."),
    output: Path | None = Option(
        None, "-o", "--output", help="File for the answers; default: standard output."
    ),
    errors: Path | None = Option(
        None, help="File for failed requests; default: beside the answers."
    ),
    resume: bool = Option(
        True, "--resume/--overwrite", help="Continue the file of answers, or start over."
    ),
    keep_order: bool = Option(
        False, "--keep-order", help="Sort the answers in the order of the requests."
    ),
    served_model_name: str | None = Option(
        None, help="The model's name in OpenAI's lines; default: that of MODEL."
    ),
    ray: str | None = Option(
        None, help="Use a Ray cluster: auto or HOST:PORT; local: the parts of this machine."
    ),
    ray_workers: int | None = Option(
        None, min=1, help="With --ray: workers; default: one per GPU, or per machine without GPUs."
    ),
    raw: Raw = False,
    trace: Trace = None,
    stats: bool = Option(False, "--stats", help="Print what each round waited for."),
) -> None:
    """Answer a file of requests in large batches, as lines of JSON.

    Answers are written as they are done. A request that cannot be answered gives a line with its
    error, and exit status 1 at the end. Repeat the command to continue an interrupted job.
    """
    from qoff.engine import LLM, SamplingParams
    from qoff.jobs.file import Asked, FileJob

    if (prompts is None) == (input_file is None):
        raise ArgumentError("give one file of requests: qoff batch MODEL FILE, or -i FILE")
    if errors is not None and output is None:
        raise ArgumentError("--errors needs a file for the answers, too: -o FILE")
    if sampling.n > 1 and sampling.temperature == 0:
        raise ArgumentError(f"--n {sampling.n}: answers of temperature 0 are all the same; "
                            "give --temperature, too")  # fmt: skip
    if output is None and not resume:
        raise ArgumentError("--overwrite begins a file of answers anew; give it, -o FILE")
    if ray_workers is not None and ray is None:
        raise ArgumentError("--ray-workers needs a Ray cluster, too: --ray auto")
    if ray is not None and (trace is not None or stats):
        raise ArgumentError("--trace and --stats are of one process; leave them out with --ray")
    plan, opening = planned.plan(called, model, how, cache)
    _make_room(sampling.n, plan, opening)
    asked = Asked(
        prompts or input_file or Path(),
        output,
        errors,
        served_model_name or model_name(model),
        SamplingParams(**vars(sampling)),
        plain=not named(called, vars(sampling)),
        raw=raw,
        keep_order=keep_order,
        adapters=opening["adapters"],
    )
    path = how.checkpoint(model)
    _check_ends(path, sampling.stop_token_ids or ())
    wanted = plan or opening.get("_plain")
    with FileJob(asked, path, wanted, overwrite=not resume) as job:
        if job.left == 0:
            typer.echo(job.nothing_left, err=True)
        elif ray is not None:
            opening["plan"] = plan
            with job_progress(job.total, quiet=output is None) as noticed:
                _run_on_ray(job, ray, ray_workers, str(path), opening, noticed)
        else:
            with LLM(path, plan, trace=trace, **opening) as llm:
                _make_room(sampling.n, llm.plan, opening)  # the planner may have chosen less
                with job_progress(job.total, quiet=output is None) as noticed:
                    job.run(llm, noticed)
                if stats:
                    _print_stats(llm)
        failed = job.finish()
    if failed:
        raise typer.Exit(1)


def _make_room(n: int, plan: Plan | None, opening: dict[str, Any]) -> None:
    """Have room for n answers of a prompt in a batch, where nobody said how large batches are.

    Raises ArgumentError for a plan whose batches have none.
    """
    from qoff.plan import Plan

    if plan is not None and n > plan.batch_size:
        raise ArgumentError(
            f"--n {n}: the answers of a prompt are in one batch, and the plan's batches have "
            f"{plan.batch_size}; use a plan with a larger batch size (--batch-size)"
        )
    plain = opening.get("_plain") or Plan()
    if plan is None and n > plain.batch_size:
        opening["_plain"] = replace(plain, batch_size=n)


def _check_ends(checkpoint: Path, tokens: Collection[int]) -> None:
    """Raise ArgumentError for tokens that the model does not have, before it is loaded.

    Of transformers' modules only the model itself tells, which refuses each request.
    """
    from qoff.checkpoint.reader import read_config
    from qoff.models.modules.configs import is_native
    from qoff.models.spec import DecoderSpec

    if not tokens or not is_native(config := read_config(checkpoint)):
        return
    known = DecoderSpec.from_config(config).vocab_size
    if max(tokens) >= known:
        raise ArgumentError(
            f"--stop-token-ids {max(tokens)}: the model has tokens 0 to {known - 1}"
        )


def _run_on_ray(
    job: FileJob,
    address: str,
    workers: int | None,
    model: str,
    options: dict[str, Any],
    noticed: Callable[[Counts], None],
) -> None:
    from qoff.jobs.file import adapters_say, fingerprint
    from qoff.ray import ProcessorConfig
    from qoff.ray.job import cluster, run
    from qoff.ray.worker import Opening

    model = str(Path(model).resolve())  # workers run in other folders
    adapters = {name: str(Path(x).resolve()) for name, x in options["adapters"].items()}
    plans = {name: _resolved(options.get(name)) for name in ("plan", "_plain")}
    config = ProcessorConfig(model, concurrency=workers)
    opening = Opening(
        model,
        {**options, **plans, "adapters": adapters},
        fingerprint(Path(model)),
        adapters_say(adapters),
    )
    with cluster(address):
        run(job, config, opening, noticed)


def _resolved(plan: Plan | None) -> Plan | None:
    """The plan with the folders that it names as other folders see them."""
    from qoff.hf.hub import exists

    if plan is None:
        return None
    spill, draft = plan.spill_folder, plan.draft_model
    spill = None if spill is None else spill.resolve()
    draft = str(Path(draft).resolve()) if draft is not None and exists(draft) else draft
    return replace(plan, spill_folder=spill, draft_model=draft)


def _print_stats(llm: LLM) -> None:
    """Print what each round waited for, and the plan's memory, on standard error."""
    header = ("round", "prompt tokens", "new tokens", "ms", "waited for weights", "KV",
              "activations")  # fmt: skip
    rows = []
    for one in llm.rounds:
        times = (one.seconds, one.weights_wait_s, one.kv_wait_s, one.activations_wait_s)
        counts = map(str, (one.number, one.read, one.generated))
        rows.append((*counts, *(f"{time * 1e3:.1f}" for time in times)))
    print_table("rounds", rows, header, stderr=True)
    memory = [
        (f"{tier}: {purpose}", format_size(nbytes))
        for tier, purposes in llm.memory_by_tier().items()
        for purpose, nbytes in purposes.items()
        if nbytes
    ]
    print_table("memory", memory, stderr=True)

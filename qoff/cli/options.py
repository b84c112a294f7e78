"""Groups of options that commands share, each written down once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from qoff.errors import ArgumentError, BudgetError
from qoff.system_memory import left_by_limits, own_memory
from qoff.units import format_size, parse_size

from .command import Checked, named, parsed
from .output import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qoff.eval.perplexity.scoring import Sample
    from qoff.kvcache import KVQuant
    from qoff.plan import Plan
    from qoff.quant import Format, QuantConfig

Model = Annotated[
    str, Argument(help="A qoff checkpoint, another model (directory or file), or a hub id.")
]
Raw = Annotated[bool, Option("--raw", help="Do not apply the chat template.")]
Trace = Annotated[Path | None, Option(help="Write a Chrome trace to this file.")]
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON document instead.")]
ACTIVATION_BITS: int = Option(16, help="16, or on a CPU 8: faster prefill, less accurate.")


@dataclass(frozen=True)
class ModelOptions:
    """How a model is found and opened, with the meaning that `qoff.load` gives these."""

    device: str = Option("auto", help="cpu, or a GPU such as cuda; auto: a GPU if there is one.")
    dtype: str = Option("auto", help="On a GPU: float16 or bfloat16; auto: the model's type.")
    host_memory: str | None = Option(None, help="Limit of host memory, like 32GiB.")
    max_memory: str | None = Option(None, help="Limits of device and host, like 0=12GiB,cpu=32GiB.")
    slots: int = Option(2, min=2, help="Buffers for streamed layers.")
    cache_dir: Path | None = Option(None, help="Folder for converted models; default: QOFF_CACHE.")
    revision: str | None = Option(None, help="Branch, tag or commit of a model on the hub.")
    trust_remote_code: TrustRemoteCode = False

    def checkpoint(self, model: str, quant: QuantConfig | None = None, quiet: bool = False) -> Path:
        """The qoff checkpoint of a model, converted if there is none.

        quant: of the conversion. Raises ArgumentError for a checkpoint, unless it is the default,
        and for a revision of what is not on the hub.
        """
        from qoff.hf.checkpoints import find_checkpoint
        from qoff.hf.device import device_for
        from qoff.quant import QuantConfig

        self._check_revision(model)
        device = device_for(self.device)
        with self.progress("converting", quiet) as progress:
            return find_checkpoint(
                model,
                quant=None if quant == QuantConfig() else quant,
                cache_dir=self.cache_dir,
                revision=self.revision,
                progress=progress,
                device=device,
                trust_remote_code=self.trust_remote_code,
            )

    def check_source(self, model: str) -> None:
        """Raise what `checkpoint` would of what is no model, before anything is made for it."""
        from qoff.hf.checkpoints import check_source

        self._check_revision(model)
        check_source(model, self.revision, self.trust_remote_code)

    def _check_revision(self, model: str) -> None:
        from qoff.hf.hub import exists

        if self.revision is not None and exists(model):
            raise ArgumentError(
                f"--revision is of models on the hub, and {model} is here; leave it out"
            )

    def progress(
        self, what: str, quiet: bool = False
    ) -> AbstractContextManager[Callable[[int, int], None]]:
        """A function (done, total) that shows how far something is."""
        return progress_bar(what, quiet)

    def opening(self) -> dict[str, Any]:
        """The options that `hf.load.open_runtime` takes for a checkpoint."""
        from qoff.budgets import resolve_device

        places = memory_by_place(self.max_memory)
        if resolve_device(self.device).type == "cpu":
            for place in places or {}:
                if place != "cpu":
                    raise ArgumentError(
                        f"--max-memory names {place}, and the model runs on the CPU, whose memory "
                        "is written like cpu=32GiB"
                    )
        found = {**vars(self), "max_memory": places}
        return {name: found[name] for name in found.keys() - {"cache_dir", "revision"}}


_LIBRARIES = 330 << 20  # bytes of Python, torch, transformers and compiled kernels
OF_PLANS = (  # options of commands that a saved plan stands for, beside those of `qoff.Plan` alone
    *("device_memory", "host_memory", "max_memory", "slots", "activation_bits"),
    *("kv", "kv_target_bits", "kv_window", "attention_top"),
)


@dataclass(frozen=True)
class RunOptions(ModelOptions, Checked):
    """The same, and what `qoff bench` has several of."""

    device_memory: str | None = Option(None, help="Limit of device memory, like 8GB.")
    activation_bits: int = ACTIVATION_BITS
    plan: Path | None = Option(None, help="Use a plan that qoff plan --save wrote.")

    def check(self, context: Context) -> None:
        """Raise ArgumentError for options of the command line that a saved plan has, too.

        And BudgetError where a cgroup's limit has no room for the libraries alone: while they are
        imported the process would be killed.
        """
        left = left_by_limits()
        if left is not None and left + own_memory() < _LIBRARIES:
            raise BudgetError(
                f"host memory: the limit of this process's cgroup leaves it "
                f"{format_size(left + own_memory())}, and torch, transformers and the kernels take "
                f"{format_size(_LIBRARIES)} beside the weights; raise the limit"
            )
        for option in named(context, OF_PLANS).values() if self.plan is not None else ():
            raise ArgumentError(f"--plan says what {option} would; leave one of them out")

    def opening(self) -> dict[str, Any]:
        """The options that `hf.load.open_runtime` takes, those of a saved plan among them."""
        found = super().opening()
        if found.pop("plan") is None:
            return found
        saved = self.saved_plan()
        return {
            **found,
            "device_memory": saved.device_memory,
            "host_memory": saved.host_memory,
            "slots": saved.slots,
            "activation_bits": saved.activation_bits,
        }

    def saved_plan(self) -> Plan:
        """The plan of `--plan`. Raises FormatError for a file that is none."""
        from qoff.plan.saved import read_plan

        assert self.plan is not None
        return read_plan(self.plan)


def fraction(text: str | float) -> float:
    """A fraction, or the one that "on" means. Raises ValueError for other text."""
    from qoff.kvcache.quant import SPARSE_TOP

    try:
        return SPARSE_TOP if text == "on" else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no fraction; use one, or on") from None


ATTENTION_TOP: float = Option(
    1.0,
    parser=fraction,
    metavar="FRACTION|on",
    help="Fraction of the packed KV blocks that a token attends to; on: 0.6.",
)


@dataclass(frozen=True)
class CacheOptions:
    """How the KV cache is packed."""

    kv: str = Option(
        "auto",
        help=(
            "Bits of the KV cache: 2, 3, 4 or 8; 8,4 for K and V; 4/0-3:8,4/9:8 with other bits in "
            "some layers; none: not packed; auto: 4 if the model allows it."
        ),
    )
    kv_target_bits: float | None = Option(
        None,
        min=2,
        help=(
            "Average bits per value of the KV cache, scales included, like 3.5; chooses each "
            "layer's bits by their measured cost."
        ),
    )
    attention_top: float = ATTENTION_TOP

    def check(self, how: RunOptions) -> None:
        """Raise what `quant` would of the options alone: before a model is converted for them."""
        if self.kv_target_bits is None or self.kv != "auto":
            self.quant("", how)

    def quant(self, model: str | Path, how: RunOptions, **form: Any) -> KVQuant | str | None:
        """What `qoff.load` takes as `kv`; form: fields of `KVQuant` that are not its defaults.

        "auto" means 4 bits, on any model, where it does not stand alone. A saved plan has its own.
        The model is opened, as `how` says, where its layers' losses have to be measured. Raises
        ArgumentError for options that need a packed cache, or that exclude each other.
        """
        from dataclasses import replace

        from qoff.kvcache.quant import kv_quant

        if how.plan is not None:
            return how.saved_plan().kv
        if self.attention_top != 1:
            form["attention_top"] = self.attention_top
        if self.kv_target_bits is not None:
            return replace(self._for_bits(model, how, self.kv_target_bits), **form)
        if self.kv == "auto" and not form:
            return "auto"
        packed = kv_quant("4" if self.kv == "auto" else self.kv)
        if packed is None and form:
            raise ArgumentError(
                "with --kv none nothing is packed; leave it out, or --attention-top and --kv-window"
            )
        return None if packed is None else replace(packed, **form)

    def _for_bits(self, model: str | Path, how: RunOptions, bits: float) -> KVQuant:
        if self.kv != "auto":
            raise ArgumentError("--kv and --kv-target-bits both choose bits; give one of them")
        from qoff.eval.mixing.kv_bits import kv_for_bits

        with how.progress("measuring what bits of the KV cache cost") as tell:
            path = model if isinstance(model, Path) else how.checkpoint(model)
            return kv_for_bits(path, bits, tell=tell, **how.opening())


@dataclass(frozen=True)
class QuantOptions:
    """Fields of `qoff.QuantConfig`, for weights that are not quantized yet."""

    bits: int = Option(4, help="Bits of the layers' matrices: 2 to 6, or 8.")
    group_size: int = Option(32, help="Columns that share a scale: 32, 64 or 128.")
    solver: str = Option("hqq", help="How floats are quantized: hqq, mse or rtn; gptq calibrates.")


@dataclass(frozen=True)
class ConversionOptions(QuantOptions):
    """The same, where there is time to read a text."""

    solver: str = Option(
        "auto",
        help=(
            "How floats are quantized: gptq (calibrates on a text), hqq, mse or rtn; auto: gptq if "
            "any get fewer than 8 bits and the model has a tokenizer."
        ),
    )

    def quant(self, formats: Mapping[str, Format], targeted: bool, **more: Any) -> QuantConfig:
        """The configuration, "auto" taken for what it is at best.

        formats: of some matrices, by pattern. targeted: those of all are chosen later.
        """
        from qoff.quant import QuantConfig

        bits = {self.bits}
        for pattern, form in formats.items():
            bits = {form.bits} if pattern == "*" else bits | {form.bits}
        best = "gptq" if targeted or min(bits) < 8 else "hqq"
        solver = best if self.solver == "auto" else self.solver
        return QuantConfig(**{**vars(self), "solver": solver}, weights=formats, **more)


@dataclass(frozen=True)
class DrawOptions(Checked):
    """How a token is drawn, with the meaning that `qoff.SamplingParams` gives these."""

    temperature: float = Option(0.0, min=0, help="0 takes the likeliest token.")
    top_k: int = Option(0, min=-1, help="Sample from the k likeliest tokens; 0 or -1: from all.")
    top_p: float = Option(
        1.0,
        min=0,
        max=1,
        help="Sample from the likeliest tokens that have this probability together.",
    )
    seed: int = Option(0, min=0, max=2**63 - 1, help="Seed for sampling.")

    def check(self, context: Context) -> None:
        """Raise ArgumentError for options of sampling where no temperature is given."""
        if not named(context, ["temperature"]):
            for option in named(context, ["top_k", "top_p", "min_p", "seed"]).values():
                raise ArgumentError(
                    f"{option} is for sampling, and without --temperature the likeliest token is "
                    "taken; give --temperature, too"
                )


@dataclass(frozen=True)
class TextOptions:
    """Which text, and how it is cut."""

    text: Path | None = Option(
        None, help="Text file in UTF-8; default: a text that comes with qoff."
    )
    dataset: str | None = Option(None, help="Dataset instead of a text: wikitext2.")
    window: int = Option(1024, min=2, help="Tokens of a window.")
    stride: int | None = Option(
        None, min=1, help="Tokens from one window to the next; default: no overlap."
    )
    definition: str = Option("strided", help="What is scored: strided, llama.cpp or lm_eval.")
    limit: int | None = Option(None, min=1, help="Most windows; with --tasks: most documents.")

    def content(self) -> str:
        """The text. Raises ArgumentError for both a text and a dataset, and for options of cuts."""
        from qoff.eval.perplexity.windows import check_definition
        from qoff.eval.texts import dataset_text, read_text

        if self.text is not None and self.dataset is not None:
            raise ArgumentError("give --text or --dataset, not both")
        check_definition(self.definition)
        return read_text(self.text) if self.dataset is None else dataset_text(self.dataset)

    def sample(self, tokenizer: PreTrainedTokenizerBase, content: str) -> Sample:
        """The tokens and windows of a text. Raises ArgumentError as `cut` does.

        Where the tokenizer puts a token before a text, each window begins with it: some models say
        little without. lm_eval's windows have it before the first only.
        """
        from qoff.eval.perplexity.scoring import Sample
        from qoff.eval.perplexity.windows import cut
        from qoff.eval.texts import encode, first_token

        ids = encode(tokenizer, content)
        windows = cut(
            len(ids),
            self.window,
            stride=self.stride,
            definition=self.definition,
            limit=self.limit,
        )
        if self.definition != "lm_eval":
            return Sample(ids, windows, first=first_token(tokenizer))
        bos = tokenizer.bos_token_id
        return Sample(ids, windows, tokenizer.eos_token_id if bos is None else bos)


@dataclass(frozen=True)
class ReferenceOptions:
    """What a model is compared with."""

    reference: str | None = Option(None, help="Original model to compare with, on each window.")
    reference_memory: str | None = Option(
        None, help="Limit of its weights in memory, like 8GiB; the others are read layer by layer."
    )
    reference_file: Path | None = Option(
        None, help="File with its likeliest tokens; used if it exists, made by --reference."
    )

    def check(self) -> None:
        """Raise ArgumentError for a model that is not there, and a file that no model makes."""
        from qoff.hf.checkpoints import local_source

        file = self.reference_file
        if self.reference is not None:
            local_source(self.reference)
        elif file is not None and not file.exists():
            raise ArgumentError(
                f"--reference-file {file}: there is no such file; --reference MODEL, the original, "
                "makes it"
            )

    @property
    def memory(self) -> int | None:
        """Bytes of --reference-memory. Raises QoffError for text that is no size."""
        return None if self.reference_memory is None else parse_size(self.reference_memory)


@dataclass(frozen=True)
class FormOptions(CacheOptions):
    """How the KV cache is packed, and more of it than other commands have."""

    kv_window: int = Option(64, min=0, help="Newest tokens that stay unpacked.")

    def quant(self, model: str | Path, how: RunOptions, **form: Any) -> KVQuant | str | None:
        """The same, with these."""
        if self.kv_window != 64:
            form["window"] = self.kv_window
        return super().quant(model, how, **form)


def memory_by_place(text: str | None) -> dict[int | str, str] | None:
    """What `--max-memory` says, as Accelerate has it. Raises ArgumentError for other text."""
    found: dict[int | str, str] = {}
    for part in () if text is None else text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        place = int(name) if name.isdecimal() else name
        if not equals or place in found:
            raise ArgumentError(
                f"--max-memory is written like 0=12GiB,cpu=32GiB, each once, not {text!r}"
            )
        parsed("--max-memory", parse_size, size)
        found[place] = size
    return None if text is None else found


def check_place(option: str, file: Path | None) -> None:
    """Raise ArgumentError for a file that is to be written later, where no file can be."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ArgumentError(f"{option} {file}: {file.parent} is no folder; make it first")
    if file is not None and file.is_dir():
        raise ArgumentError(f"{option} {file}: is a folder; name a file")


def model_name(model: str) -> str:
    """A model's name for others: of its folder or file, or link to these, or the hub id."""
    path = Path(model)
    if not path.exists():
        return model
    return (path if path.is_symlink() else path.resolve()).name

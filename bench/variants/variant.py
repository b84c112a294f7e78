"""What Triton compiles for a launch, found without a GPU: launchers are called on meta tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.gpu_limits import WARP
from qoff.kernels.triton.launch.gpu import Gpu

# What the artefacts of a variant are asked to show; tests/kernels/test_compile.py looks.
TENSOR_CORES = "tensor cores"  # mma.sync or wgmma (tcgen05 on sm_100)
FROM_REGISTERS = "from registers"  # wgmma reads weights from registers, and is not waited for
WIDE_CODES = "wide codes"  # 128-bit global loads (or asynchronous copies) of codes
COPIED_AHEAD = "copied ahead"  # loops bring codes and compact scales by asynchronous copies
NO_SHARED_IN_LOOP = "no shared memory in the loop"  # no layout conversion through shared memory

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SCALES = {"u8": torch.uint8, "fp16": torch.float16, "fp32": torch.float32}
_PROCESSORS = 128  # of the GPU that launchers believe to have
_GRID_MAX = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class Variant:
    """One launch of a kernel. `launch` calls its launcher, on meta tensors."""

    op: str
    name: str  # unique within the op
    kernel: str
    launch: Callable[[], object]
    traits: frozenset[str] = frozenset()
    which: int = 0  # of the kernel's launches, where there are several
    compact: bool = False  # scales: kernels load and unpack them otherwise than floats

    @property
    def dtype(self) -> str:
        """The type of activations, which every name has."""
        return next(dtype for dtype in DTYPES if dtype in self.name.split("-"))


class Launch(NamedTuple):
    """What Triton's compiler is given for a launch."""

    kernel: Any  # the function under @triton.jit
    options: Mapping[str, Any]
    signature: Mapping[str, str]  # type of each argument, "constexpr" for a constant
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]  # which arguments are multiples of 16
    programs: int

    @property
    def source(self) -> Any:
        """What Triton compiles."""
        from triton.compiler import ASTSource

        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)

    @property
    def key(self) -> str:
        """The same for launches of the same code."""
        return f"{self.source.hash()} {sorted(map(str, self.options.items()))}"

    def compiled(self, capability: int) -> Any:
        """What Triton makes of it for a compute capability. Raises what its compiler raises."""
        import triton
        from triton.backends.compiler import GPUTarget

        target = GPUTarget("cuda", capability, WARP)
        return triton.compile(self.source, target=target, options=dict(self.options))


_launches: list[Launch] = []


def recorder(capability: int, keep: Callable[[Launch], object]) -> Callable[..., None]:
    """A stand-in for `JITFunction.run`: `keep` gets each launch, and nothing is compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import jit

    backend = CUDABackend(GPUTarget("cuda", capability, WARP))

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        assert not warmup
        assert all(0 < n <= most for n, most in zip(grid, _GRID_MAX, strict=False)), grid
        bind = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        # Refuses unknown options, as at a launch.
        options, *rest = self._pack_args(backend, kwargs, bound, specialization, options)
        signature, constants, attributes = rest
        launched = Launch(self, vars(options), signature, constants, attributes, math.prod(grid))
        keep(launched)

    return run


@contextmanager
def recording(gpu: Gpu, exact: int, keep: Callable[[Launch], object]) -> Iterator[None]:
    """Launches are recorded meanwhile, as on a GPU. exact: the compute capability of the code."""
    from triton.runtime import jit

    of = staticmethod(lambda device: gpu)
    with patch.object(jit.JITFunction, "run", recorder(exact, keep)), patch.object(Gpu, "of", of):
        yield


def stand_in(capability: int) -> None:
    """From now on launches of this process are recorded, as on a GPU of a compute capability."""
    from triton.runtime import jit

    gpu = Gpu(capability, _PROCESSORS)
    jit.JITFunction.run = recorder(capability, _launches.append)
    Gpu.of = staticmethod(lambda device: gpu)  # type: ignore[method-assign, assignment]


def recorded(variant: Variant) -> Launch:
    """What `variant` launches, after `stand_in`. Raises what the launcher raises."""
    _launches.clear()
    variant.launch()
    return [at for at in _launches if at.kernel.fn.__name__ == variant.kernel][variant.which]


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def float_types(capability: int) -> tuple[str, ...]:
    """The types of activations that kernels take, by their names in Triton."""
    return ("fp16",) if capability < 80 else ("fp16", "bf16")

"""Where weights live: fixed memory, slots that layers stream through, reads from disk.

- `arena`: `Arena`, the fixed memory of one tier.
- `workers`: daemon threads with one queue, whose death fails the jobs instead of losing them.
- `direct`: `DirectFile`, exact reads from one file around the page cache.
- `disk`: `DiskReader`, asynchronous reads of large ranges in chunks.
- `link`: `Link`, a slow data path for tests.
- `instrumentation`: `Instrumentation`, what watches a run, and hooks of tests.
- `timeline`, `lane`: what ran when; what travelled over one link.
- `units`: the steps of a forward pass and the weights of each; `Tile`.
- `image`: how weights of a file lie in memory and which reads bring them there.
- `tiles`: ranges of rows of matrices that are larger than a slot.
- `residency`: which weights stay on the device, which stream, and from where.
- `placement`: `plan_residency`. `spread`: which sources are in host memory.
- `transfers`: `Transfers`, the one interface to asynchrony.
- `thread_transfers`, `cuda_transfers`: its implementations.
- `load`: resident weights, and checksums of files that are not read in one piece.
- `slots`: units in slots, read ahead in a cyclic order.
- `rows`: rows of an embedding, from memory or from disk.
- `store`: `WeightStore`, what models use.
"""

from .arena import Arena
from .instrumentation import Instrumentation
from .io.disk import DiskReader, DiskStats, ReadRequest
from .io.link import Link, Links
from .io.thread_transfers import ThreadTransfers
from .io.timeline import Interval, Timeline
from .io.transfers import Transfers, UnitRead
from .plan.placement import place_in_host, plan_residency
from .plan.residency import Residency, residency_of
from .plan.units import HEAD, Tile, TiledMatrix, Unit
from .store import StoreStats, Weights, WeightStore

__all__ = [
    "HEAD",
    "Arena",
    "DiskReader",
    "DiskStats",
    "Instrumentation",
    "Interval",
    "Link",
    "Links",
    "ReadRequest",
    "Residency",
    "StoreStats",
    "ThreadTransfers",
    "Tile",
    "TiledMatrix",
    "Timeline",
    "Transfers",
    "Unit",
    "UnitRead",
    "WeightStore",
    "Weights",
    "place_in_host",
    "plan_residency",
    "residency_of",
]

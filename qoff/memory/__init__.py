"""Where weights live: fixed memory, slots that layers stream through, reads from disk.

- `arena`: `Arena`, the fixed memory of one tier.
- `workers`: daemon threads with one queue, whose death fails the jobs instead of losing them.
- `direct`: `DirectFile`, exact reads from one file around the page cache.
- `disk`: `DiskReader`, asynchronous reads of large ranges in chunks.
- `units`: the steps of a forward pass and the weights of each.
- `image`: how weights of a file lie in memory and which reads bring them there.
- `residency`: which weights stay on the device and which stream; `plan_residency`.
- `transfers`: `Transfers`, the one interface to asynchrony, and `ThreadTransfers`.
- `load`: resident weights, and checksums of files that are not read in one piece.
- `slots`: units in slots, read ahead in a cyclic order.
- `rows`: rows of an embedding, from memory or from disk.
- `store`: `WeightStore`, what models use.
"""

from .arena import Arena
from .disk import DiskReader, DiskStats, ReadRequest
from .residency import Residency, plan_residency, residency_of
from .store import StoreStats, WeightStore
from .transfers import ThreadTransfers, Transfers, UnitRead
from .units import HEAD, Unit

__all__ = [
    "HEAD",
    "Arena",
    "DiskReader",
    "DiskStats",
    "ReadRequest",
    "Residency",
    "StoreStats",
    "ThreadTransfers",
    "Transfers",
    "Unit",
    "UnitRead",
    "WeightStore",
    "plan_residency",
    "residency_of",
]

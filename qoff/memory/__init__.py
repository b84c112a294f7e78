"""Where weights live: fixed memory, slots that layers stream through, reads from disk.

`plan` decides which weights stay on the device and how they lie there; `io` moves bytes between
disk, host and device; `store.WeightStore` is what models take their weights from.
"""

from .io.disk import DiskReader
from .io.thread_transfers import ThreadTransfers
from .io.timeline import Timeline
from .io.transfers import Transfers
from .plan import (
    HEAD,
    Residency,
    Tile,
    TiledMatrix,
    Unit,
    place_in_host,
    plan_residency,
    residency_of,
)
from .store import Weights, WeightStore

__all__ = [
    "HEAD",
    "DiskReader",
    "Residency",
    "ThreadTransfers",
    "Tile",
    "TiledMatrix",
    "Timeline",
    "Transfers",
    "Unit",
    "WeightStore",
    "Weights",
    "place_in_host",
    "plan_residency",
    "residency_of",
]

"""Where weights live: fixed memory, slots that layers stream through, reads from disk.

`plan` decides which weights stay on the device and how they lie there; `io` moves bytes between
disk, host and device; `store.WeightStore` is what models take their weights from.
"""

from .arena import Arena
from .instrumentation import Instrumentation
from .io.disk import DiskReader, DiskStats, ReadRequest
from .io.link import Link, Links
from .io.thread_transfers import ThreadTransfers
from .io.timeline import Interval, Timeline
from .io.transfers import Transfers, UnitRead
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

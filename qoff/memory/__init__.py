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
    ChosenExperts,
    Expert,
    Residency,
    Tile,
    TiledMatrix,
    Unit,
    place_in_host,
    plan_residency,
    residency_of,
)
from .store import EXPERTS, Weights, WeightStore

__all__ = [
    "EXPERTS",
    "HEAD",
    "ChosenExperts",
    "DiskReader",
    "Expert",
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

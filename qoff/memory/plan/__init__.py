"""Which weights stay on the device, which stream, from where, and how they lie in memory.

`plan_residency` chooses a `Residency` for a budget; `resident_images`, `streamed_images` and
`host_images` say how its weights lie in memory and which reads bring them there. Inside, every
module is built on the ones before it: `units`, `reads`, `uneven`, `image`, `tiles`, `parts`,
`experts`, `residency`, `layouts`, `placement`.
"""

from .image import Image, Weight, view
from .layouts import Layouts
from .placement import place_in_host, plan_residency
from .reads import FileRange
from .residency import (
    Residency,
    host_images,
    residency_of,
    resident_images,
    streamed_images,
    tiled_matrices,
)
from .units import (
    EMBEDDING,
    HEAD,
    LM_HEAD,
    PER_LAYER,
    ChosenExperts,
    Expert,
    Tile,
    TiledMatrix,
    Unit,
    is_expert,
    local_names,
    row_tables,
    unit_files,
    unit_label,
    unit_weights,
)

__all__ = [
    "EMBEDDING",
    "HEAD",
    "LM_HEAD",
    "PER_LAYER",
    "ChosenExperts",
    "Expert",
    "FileRange",
    "Image",
    "Layouts",
    "Residency",
    "Tile",
    "TiledMatrix",
    "Unit",
    "Weight",
    "host_images",
    "is_expert",
    "local_names",
    "place_in_host",
    "plan_residency",
    "residency_of",
    "resident_images",
    "row_tables",
    "streamed_images",
    "tiled_matrices",
    "unit_files",
    "unit_label",
    "unit_weights",
    "view",
]

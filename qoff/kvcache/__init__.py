"""What the model remembers of the tokens it has read."""

from .base import KVCache
from .device import DeviceCache
from .mixed import MixedCache
from .packed import PackedCache
from .placement import KVPlacement
from .plain import PlainCache
from .quant import KVQuant
from .slots import SlotCache

__all__ = [
    "DeviceCache",
    "KVCache",
    "KVPlacement",
    "KVQuant",
    "MixedCache",
    "PackedCache",
    "PlainCache",
    "SlotCache",
]

"""What the model remembers of the tokens it has read."""

from .base import CachePass, KVCache
from .device.cache import DeviceCache
from .host.mixed import MixedCache
from .host.packed import PackedCache
from .host.passing import PassingCache
from .host.plain import PlainCache
from .quant import SPARSE_TOP, KVQuant
from .store.placement import KVPlacement

__all__ = [
    "SPARSE_TOP",
    "CachePass",
    "DeviceCache",
    "KVCache",
    "KVPlacement",
    "KVQuant",
    "MixedCache",
    "PackedCache",
    "PassingCache",
    "PlainCache",
]

"""A GPU that computes as late as it may, on the CPU: tests find what nobody waits for.

Memory of the device is memory of the CPU, in tensors that say they are on `cuda:0`. What torch and
Triton (in its interpreter) are asked to do with them is queued on the current stream, and done when
the host waits for it, or for something behind it, and not before; other streams may be told to be
early instead. New memory is filled with 0xFF, NaN in floats. So a missing wait, an event recorded
too early, host memory that is filled again before it was copied, a read by the host within the
capture of a graph or memory that a graph still uses after it was freed are wrong numbers or errors,
each time. Tasks of several streams that use the same bytes in no order fail the test, whatever the
numbers are (`races`). `install` is for a whole process.
"""

from .install import install
from .streams import DEVICE

__all__ = ["DEVICE", "install"]

"""Where the keys of a query begin, in layers with sliding windows or chunks."""

from __future__ import annotations

from qoff.kernels.cpu.jit.compiled import inner


@inner
def first_seen(place, position, window):
    """The oldest key that a query sees, counted like its own `place`; it may be below 0.

    position: that in its sequence. window: `HeadShape.reach`, not 0.
    """
    return place - position % -window if window < 0 else place + 1 - window

"""Numbers of up to four rows in one vector: four equal lanes, a "quad", for each.

The largest of a row's scores, say, is found by combining the lanes of a vector. For four rows that
is hardly more work than for one, and what is done with the results is done once.
"""

from __future__ import annotations

from llvmlite import ir

from .emit import I32, LANES


def shuffled(b, first, second, mask):
    """The lanes of two vectors, one after the other, that a mask names."""
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(mask)), mask))


def quads(b, vectors, combine):
    """Combine the lanes of each of one to four vectors; vector r's in the lanes from 4 r on."""
    first, second, third, fourth = vectors + vectors[-1:] * (4 - len(vectors))

    def halved(x, y, lanes, half):
        return combine(shuffled(b, x, y, lanes), shuffled(b, x, y, [i + half for i in lanes]))

    eights = [*range(8), *range(16, 24)]
    fours = [8 * vector + i for vector in range(4) for i in range(4)]
    found = halved(halved(first, second, eights, 8), halved(third, fourth, eights, 8), fours, 4)
    for step in (2, 1):
        found = combine(found, shuffled(b, found, found, [i ^ step for i in range(LANES)]))
    return found


def of_row(b, found, row):
    """All lanes equal to those of a row."""
    return shuffled(b, found, found, [4 * row] * LANES)

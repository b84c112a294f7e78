"""Ordinary sentences to hide something in: made from a seed, or cut from paragraphs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")

_WHO = (
    "the old ferryman", "a young botanist", "the baker's daughter", "our neighbour",
    "the night watchman", "a travelling musician", "the village teacher", "a retired sailor",
    "the mayor", "my grandmother", "the clockmaker", "a tired postman", "the librarian",
    "an honest merchant", "the gardener", "a group of students", "the carpenter", "a lost tourist",
    "the beekeeper", "an impatient lawyer", "the shepherd", "a famous painter", "the cook",
    "the railway clerk",
)  # fmt: skip
_DID = (
    "mended a torn sail", "planted a row of beans", "wrote a long letter", "painted the front door",
    "counted the empty bottles", "sang a quiet song", "baked a loaf of rye bread",
    "repaired a wooden bridge", "drew a map of the valley", "watched the swallows",
    "bought a second-hand bicycle", "read an old newspaper", "cleaned the windows",
    "told a story about whales", "carried firewood", "looked for a missing glove",
    "collected smooth stones", "waited for the ferry", "polished a brass lamp",
    "argued about the weather", "picked a basket of pears", "tuned the piano",
    "folded the clean sheets", "fed the ducks",
)  # fmt: skip
_WHERE = (
    "behind the railway station", "near the harbour", "in the upper meadow", "under the stone arch",
    "at the edge of the forest", "on the market square", "beside the mill", "along the canal",
    "in a narrow street", "on the roof of the school", "at the foot of the hill",
    "in the town hall", "by the lighthouse", "in the back garden", "across the river",
    "on the third floor", "outside the chapel", "in the workshop", "between two orchards",
    "at the end of the lane",
)  # fmt: skip
_WHEN = (
    "before the first frost", "on a rainy Tuesday", "after lunch", "late in the evening",
    "during the summer holidays", "just before sunrise", "when the bells had stopped",
    "while the kettle was boiling", "in the middle of March", "after the storm",
    "long before breakfast", "on the last day of the fair", "as soon as the fog lifted",
    "towards the end of the week", "in the hottest hour of the day", "when the snow had melted",
)  # fmt: skip
_FORMS = (
    "{Who} {did} {where} {when}.",
    "{When}, {who} {did} {where}.",
    "{Who} {did} {where}, and {other} {then}.",
    "{Where}, {who} {did} while {other} {then}.",
    "Nobody noticed that {who} {did} {when}.",
    "{Who} remembered how {other} {did} {where}.",
    "It is said that {who} {did} {when}, although {other} never believed it.",
    "{When}, {who} {did}; {other} {then} instead.",
)


def made_sentences(rng: random.Random) -> Iterator[str]:
    """Sentences without end, drawn from a grammar; the same ones for the same state of `rng`."""
    while True:
        who, other = rng.sample(_WHO, 2)
        did, then = rng.sample(_DID, 2)
        where, when = rng.choice(_WHERE), rng.choice(_WHEN)
        yield rng.choice(_FORMS).format(
            who=who, Who=_capital(who), other=other, did=did, then=then,
            where=where, Where=_capital(where), when=when, When=_capital(when),
        )  # fmt: skip


def cut_sentences(paragraphs: Sequence[str], rng: random.Random) -> Iterator[str]:
    """The sentences of paragraphs without end, beginning at one of them that is drawn."""
    found = [s for text in paragraphs for s in _SENTENCE_END.split(" ".join(text.split())) if s]
    first = rng.randrange(len(found))
    return islice(cycle(found), first, None)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

"""One target under atheris, guided by coverage: `python -m tests.fuzz.driver TARGET [options of libFuzzer]`.

Half of the changes are libFuzzer's, of bytes; the others move, double, replace and remove whole words, so that inputs
stay near what a user might write and get past the parser.
"""

from __future__ import annotations

import random
import re
import resource
import sys

import atheris

with atheris.instrument_imports(include=["partita"]):
    from tests.fuzz.seeds import words
    from tests.fuzz.targets import RUNNABLE

PIECES = re.compile(rb"\w+|\s+|[^\w\s]")
WORDS = [word.encode("utf-8", "surrogatepass") for word in words()]


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """A changed input of at most so many bytes."""
    draw = random.Random(seed)
    if not data or draw.random() < 0.5:
        return bytes(atheris.Mutate(data, most))
    pieces = PIECES.findall(data)
    for _ in range(draw.randint(1, 4)):
        i, j = sorted((draw.randrange(len(pieces) + 1), draw.randrange(len(pieces) + 1)))
        own = [place for place, piece in enumerate(pieces) if piece[:1].isalnum()] or [i]
        match draw.randrange(8):
            case 0:
                pieces[i : i + 1] = [draw.choice(WORDS)]
            case 1:
                pieces[i:i] = [b" ", draw.choice(WORDS), b" "]
            case 6:
                place = draw.choice(own)
                pieces[place : place + 1] = [draw.choice(WORDS)]
            case 7 if pieces:
                # One of the input's own words for another: what is declared stands where it may not, or again.
                place, other = draw.choice(own), draw.choice(own)
                pieces[place : place + 1] = pieces[other : other + 1]
            case 2:
                pieces[j:j] = pieces[i : i + draw.randint(1, 8)]
            case 3:
                del pieces[i : i + draw.randint(1, 4)]
            case 4:
                pieces[i : i + 1], pieces[j : j + 1] = pieces[j : j + 1], pieces[i : i + 1]
            case _:
                pieces[j:j] = pieces[i:j][:40] * draw.randint(1, 8)
    return b"".join(pieces)[:most]


def main() -> None:
    """Fuzz until libFuzzer's limits or a finding end the process."""
    target = RUNNABLE[sys.argv.pop(1)]
    limit = target.mebibytes << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    atheris.Setup(sys.argv, target.run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

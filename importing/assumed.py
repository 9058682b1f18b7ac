"""What is taken for granted of a module, as people would write it, where nothing but the proof can tell."""

from __future__ import annotations

from attrs import frozen


@frozen
class Assumed:
    """`joined`: axes of one role are one if their sizes are equal. `attended`: each query has a key that its mask lets
    through; where it has none, a module whose masked scores are large finite numbers averages over all keys.
    """

    joined: bool = True
    attended: bool = True


USUAL = Assumed()

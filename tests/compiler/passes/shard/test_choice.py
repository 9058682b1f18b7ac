"""What is decided of a node is decided once for a mesh and for what its layout says of exchanges."""

from __future__ import annotations

import pytest

from partita.compiler.passes.shard.choice import Chooser, chooser
from partita.compiler.pipeline import compile_spec
from tests.files import ROOT, checked


@pytest.mark.soak
def test_what_is_decided_is_known_to_later_compilations(monkeypatch: pytest.MonkeyPatch):
    """But to none whose layout says another exchange."""
    text = (ROOT / "tests" / "planted" / "files" / "attention.par").read_text()
    decided: list[object] = []
    decide = Chooser._decide

    def counted(self: Chooser, *given: object) -> object:
        decided.append(given)
        return decide(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Chooser, "_decide", counted)
    chooser.cache_clear()
    first = compile_spec(checked(text, "attention.par"))
    count = len(decided)
    assert count > 0
    again = compile_spec(checked(text, "attention.par"))
    assert len(decided) == count
    assert [node.op for node in again.sharded.graph.nodes] == [node.op for node in first.sharded.graph.nodes]
    other = text.replace("shard seq -> context  stage", "shard seq -> context by gather  stage")
    assert other != text
    compile_spec(checked(other, "attention.par"))
    assert len(decided) > count

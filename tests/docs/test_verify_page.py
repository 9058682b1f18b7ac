"""What the page of the command shows of defects is what is printed of them. They are made here: no file has any."""

from __future__ import annotations

import pytest

from partita.compiler.pipeline import compile_spec
from partita.compiler.verify.equivalence import validate
from partita.dsl.load import load_text
from partita.runtime.verification.execution import verify_execution
from tests.compiler.verify.changes import places
from tests.docs.pages import ROOT, named_files
from tests.runtime.verification.test_verify import tampered

PAGE = ROOT / "docs" / "commands" / "verify.md"


@pytest.fixture
def spec():
    found, _ = load_text(named_files(PAGE)["net.par"], "net.par")
    assert found is not None
    return found


def shown(text: str) -> None:
    block = f"```text\n{text}\n```\n"
    assert block in PAGE.read_text(encoding="utf-8"), f"{PAGE.name} does not show\n{text}"


def test_a_defect_that_the_certificate_finds(spec):
    """The sum over `tensor` behind the second product is dropped."""
    state = compile_spec(spec)
    nodes = ((place, node) for place in places(state) for node in place.nodes)
    place, node = next((place, node) for place, node in nodes if node.op.name == "all_reduce")
    found = validate(place.changed({node.outputs[0]: node.inputs[0]}, {node: ()}))
    shown(found.problems[0].render())


@pytest.mark.soak
def test_a_defect_that_the_execution_finds(spec, monkeypatch: pytest.MonkeyPatch):
    """One rank's rectifier lets through a millionth more."""
    tampered(monkeypatch, "= torch.relu(", "= (1.0 + 1e-6 * (c.coordinates['tensor'] == 1)) * torch.relu(")
    (found,) = verify_execution(spec).diagnostics
    shown(found.render())

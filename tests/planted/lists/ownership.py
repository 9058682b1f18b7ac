"""What a function may write over: memory that nothing else has, and nobody reads again."""

from tests.planted.planted import Planted

WRITER = "compiler/codegen/writer.py"
TESTS = "tests/compiler/codegen/test_sums.py::test_a_large_product_is_added_into_what_nothing_else_has"

MISTAKES = [
    Planted(
        "what-a-view-is-of-is-written-over",
        WRITER,
        "                    self.names.fixed.update(outputs)\n                    own.difference_update(node.inputs)",
        "                    self.names.fixed.update(outputs)",
        TESTS,
    ),
    Planted(
        "what-is-being-sent-is-written-over",
        WRITER,
        "                self._start(node, communication)\n                own.difference_update(node.inputs)",
        "                self._start(node, communication)",
        TESTS,
    ),
    Planted(
        "what-is-on-its-way-is-waited-for-by-a-product",
        "compiler/codegen/sums.py",
        "if first in places and collective(places[first][1]) is not None:",
        "if False:",
        TESTS,
    ),
]

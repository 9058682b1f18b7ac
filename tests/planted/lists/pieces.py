"""Collectives in pieces, beside the products that read or make them."""

from tests.planted.planted import Planted

FILE = "verify tests/planted/files/pieces.par"
ROWS = f"{FILE} layout=rows_ schedule=apart_"
SUMS = f"{FILE} layout=sums_"
CASES = "tests/compiler/passes/test_cases.py"
TRAINING = "tests/training/test_pieces.py"
CERTIFICATE = "tests/compiler/verify/test_pieces.py"

MISTAKES = [
    Planted(
        "pieces-joined-backward",
        "compiler/passes/pieces.py",
        "pieces = tuple(self._piece(cut, by.output, k) for k in range(cut.pieces))",
        "pieces = tuple(self._piece(cut, by.output, k) for k in reversed(range(cut.pieces)))",
        ROWS,
    ),
    Planted(
        "one-piece-twice",
        "compiler/passes/pieces.py",
        "op = Piece(cut.axis, cut.pieces, k, blocks, contiguous(value.type, cut.axis, blocks))",
        "op = Piece(cut.axis, cut.pieces, max(k, 1), blocks, contiguous(value.type, cut.axis, blocks))",
        FILE,
    ),
    Planted(
        "a-piece-dropped",
        "compiler/passes/pieces.py",
        "pieces = tuple(self._piece(cut, by.output, k) for k in range(cut.pieces))",
        "pieces = tuple(self._piece(cut, by.output, k) for k in range(cut.pieces - 1))",
        SUMS,
    ),
    Planted(
        "gathered-pieces-one-after-another",
        "compiler/passes/pieces.py",
        "blocks = op.parts if axis == shared else 1",
        "blocks = 1",
        FILE,
    ),
    Planted(
        "pieces-of-a-rank-one-after-another",
        "compiler/ops/pieces.py",
        'return f"torch.cat(({joined},), {dim + 1}).flatten({dim}, {dim + 1})"',
        'return f"torch.cat(({joined},), {dim}).flatten({dim}, {dim + 1})"',
        FILE,
    ),
    Planted(
        "parts-of-other-pieces",
        "compiler/ops/pieces.py",
        ".select({dim + 1}, {self.index})",
        ".select({dim + 1}, {self.pieces - 1 - self.index})",
        FILE,
    ),
    Planted(
        "pieces-that-start-alike",
        "compiler/ops/pieces.py",
        ".narrow({dim}, {self.index * size}, {size})",
        ".narrow({dim}, 0, {size})",
        ROWS,
    ),
    Planted(
        "joined-before-it-is-made",
        "compiler/passes/pieces.py",
        "last = inside[cut.products[0]] + 1 if cut.gathers else len(run)",
        "last = inside[cut.node] if cut.gathers else len(run)",
        ROWS,
    ),
    Planted(
        "summed-piece-by-piece",
        "compiler/passes/pieces.py",
        "return len(node.outputs) == 1 and node.output.type.has(axis) and node.op.by_row((axis,))",
        "return len(node.outputs) == 1 and node.output.type.has(axis)",
        f"{CASES}",
    ),
    Planted(
        "read-by-others-too",
        "compiler/passes/pieces.py",
        "if node is None or node not in inside or not alone or",
        "if node is None or node not in inside or",
        CASES,
    ),
    Planted(
        "gathers-that-start-late",
        "compiler/passes/pieces.py",
        "instead[inside[cut.node]] = list(self._started(cut))",
        "instead[place - 1] = list(self._started(cut))",
        CASES,
    ),
    Planted(
        "certified-in-any-order",
        "compiler/verify/pieces.py",
        "have = [(each.whole, each.form, each.index) for each in found]",
        "have = [(each.whole, each.form, k) for k, each in enumerate(found)]",
        CERTIFICATE,
    ),
    Planted(
        "certified-in-blocks-or-not",
        "compiler/verify/pieces.py",
        "form = _Form(op.axis, len(node.inputs), op.blocks)",
        "form = _Form(op.axis, len(node.inputs), found[0].form.blocks)",
        CERTIFICATE,
    ),
    Planted(
        "certified-beside-another-piece",
        "compiler/verify/pieces.py",
        "alike = all((each.form, each.index) == (form, index) for each in found)",
        "alike = True",
        CERTIFICATE,
    ),
    Planted(
        "certified-in-any-phase",
        "compiler/verify/pieces.py",
        "early = self.phases.get(value, 0) <= PHASES.index(node.phase)",
        "early = True",
        CERTIFICATE,
    ),
    Planted(
        "only-the-last-under-way-held",
        "compiler/analysis/in_flight.py",
        "                flying.update(dict.fromkeys(node.outputs, flights[node]))\n",
        "                flying = dict.fromkeys(node.outputs, flights[node])\n",
        f"{TRAINING}::test_all_pieces_under_way_are_held",
    ),
]

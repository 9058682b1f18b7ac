"""What is sent, by whom, to whom: the virtual cluster, processes, shared memory."""

from tests.planted.planted import Planted

COLLECTIVES = "tests/runtime/transports/test_collectives.py"
SHARED = "tests/runtime/transports/test_shared.py"
PROCESSES = "tests/runtime/transports/test_process.py"
TINY, SKIPS, AXES = (
    "verify specs/tiny.par",
    "verify tests/planted/files/skips.par",
    "verify tests/planted/files/axes.par",
)

MISTAKES = [
    Planted(
        "sent-as-it-lies",
        "compiler/codegen/statements.py",
        'suffix = ".contiguous()" if self.sent else ""',
        'suffix = ""',
        SKIPS,
    ),
    Planted(
        "tied-totals-sent-as-they-lie",
        "runtime/executor.py",
        "self.transport.send, total.contiguous())",
        "self.transport.send, total.t() if total.dim() == 2 else total)",
        "verify tests/planted/files/tied.par",
    ),
    Planted(
        "parts-gathered-in-reverse",
        "runtime/transports/collectives.py",
        "whole = torch.cat(tuple(parts), dim)",
        "whole = torch.cat(tuple(reversed(parts)), dim)",
        COLLECTIVES,
    ),
    Planted(
        "sum-without-the-first",
        "runtime/transports/collectives.py",
        "    for part in parts[1:]:\n",
        "    for part in parts[2:]:\n",
        COLLECTIVES,
    ),
    Planted(
        "parts-exchanged-along-the-wrong-axis",
        "runtime/transports/collectives.py",
        "return [_own(torch.cat(arriving, gathered)) for arriving in pieces]",
        "return [_own(torch.cat(arriving, cut)) for arriving in pieces]",
        COLLECTIVES,
    ),
    Planted(
        "pieces-not-aligned",
        "runtime/transports/packing.py",
        "width += each[0].nbytes + -each[0].nbytes % ALIGNMENT",
        "width += each[0].nbytes + each[0].nbytes % ALIGNMENT",
        COLLECTIVES,
    ),
    Planted(
        "parts-unpacked-in-front",
        "runtime/transports/packing.py",
        "parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()",
        "parts.flatten(0, 1).contiguous()",
        COLLECTIVES,
    ),
    Planted(
        "parts-cut-every-nth",
        "runtime/transports/packing.py",
        "    cut: torch.Tensor = tensor.unflatten(dim, (parts, -1))  # type: ignore[no-untyped-call]\n"
        "    return cut.movedim(dim, 0)",
        "    cut: torch.Tensor = tensor.unflatten(dim, (-1, parts))  # type: ignore[no-untyped-call]\n"
        "    return cut.movedim(dim + 1, 0)",
        COLLECTIVES,
    ),
    Planted(
        "padding-left-in-a-sum",
        "runtime/transports/packing.py",
        "torch.nn.functional.pad(self.rows, (0, over))",
        "torch.nn.functional.pad(self.rows, (over, 0))",
        f"{PROCESSES}::test_collectives_on_gloo_and_on_the_virtual_cluster_agree_bit_for_bit",
    ),
    Planted(
        "maxima-of-processes-summed",
        "runtime/transports/groups.py",
        "part = total(flat.view(self.size, -1).unbind(), maximum)",
        "part = total(flat.view(self.size, -1).unbind())",
        f"{PROCESSES}::test_collectives_on_gloo_and_on_the_virtual_cluster_agree_bit_for_bit",
    ),
    Planted(
        "messages-over-each-other",
        "runtime/transports/shared.py",
        "words[place], words[place + 1] = start, size\n        self._next, self._number = stop, number + 1",
        "words[place], words[place + 1] = start, size\n        self._next, self._number = start, number + 1",
        SHARED,
    ),
    Planted(
        "places-of-one-word",
        "runtime/transports/shared.py",
        "return PLACES + 2 * (number % self._messages)",
        "return PLACES + (number % self._messages)",
        SHARED,
    ),
    Planted(
        "last-axis-slowest",
        "compiler/mesh.py",
        "        for name, size in reversed(self.axes):\n            rank, found[name] = divmod(rank, size)",
        "        for name, size in self.axes:\n            rank, found[name] = divmod(rank, size)",
        AXES,
    ),
    Planted(
        "peer-on-the-first-column",
        "compiler/mesh.py",
        "return self.rank({**self.coordinates(rank), self.pipe: pipe_rank})",
        "return self.rank({**dict.fromkeys(self.sizes, 0), self.pipe: pipe_rank})",
        SKIPS,
    ),
    Planted(
        "group-from-the-own-rank-on",
        "compiler/mesh.py",
        "return tuple(self.rank({**own, axis: i}) for i in range(self.sizes[axis]))",
        "return tuple(self.rank({**own, axis: (i + own[axis]) % self.sizes[axis]}) for i in range(self.sizes[axis]))",
        AXES,
    ),
    Planted(
        "sent-under-the-first-microbatch",
        "runtime/instructions.py",
        "slot = stage.record.sends[transfer.message]\n        frame = stage.frames[transfer.microbatch]",
        "slot = stage.record.sends[transfer.message]\n        frame = stage.frames[0]",
        TINY,
    ),
    Planted(
        "released-before-the-last-send",
        "runtime/instructions.py",
        "released = last and slot in stage.record.released",
        "released = slot in stage.record.released",
        SKIPS,
    ),
    Planted(
        "frame-let-go-of-too-early",
        "runtime/instructions.py",
        "final = last_touch[source, transfer.microbatch] == i",
        "final = last",
        TINY,
    ),
    Planted(
        "sums-over-ranks-of-the-first-two",
        "runtime/executor.py",
        "total = parts[:, : rows * own + 1].sum(0)",
        "total = parts[:2, : rows * own + 1].sum(0)",
        AXES,
    ),
    Planted(
        "a-backend-sums-into-the-operand",
        "runtime/transports/groups.py",
        "            if not sent.copied:\n"
        "                flat = flat.clone()  # in place, and others read the tensor\n",
        "",
        "tests/bench/test_collectives.py::test_what_a_backend_sums_in_place_is_a_copy",
    ),
]

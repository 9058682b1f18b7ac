"""Use of trained models: outputs of rows, the choice of ids, what is kept of earlier positions."""

from tests.planted.planted import Planted

INFERENCE = "tests/runtime/inference"
ALONG = f"{INFERENCE}/test_keeping.py::test_an_operation_along_the_sequence"
AHEAD = f"{INFERENCE}/test_keeping.py::test_what_looks_ahead_is_named"
DRAWN = f"{INFERENCE}/test_sampling.py::test_ids_are_drawn_in_proportion"

MISTAKES = [
    Planted(
        "attention-to-both-sides-kept",
        "compiler/ops/attend.py",
        "return self.causal and axis == self.over",
        "return axis == self.over",
        AHEAD,
    ),
    Planted(
        "shift-from-ahead-kept",
        "compiler/ops/shape.py",
        "if axis != self.over or self.by < 1:",
        "if axis != self.over:",
        AHEAD,
    ),
    Planted(
        "part-kept-at-the-beginning",
        "runtime/kernels/decoding.py",
        "state.narrow(dim, start, part.shape[dim])",
        "state.narrow(dim, 0, part.shape[dim])",
        ALONG,
    ),
    Planted(
        "recurrence-forgets-its-state",
        "runtime/kernels/decoding.py",
        "state.copy_(value)",
        "pass",
        ALONG,
    ),
    Planted(
        "recurrence-begins-anew-with-each-part",
        "compiler/ops/decoding.py",
        "if c.position else",
        "if not c.position else",
        ALONG,
    ),
    Planted(
        "shift-keeps-the-first-positions",
        "runtime/kernels/decoding.py",
        "joined.narrow(dim, part.shape[dim], by)",
        "joined.narrow(dim, 0, by)",
        ALONG,
    ),
    Planted(
        "state-of-another-text",
        "runtime/inference/scoring.py",
        "                state.zero_()",
        "                pass",
        f"{INFERENCE}/test_keeping.py::test_a_decoder_of_the_zoo",
    ),
    Planted(
        "one-id-too-few-in-the-nucleus",
        "runtime/inference/choice.py",
        "(reached < self.top_p).sum()) + 1",
        "(reached < self.top_p).sum()) or 1",
        DRAWN,
    ),
    Planted(
        "temperature-multiplies",
        "runtime/inference/choice.py",
        "logits.double() / self.temperature",
        "logits.double() * self.temperature",
        DRAWN,
    ),
    Planted(
        "filled-rows-not-cut",
        "runtime/inference/predicting.py",
        "0, len(numbers))",
        "0, len(filled))",
        "tests/cli/test_predict.py::test_outputs_of_all_rows_are_written",
    ),
]

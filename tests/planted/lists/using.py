"""Use of trained models: outputs of rows, the choice of ids, what is kept of earlier positions."""

from tests.planted.planted import Planted

INFERENCE = "tests/runtime/inference"
ALONG = f"{INFERENCE}/test_keeping.py::test_an_operation_along_the_sequence"
AHEAD = f"{INFERENCE}/test_keeping.py::test_what_looks_ahead_is_named"
DRAWN = f"{INFERENCE}/test_sampling.py::test_ids_are_drawn_in_proportion"

LAYOUTS = f"{INFERENCE}/test_layouts.py"
SAMPLES = f"{INFERENCE}/test_samples.py"

MISTAKES = [
    Planted(
        "what-the-first-position-does-not-see-ahead-none-does",
        "runtime/inference/scoring.py",
        "compared = range(0, half, -(-half // COMPARED))",
        "compared = range(1)",
        f"{INFERENCE}/test_sampling.py::test_a_model_that_sees_what_follows_is_refused",
    ),
    Planted(
        "window-that-sees-ahead-kept",
        "compiler/ops/windows.py",
        "self.padding[i] != (by, 0):",
        "sum(self.padding[i]) != by:",
        AHEAD,
    ),
    Planted(
        "fill-of-a-window-forgotten",
        "compiler/ops/windows.py",
        "GoOn(axis, by, self.outside)",
        "GoOn(axis, by)",
        ALONG,
    ),
    Planted(
        "parts-of-an-axis-are-split",
        "compiler/passes/shard/shard.py",
        "defaults.without(parts) if parts else defaults",
        "defaults",
        f"{LAYOUTS}::test_a_model_writes_in_its_own_layout",
    ),
    Planted(
        "parameters-of-a-part-are-whole",
        "compiler/passes/shard/shard.py",
        "self.defaults if parameter.is_state else self.stored",
        "self.defaults",
        f"{LAYOUTS}::test_states_are_where_they_are_written",
    ),
    Planted(
        "output-stays-a-partial-sum",
        "compiler/passes/shard/shard.py",
        "return self.copies.reduced_layout(known, REPLICATED) if primary.partial else primary",
        "return primary",
        f"{LAYOUTS}::test_one_rank_chooses_from_whole_sums",
    ),
    Planted(
        "two-ranks-choose",
        "runtime/inference/scoring.py",
        "in (None, model.vocab.name)",
        "== model.vocab.name",
        f"{LAYOUTS}::test_one_rank_chooses_from_whole_sums",
    ),
    Planted(
        "logits-of-another-position",
        "runtime/inference/scoring.py",
        "first = first and part.start <= wanted < part.stop",
        "first = first and part.start == 0",
        f"{LAYOUTS}::test_what_takes_the_whole_window_writes_in_its_own_layout",
    ),
    Planted(
        "two-ranks-give-an-output",
        "runtime/outputs.py",
        "if record.layout.state(over) is None",
        "if record.layout.state(over) is not None",
        f"{LAYOUTS}::test_outputs_are_whole_on_the_first_rank",
    ),
    Planted(
        "blocks-handed-over-where-they-are-not",
        "runtime/outputs.py",
        "for of in (block, region)",
        "for of in (block, block)",
        f"{LAYOUTS}::test_outputs_are_whole_on_the_first_rank",
    ),
    Planted(
        "shard-of-another-rank-read",
        "runtime/inference/weights.py",
        "commit.read(name, region, held)",
        "commit.read(name, tuple(slice(0, s.stop - s.start) for s in region), held)",
        "tests/cli/test_sample.py::test_the_text_in_the_layout_of_the_file_is_that_of_one_process",
    ),
    Planted(
        "every-step-draws-alike",
        "runtime/inference/choice.py",
        '"" if self.step is None else f"step {self.step}"',
        '""',
        f"{INFERENCE}/test_sampling.py::test_each_step_of_training_draws_anew",
    ),
    Planted(
        "trained-weights-write-in-place-of-means",
        "runtime/rank.py",
        "held = self.memory if self.plan.evaluation is None else self.read_by(self.plan.evaluation)",
        "held = self.memory",
        f"{SAMPLES}::test_the_mean_of_the_weights_writes_where_it_is_evaluated",
    ),
    Planted(
        "what-sees-ahead-may-write-while-training",
        "runtime/training.py",
        "yield from rank.scorer(plan.samples).check_causal()",
        "pass",
        f"{SAMPLES}::test_a_model_that_sees_what_follows_is_refused_before_the_first_step",
    ),
    Planted(
        "attention-to-both-sides-kept",
        "compiler/ops/attention.py",
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
        "if c.position else {first.text})",
        "if not c.position else {first.text})",
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
        "                    tensor.zero_()",
        "                    pass",
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
    Planted(
        "a-window-that-is-full-is-left",
        "runtime/inference/scoring.py",
        "len(text) - window - 1, max(1, window // 2)",
        "len(text) - window, max(1, window // 2)",
        f"{INFERENCE}/test_sampling.py::test_a_text_that_grows_beyond_the_window_is_seen_from_half_a_window_later_on",
    ),
    Planted(
        "what-is-kept-of-another-text",
        "runtime/inference/scoring.py",
        "if seen >= len(ids) or self._seen != list(ids[:seen]):",
        "if seen >= len(ids):",
        ALONG,
    ),
    Planted(
        "a-key-suggested-that-the-file-has-not",
        "dsl/misplaced_settings.py",
        "keys, _ = likely_keys(declared, key)",
        "keys = [key]",
        "tests/cli/test_misspelled.py::test_a_setting_with_dashes_is_said_as_a_key_that_the_file_has",
    ),
    Planted(
        "two-letters-swapped-taken-for-another-word",
        "dsl/report.py",
        "if sorted(each) == sorted(word))",
        "if not each)",
        "tests/cli/test_misspelled.py::test_every_option_of_every_command",
    ),
    Planted(
        "a-string-taken-for-names-of-outputs",
        "runtime/outputs.py",
        "if isinstance(names, str) or not isinstance(names, Iterable):",
        "if not isinstance(names, Iterable):",
        "tests/api/test_arguments.py::test_every_argument_of_every_function",
    ),
    Planted(
        "a-shape-told-as-it-is-filled-up",
        "runtime/inference/predicting.py",
        'check_shape("input", each.name, given[each.name], each.type.shape, in_rows.get(each.name))',
        "pass",
        "tests/api/test_arguments.py::test_what_is_said_of_a_shape_is_of_what_was_given",
    ),
]

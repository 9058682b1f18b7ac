"""Updates that do not wait for the norm: what is copied and put back, when they are made, and what is told of them."""

from tests.planted.planted import Planted

VERIFY = "verify tests/planted/files/validation.par"
TESTS = "tests/training/test_validation.py"
PUT_BACK = f"{TESTS}::test_all_that_an_optimizer_keeps_is_put_back"
BAD = f"{TESTS}::test_bad_steps_are_left_out_alike"

MISTAKES = [
    Planted(
        "buffers-not-copied",
        "compiler/codegen/plan.py",
        "names = (*(each.name for each in update.parameters), *(each.name for each in update.buffers))",
        "names = tuple(each.name for each in update.parameters)",
        VERIFY,
    ),
    Planted(
        "copies-of-parts-under-their-own-names",
        "compiler/codegen/whole_parameters.py",
        "copied=tuple(map(whole, rank.copied)),",
        "",
        VERIFY,
    ),
    Planted(
        "states-not-put-back",
        "runtime/validation.py",
        "self._written += [tensor for (_, name), tensor in memory.states.items() if name in record.copied]",
        "",
        VERIFY,
    ),
    Planted(
        "parameters-not-put-back",
        "runtime/validation.py",
        "self._written = [memory.masters[name] for name in record.copied]",
        "self._written = list[torch.Tensor]()",
        VERIFY,
    ),
    Planted(
        "copied-after-the-update",
        "runtime/validation.py",
        "        self.copies.make()\n        yield from self.executor.update(self.executor.one)\n",
        "        yield from self.executor.update(self.executor.one)\n        self.copies.make()\n",
        VERIFY,
    ),
    Planted(
        "clipped-by-the-norm-of-the-step-before",
        "runtime/validation.py",
        "self.executor.update(self.executor.one)",
        "self.executor.update(self.executor.factor)",
        BAD,
    ),
    Planted(
        "never-taken-back",
        "runtime/training.py",
        "if not validation.holds(unvalidated.number):",
        "if False:",
        PUT_BACK,
    ),
    Planted(
        "clipping-is-no-reason",
        "runtime/validation.py",
        "return not self.judge.fault(number, self.executor.named_statistics()) and self._unclipped()",
        "return not self.judge.fault(number, self.executor.named_statistics())",
        PUT_BACK,
    ),
    Planted(
        "a-bad-step-is-no-reason",
        "runtime/validation.py",
        "return not self.judge.fault(number, self.executor.named_statistics()) and self._unclipped()",
        "return self._unclipped()",
        BAD,
    ),
    Planted(
        "taken-back-and-left-out",
        "runtime/training.py",
        "number, unvalidated = unvalidated.number, None",
        "unvalidated = None",
        PUT_BACK,
    ),
    Planted(
        "told-before-it-is-validated",
        "runtime/training.py",
        "                validation.take_back(unvalidated.number)\n",
        "                _tell(rank, _result(rank, number, rates, 1.0), observer)\n"
        "                validation.take_back(unvalidated.number)\n",
        PUT_BACK,
    ),
    Planted(
        "an-evaluation-that-is-forgotten",
        "runtime/training.py",
        "read = saving or copying or _due(settings, number) or",
        "read = saving or copying or",
        PUT_BACK,
    ),
    Planted(
        "a-save-that-is-forgotten",
        "runtime/training.py",
        "read = saving or copying or _due(settings, number) or",
        "read = copying or _due(settings, number) or",
        f"{TESTS}::test_an_interrupted_run_goes_on_with_the_same_bits",
    ),
    Planted(
        "an-end-that-was-asked-for-waits-for-nothing",
        "runtime/training.py",
        "number == settings.steps or rank.training.ends",
        "number == settings.steps",
        f"{TESTS}::test_what_is_saved_when_asked_to_end_is_validated",
    ),
    Planted(
        "copies-not-in-the-bound",
        "compiler/analysis/memory.py",
        "states + copied[1],",
        "states,",
        f"{TESTS}::test_copies_are_in_the_memory_bound",
    ),
    Planted(
        "a-period-from-the-start-of-the-first-rank",
        "compiler/analysis/time.py",
        "return last - first + arriving",
        "return last",
        f"{TESTS}::test_a_step_is_predicted_to_be_as_long_as_the_busiest_rank",
    ),
    Planted(
        "totals-exchanged-without-meeting",
        "compiler/analysis/time.py",
        "done[end] = max(done[end], there)",
        "pass",
        f"{TESTS}::test_a_step_is_predicted_to_be_as_long_as_the_busiest_rank",
    ),
    Planted(
        "marks-of-a-discarded-step",
        "runtime/tracing/stopwatch.py",
        "        self._next = self._begun\n",
        "        pass\n",
        "tests/runtime/tracing/test_trace.py::test_a_step_that_begins_again_has_its_marks_once",
    ),
]

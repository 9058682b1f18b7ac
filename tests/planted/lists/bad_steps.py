"""Bad steps: what is one, what is known of those before, and where a run goes back to."""

from tests.planted.planted import Planted

POLICY = "runtime/bad_steps.py"
TESTS = "tests/training/test_bad_steps.py"
MEDIAN = f"{TESTS}::test_a_spike_is_judged_by_the_median_of_the_good_steps_before"
COUNTED = f"{TESTS}::test_what_was_left_out_and_how_often_is_counted_on_whatever_one_goes_back_to"
RESUMES = "tests/runtime/checkpoint/test_copies.py::test_a_run_resumes_from_the_newest_that_is_whole"

MISTAKES = [
    Planted(
        "small-windows-are-never-full",
        POLICY,
        "< min(FEWEST, window):",
        "< FEWEST:",
        MEDIAN,
    ),
    Planted(
        "losses-below-zero-are-spikes",
        POLICY,
        "value - middle > (spike - 1) * abs(middle)",
        "value > spike * middle",
        MEDIAN,
    ),
    Planted(
        "bad-steps-are-among-the-good-ones",
        POLICY,
        "        if not self.bad:\n            self._remember(loss, norm)\n            return True",
        "        self._remember(loss, norm)\n        if not self.bad:\n            return True",
        MEDIAN,
    ),
    Planted(
        "norms-of-all-steps-are-kept",
        POLICY,
        "(*self.history.losses, loss)[first:], (*self.history.norms, norm)[first:]",
        "(*self.history.losses, loss)[first:], (*self.history.norms, norm)",
        MEDIAN,
    ),
    Planted(
        "what-the-checkpoint-had-left-out-is-forgotten",
        POLICY,
        "saved.skipped + step - to, self",
        "step - to, self",
        COUNTED,
    ),
    Planted(
        "going-back-is-counted-by-the-checkpoint",
        POLICY,
        "step - to, self.history.rewinds + 1",
        "step - to, saved.rewinds + 1",
        COUNTED,
    ),
    Planted(
        "means-begin-at-zero-again",
        "runtime/rank.py",
        "self._begin(name, record.stored(state), tensor) if state.copy else tensor.zero_()",
        "tensor.zero_()",
        f"{TESTS}::test_the_beginning_is_as_it_was",
    ),
    Planted(
        "a-commit-is-resumed-without-its-history",
        "runtime/checkpoint/checkpoints.py",
        "        self.rank.judge.history = saved.history\n        return self._resumed(saved, passed_over",
        "        return self._resumed(saved, passed_over",
        RESUMES,
    ),
]

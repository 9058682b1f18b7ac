"""What people watch runs with: trackers, pages, the names of a file in an editor."""

from tests.planted.planted import Planted

PAGE = "tests/cli/page"
TRACKING = "tests/runtime/tracking/test_tracking.py"
NAMES = "tests/dsl/test_occurrences.py"

MISTAKES = [
    Planted(
        "quotes-of-attributes-not-escaped",
        "cli/page/markup.py",
        "quote=True",
        "quote=False",
        f"{PAGE}/test_page.py::test_text_stays_text",
    ),
    Planted(
        "any-host-is-this-one",
        "cli/page/server.py",
        "if len(given) != 1 or given[0] not in hosts:",
        "if len(given) != 1:",
        f"{PAGE}/test_server.py::test_who_is_not_meant_is_refused",
    ),
    Planted(
        "requests-of-other-pages-answered",
        "cli/page/server.py",
        'if set(origins) - {f"http://{given[0]}"} or',
        "if",
        f"{PAGE}/test_server.py::test_who_is_not_meant_is_refused",
    ),
    Planted(
        "replaced-metrics-added-to-the-old",
        "cli/page/run.py",
        "                self.history = History()\n",
        "                pass\n",
        f"{PAGE}/test_page.py::test_a_run_is_read_on_as_it_grows",
    ),
    Planted(
        "groups-of-values-without-their-range",
        "cli/page/chart.py",
        "mean, min(values), max(values)",
        "mean, mean, mean",
        f"{PAGE}/test_page.py::test_many_values_are_groups_that_lose_no_extreme",
    ),
    Planted(
        "the-best-evaluation-is-forgotten",
        "cli/page/sections.py",
        "last if best is None or best in last else (*last, best)",
        "last",
        f"{PAGE}/test_sections.py::test_the_last_five_evaluations_and_the_best_are_there_and_all_are_folded",
    ),
    Planted(
        "timelines-on-one-scale",
        "cli/page/sections.py",
        "        ends = [max(ends)] * 2\n",
        "        pass\n",
        f"{PAGE}/test_sections.py::test_timelines_that_differ_much_have_scales_of_their_own",
    ),
    Planted(
        "tensors-measured-by-processes",
        "cli/page/sections.py",
        "(columns if gpu else [own])",
        "columns",
        f"{PAGE}/test_sections.py::test_bounds_of_tensors_have_a_scale_beside_peaks_of_processes",
    ),
    Planted(
        "resumed-runs-have-failed",
        "cli/page/head.py",
        "fault.time >= (run.history.last or -inf)",
        "fault.time > 0",
        f"{PAGE}/test_sections.py::test_a_pill_says_how_the_run_stands",
    ),
    Planted(
        "steps-handed-over-again",
        "runtime/tracking/__main__.py",
        "if step <= (self.evaluated if late else self.after)",
        "if step < (self.evaluated if late else self.after)",
        f"{TRACKING}::test_each_record_is_handed_over_once_whatever_the_file_does",
    ),
    Planted(
        "evaluations-counted-as-steps",
        "runtime/tracking/__main__.py",
        'late = record["step"], "eval_loss" in record',
        'late = record["step"], False',
        f"{TRACKING}::test_each_record_is_handed_over_once_whatever_the_file_does",
    ),
    Planted(
        "half-lines-are-read",
        "runtime/metrics.py",
        'data[: data.rfind(b"\\n") + 1]',
        "data",
        f"{TRACKING}::test_the_reader_of_metrics_gives_whole_lines_only",
    ),
    Planted(
        "rebound-names-are-other-names",
        "dsl/occurrences.py",
        "first, kind = scope.setdefault(name.text, (name, kind))",
        "first, kind = scope[name.text] = (name, kind)",
        f"{NAMES}::test_a_name_and_all_its_places",
    ),
    Planted(
        "axes-of-the-first-mesh",
        "dsl/occurrences.py",
        "if isinstance(each, tree.Mesh) and each.name == layout.mesh",
        "if isinstance(each, tree.Mesh)",
        f"{NAMES}::test_a_name_and_all_its_places",
    ),
    Planted(
        "failures-go-with-the-number",
        "runtime/supervision/fleet.py",
        "            self._failures.clear()  # the others get new numbers\n",
        "",
        "tests/runtime/supervision/test_fleet.py"
        "::test_the_failures_of_a_rank_are_not_those_of_the_one_that_gets_its_number",
    ),
    Planted(
        "who-lost-a-peer-is-to-blame",
        "runtime/supervision/launcher.py",
        "for rank, status in found.items() if status not in SECONDARY]",
        "for rank, status in found.items()]",
        "tests/runtime/supervision/test_fleet.py::test_a_rank_that_only_lost_another_is_not_to_blame",
    ),
    Planted(
        "ctrl-c-in-python-does-not-save",
        "runtime/trained.py",
        "Termination(settings is not None, numbers",
        "Termination(False, numbers",
        "tests/runtime/checkpoint/test_from_python.py"
        "::test_the_first_ctrl_c_saves_the_step_in_progress_and_the_second_does_not_wait",
    ),
    Planted(
        "a-picture-asks-the-schedule-about-ranks-of-the-mesh",
        "cli/pictures/picture.py",
        "interval.rank if self.mesh is None else self.mesh.pipe_rank(interval.rank)",
        "interval.rank",
        "tests/runtime/tracing/test_trace.py::test_a_measured_run_is_drawn_with_a_row_for_each_rank_of_any_mesh",
    ),
    Planted(
        "processes-take-no-memory",
        "cli/training/room.py",
        "if tensors + processes <= memory:",
        "if tensors <= memory:",
        "tests/runtime/test_limits.py::test_what_does_not_fit_the_memory_is_refused_before_a_rank_starts",
    ),
    Planted(
        "limits-of-groups-around-a-job-forgotten",
        "runtime/supervision/capacity.py",
        "yield from (own, *(each for each in own.parents if each.is_relative_to(root)))",
        "yield own",
        "tests/runtime/supervision/test_capacity.py::test_limits_of_control_groups",
    ),
    Planted(
        "ranks-that-take-turns-called-slow",
        "runtime/pace.py",
        "if counts[place] > number)",
        "if counts[place] > 1000 * number)",
        "tests/runtime/test_pace.py::test_what_differs_little_or_seldom_is_not",
    ),
    Planted(
        "functions-advise-options",
        "api/__init__.py",
        "@called_from_python\ndef train(",
        "def train(",
        "tests/api/test_advice.py::test_python_code_that_is_not_allowed",
    ),
    Planted(
        "deaths-are-told-to-nobody",
        "runtime/supervision/watchdog.py",
        "        self.views.tell(text)\n",
        "",
        "tests/runtime/supervision/test_watchdog.py::test_all_machines_are_told_of_a_death",
    ),
    Planted(
        "marks-of-the-host",
        "runtime/tracing/flight.py",
        "            self._pending.append(self._behind())",
        "            self._write()",
        "tests/runtime/supervision/test_watchdog.py::test_marks_are_those_that_a_device_has_come_to",
    ),
    Planted(
        "connections-that-hold-a-rank",
        "runtime/transports/failures.py",
        "        os._exit(status)\n",
        "        pass\n",
        "tests/runtime/transports/test_process.py::test_a_rank_that_cannot_close_its_connections_ends",
    ),
    Planted(
        "a-rehearsal-that-counts",
        "runtime/rehearsal.py",
        "    training.discard()\n",
        "    yield from training.update(training.one)\n",
        "tests/runtime/test_rehearsal.py::test_runs_compute_the_same_after_a_rehearsal",
    ),
]

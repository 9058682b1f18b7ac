"""Checkpoints: what is saved, by whom, what is read, and where a run goes on."""

from tests.planted.planted import Planted

RESUME = "tests/runtime/checkpoint/test_resume.py"
BITS = f"{RESUME}::test_a_resumed_run_is_the_undisturbed_one_bit_for_bit"
RESHARD = "tests/runtime/checkpoint/test_reshard.py"
ADDRESSES = "tests/runtime/checkpoint/test_addresses.py"
IMPORTING = "tests/runtime/checkpoint/test_importing.py"
IDENTITY = "tests/runtime/checkpoint/test_identity.py"
MODEL = f"{IDENTITY}::test_whatever_a_model_computes_with_makes_it_another_one"
REGIONS = f"{RESHARD}::test_any_region_of_any_tensor_can_be_read"

MISTAKES = [
    Planted(
        "another-dtype-is-another-model",
        "runtime/checkpoint/identity.py",
        "each.type.with_dtype(accumulation(each.type.dtype)) for each",
        "each.type for each",
        "tests/training/test_lora.py::test_a_base_is_rounded_to_the_dtype_that_reads_it_and_widened_again",
    ),
    Planted(
        "a-tensor-of-several-is-exported-as-its-first",
        "runtime/checkpoint/foreign.py",
        "own = max((part.type.dtype for part in tensor.parts), key=BYTES.__getitem__)",
        "own = tensor.parts[0].type.dtype",
        "tests/runtime/checkpoint/test_foreign.py::"
        "test_what_is_frozen_is_rounded_and_a_tensor_of_several_is_as_wide_as_the_widest",
    ),
    Planted(
        "imported-beside-the-checkpoints-of-a-run",
        "runtime/checkpoint/exchange.py",
        "for place in (path, path / DIRECTORY):",
        "for place in (path,):",
        "tests/runtime/checkpoint/test_importing.py::test_nothing_is_imported_beside_checkpoints",
    ),
    Planted(
        "step-of-a-checkpoint-run-again",
        "runtime/training.py",
        "number = resumed.step + 1 if resumed is not None else 1",
        "number = resumed.step if resumed is not None else 1",
        BITS,
    ),
    Planted(
        "data-from-the-first-step-on",
        "runtime/training.py",
        "batch = rank.tensors(dataset.batch(number)) if dataset else {}",
        "batch = rank.tensors(dataset.batch(number - (resumed.step if resumed else 0))) if dataset else {}",
        BITS,
    ),
    Planted(
        "rate-from-the-first-step-on",
        "runtime/training.py",
        "rates = learning_rates(settings.optimizer, number)",
        "rates = learning_rates(settings.optimizer, number - (resumed.step if resumed else 0))",
        BITS,
    ),
    Planted(
        "states-not-read",
        "runtime/checkpoint/checkpoints.py",
        "    for kept, tensor in rank.kept():\n",
        "    for kept, tensor in rank.kept():\n"
        "        tensor = tensor if kept.state is None else torch.empty_like(tensor)\n",
        BITS,
    ),
    Planted(
        "parts-of-the-first-rank-read",
        "runtime/checkpoint/checkpoints.py",
        "in pieces_of(kept.type, kept.layout, mesh.sizes, mesh.coordinates(rank.rank)):",
        "in pieces_of(kept.type, kept.layout, mesh.sizes, mesh.coordinates(0)):",
        BITS,
    ),
    Planted(
        "one-state-for-all",
        "runtime/checkpoint/checkpoints.py",
        "            yield kept.name, piece.region, seen(",
        "            first = rank.plan.program.parameter(kept.parameter).states[:1]\n"
        '            name = kept.name if kept.state is None else f"{first[0].name}/{kept.parameter}"\n'
        "            yield name, piece.region, seen(",
        BITS,
    ),
    Planted(
        "oldest-commit-first",
        "runtime/checkpoint/checkpoints.py",
        "else candidates.pop() if candidates",
        "else candidates.pop(0) if candidates",
        BITS,
    ),
    Planted(
        "last-step-not-saved",
        "runtime/checkpoint/checkpoints.py",
        "return step % self.settings.interval == 0 or step == self.rank.plan.train.steps",
        "return step % self.settings.interval == 0",
        f"{RESUME}::test_the_last_step_is_saved_and_the_newest_are_kept",
    ),
    Planted(
        "saved-while-it-is-written",
        "runtime/checkpoint/shards.py",
        "        if self._copy is None:\n            size =",
        "        if True:\n            size =",
        "tests/runtime/checkpoint/test_saving.py::test_a_rank_holds_one_copy_of_what_it_saves",
    ),
    Planted(
        "parts-found-from-the-outside",
        "runtime/checkpoint/parts.py",
        "for over in reversed(tensor.layout.over(axis.name)):",
        "for over in tensor.layout.over(axis.name):",
        f"{RESHARD}::test_an_axis_over_two_mesh_axes",
    ),
    Planted(
        "last-part-left-out",
        "runtime/checkpoint/parts.py",
        "grid.append(range(part.start // size, -(-part.stop // size)))",
        "grid.append(range(part.start // size, max(part.start // size + 1, part.stop // size)))",
        REGIONS,
    ),
    Planted(
        "part-put-at-the-start",
        "runtime/checkpoint/parts.py",
        "outer.append(slice(start - part.start, stop - part.start))",
        "outer.append(slice(0, stop - start))",
        REGIONS,
    ),
    Planted(
        "every-copy-saved",
        "runtime/checkpoint/parts.py",
        "return all(coordinates[axis] == index for axis, index in tensor.at)",
        "return True",
        RESHARD,
    ),
    Planted(
        "the-first-copy-saves-all",
        "runtime/checkpoint/parts.py",
        "        loads[least] += kept.type.bytes\n",
        "",
        f"{RESHARD}::test_files_are_of_about_one_size",
    ),
    Planted(
        "one-more-kept",
        "runtime/checkpoint/store.py",
        "[:-keep]",
        "[: -keep - 1]",
        f"{RESUME}::test_the_last_step_is_saved_and_the_newest_are_kept",
    ),
    Planted(
        "hash-of-the-first-block",
        "runtime/checkpoint/checkpoints.py",
        "problems = list(commit.problems(range(rank, len(saved.files), self.rank.plan.ranks)))",
        "problems = list(commit.problems(range(rank, min(1, len(saved.files)), self.rank.plan.ranks)))",
        "tests/runtime/checkpoint/test_damage.py::test_every_rank_falls_back_when_one_finds_damage",
    ),
    Planted(
        "commits-without-their-manifest",
        "runtime/checkpoint/address_store.py",
        "return [step for step in steps_of(names_in(self.place)) if addresses.exists(self._at(step) / NAME)]",
        "return steps_of(names_in(self.place))",
        f"{ADDRESSES}::test_what_has_no_manifest_is_no_commit_and_goes_at_the_next_start",
    ),
    Planted(
        "a-run-that-was-taken-over-commits",
        "runtime/checkpoint/address_store.py",
        "        if found != self._token:",
        "        if not found:",
        f"{ADDRESSES}::test_a_run_that_begins_takes_over",
    ),
    Planted(
        "an-upload-that-failed-put-together",
        "runtime/addresses.py",
        "            file.discard()",
        "            file.close(), file.commit()",
        f"{ADDRESSES}::test_an_upload_that_fails_is_not_there",
    ),
    Planted(
        "leftovers-at-an-address-stay",
        "runtime/checkpoint/address_store.py",
        "if not {NAME, DAMAGED} & {*names_in(self._at(step))}:",
        "if not names_in(self._at(step)):",
        f"{ADDRESSES}::test_what_has_no_manifest_is_no_commit_and_goes_at_the_next_start",
    ),
    Planted(
        "a-server-that-is-gone-taken-for-an-empty-one",
        "runtime/checkpoint/address_store.py",
        "        raise unreadable(place, error) from error",
        "        return []",
        f"{ADDRESSES}::test_a_server_that_is_gone_at_the_start_is_said",
    ),
    Planted(
        "rows-of-a-remote-tensor-from-the-first-on",
        "runtime/checkpoint/remote_tensors.py",
        "start = self.start + first.start * row",
        "start = self.start",
        f"{ADDRESSES}::test_a_file_at_an_address_is_read_as_a_file",
    ),
    Planted(
        "what-a-server-sends-too-much-taken",
        "runtime/addresses.py",
        "    if len(data) > stop - start:",
        "    if not data:",
        f"{ADDRESSES}::test_a_model_is_loaded_from_an_address",
    ),
    Planted(
        "orders-that-are-a-guess-not-told",
        "runtime/checkpoint/importing.py",
        'settled = weights is not None or "/" in tensor.parts[0].name',
        "settled = True",
        f"{IMPORTING}::test_what_is_bound_to_what_is_shown_and_layers_once",
    ),
    Planted(
        "layers-proposed-in-the-order-of-letters",
        "runtime/checkpoint/repeated.py",
        "for member in sorted(members))",
        "for member in members)",
        f"{IMPORTING}::test_what_goes_by_other_names_is_found_by_shape_and_likeness",
    ),
    Planted(
        "axes-proposed-in-the-order-of-ours",
        "runtime/checkpoint/proposals.py",
        "for order in permutations(type.names))",
        "for order in [type.names])",
        f"{IMPORTING}::test_axes_that_give_a_shape",
    ),
    Planted(
        "files-that-have-grown-seem-whole",
        "runtime/checkpoint/commits.py",
        "if size != file.size:",
        "if size < file.size:",
        "tests/runtime/checkpoint/test_damage.py::test_ls_shows_what_is_damaged",
    ),
    Planted(
        "manifests-of-a-server-read-however-large",
        "runtime/checkpoint/folders.py",
        "        if size > most:\n",
        "        if False:\n",
        "tests/runtime/checkpoint/test_addresses.py::test_what_ought_to_be_small_is_not_read_where_it_is_not",
    ),
    Planted(
        "set-aside-once",
        "runtime/checkpoint/store.py",
        '            aside = f"{commit_name(step)}.damaged"\n            _remove(aside, handle)\n',
        '            aside = f"{commit_name(step)}.damaged"\n',
        "tests/runtime/checkpoint/test_damage.py::test_a_step_may_be_damaged_again",
    ),
    Planted(
        "a-quota-is-no-lack-of-space",
        "runtime/checkpoint/saving.py",
        "NO_ROOM = (errno.ENOSPC, errno.EDQUOT)",
        "NO_ROOM = (errno.ENOSPC,)",
        "tests/runtime/checkpoint/test_saving.py::test_a_full_disk_and_a_used_up_quota_are_lack_of_space",
    ),
    Planted(
        "copy-of-a-run-has-the-checkpoints-of-the-original",
        "runtime/checkpoint/settings.py",
        "place.resolve().is_relative_to(whole):",
        "not whole.exists():",
        "tests/runtime/test_run_directory.py::test_a_copy_of_a_run_goes_on_from_its_own_checkpoints",
    ),
    # ------------------------------------------------------------ what a commit is bound to
    Planted(
        "means-of-weights-are-no-setting",
        "runtime/checkpoint/identity.py",
        '        "ema": text_of(train.ema),\n',
        "",
        f"{IDENTITY}::test_whatever_a_run_does_otherwise_is_said",
    ),
    Planted(
        "settings-that-are-gone-not-said",
        "runtime/checkpoint/identity.py",
        "names = [*wanted.settings, *(name for name in saved.settings if name not in wanted.settings)]",
        "names = [*wanted.settings]",
        f"{IDENTITY}::test_whatever_a_run_does_otherwise_is_said",
    ),
    Planted(
        "scans-in-either-direction-are-the-same-model",
        "runtime/checkpoint/identity.py",
        "own = [step.axis.name, step.backward, numbers[id(step.body)]]",
        "own = [step.axis.name, numbers[id(step.body)]]",
        MODEL,
    ),
    Planted(
        "numbers-of-values-taken-for-numbers",
        "runtime/checkpoint/identity.py",
        'return ["literal", value.value]',
        "return value.value",
        MODEL,
    ),
    Planted(
        "blocks-are-the-same-whatever-they-return",
        "runtime/checkpoint/identity.py",
        "steps, _plain(body.results), *updates])",
        "steps, *updates])",
        MODEL,
    ),
    Planted(
        "operands-in-any-order",
        "runtime/checkpoint/identity.py",
        'return ["apply", step.function, _plain(step.operands), ',
        'return ["apply", step.function, sorted(map(str, step.operands)), ',
        MODEL,
    ),
]

"""`partita profile` on this machine, with real ranks, and what is predicted from its record."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partita.compiler.analysis.time import predict
from partita.compiler.analysis.traffic import update_nodes
from partita.compiler.codegen.sums import accumulated
from partita.compiler.costs.nodes import kernel_of
from partita.compiler.costs.record import read
from partita.compiler.ops.pointwise import Constant
from partita.compiler.pipeline import compile_spec
from partita.dsl.load import load
from partita.runtime.profiling import models
from partita.runtime.profiling.kernels import measure
from partita.runtime.profiling.models import Size, in_context, programs
from tests.files import SPECS


@pytest.mark.soak
def test_the_record_of_one_rank_and_of_two_predicts_the_tiny_file(tmp_path: Path):
    machine = tmp_path / "machine.json"
    command = [sys.executable, "-m", "partita", "profile", "--quick", "--ranks", "1,2", "-o", str(machine)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = read(machine.read_text())
    assert (one.ranks, two.ranks) == (1, 2)
    assert two.link["post"] > 0
    assert two.device["step"] >= 0
    shutil.copy(SPECS / "tiny.par", tmp_path)
    overrides = ['laptop.device=profile("machine.json")', 'laptop.link=profile("machine.json")']
    spec, diagnostics = load(tmp_path / "tiny.par", overrides)
    assert spec is not None, diagnostics
    state = compile_spec(spec)
    known = {(kernel, dtype) for kernel, dtype, *_ in json.loads(machine.read_text())["records"][1]["timings"]}
    for stage in state.partitioned.stages:
        for node in stage.nodes:
            kernel = kernel_of(node)
            if kernel is not None and not isinstance(node.op, Constant):
                assert {(kernel[0].name, kernel[1]), (f"{kernel[0].name}.added", kernel[1])} & known, node
    # A step on two cores is neither free nor a minute, whatever else this machine does.
    assert 1e-3 < predict(state).step_time < 60


def test_every_operation_of_a_program_is_timed_where_it_stands():
    """Those that go straight into an accumulator as such, and what one rank does once a step, too."""
    state = next(programs(gpu=False, precisions=("f32",), quick=True))
    found = measure(state, torch.device("cpu"))
    assert all(0 < seconds < 60 for seconds in found.values())
    groups = [stage.nodes for stage in state.partitioned.stages]
    groups += [[*state.update.clip, *update_nodes(state, state.program.ranks[0])], state.update.statistic_nodes([0])]
    expected = set()
    for nodes in groups:
        adding = accumulated(nodes, ())
        rest = [node for node in nodes if node not in set(adding.values()) and not isinstance(node.op, Constant)]
        expected |= {kernel_of(node, node in adding) for node in rest}
    assert found.keys() == expected - {None}


def test_attention_in_pieces_is_timed_on_ranks_that_take_turns(monkeypatch: pytest.MonkeyPatch):
    """And it is like attention that is not, where that alone was measured."""
    monkeypatch.setattr(models, "ON_A_CPU", (Size(1, 8, 16, 8, 64),))
    for state, whole in zip(in_context(gpu=False, precisions=("f32",)), ("attend", "attend_block"), strict=True):
        names = {kernel.name: kernel for kernel, _ in measure(state, torch.device("cpu"))}
        for name in (f"{whole}.causal.pieces", f"{whole.replace('attend', 'attend_gradient', 1)}.causal.pieces"):
            name = name.replace("attend_gradient_block", "attend_block_gradient")
            kernel, alike = names[name], []
            while kernel is not None:
                alike.append(kernel.name)
                kernel = kernel.alike
            assert name.replace("_block", "").removesuffix(".pieces") in alike


@pytest.mark.soak
def test_no_ranks_are_refused():
    command = [sys.executable, "-m", "partita", "profile", "--ranks", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "from 1 to 256" in done.stderr


@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_nccl_without_gpus_is_refused_before_a_rank_starts():
    command = [sys.executable, "-m", "partita", "profile", "--transport", "nccl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "GPUs (NCCL needs one per rank): 0" in done.stderr

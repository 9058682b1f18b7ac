"""Whatever the model and the number of devices: what is planned compiles, is verified, meets its own claims, and is no
slower than the file as it is.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from partita.compiler.analysis.memory import peak_memory
from partita.compiler.analysis.time import predict
from partita.compiler.costs.devices import device_of
from partita.compiler.pipeline import compile_run
from partita.compiler.planner.search import Search
from partita.compiler.planner.space import space_of
from partita.compiler.planner.writing import written_plan
from partita.compiler.report.claims import failures, outcomes
from partita.compiler.report.summary import summarize
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.verification.verify import verify
from tests.programs import axes, endings, models, recomputations, sizes_for

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, int, int]:
    """A random model with a mesh, a layout and a schedule of its own, good or bad; so many devices, often those of its
    mesh; and how many plans to ask for.
    """
    mesh = {name: draw(st.sampled_from((1, 1, 2))) for name in ("data", "pipe", "tensor", "context")}
    devices = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12, 16, *(prod(mesh.values()),) * 8)))
    model = draw(models(draw(st.integers(1, 4))))
    split = draw(st.sampled_from((2, 4)) if mesh["context"] > 1 else st.sampled_from((1, 2, 4)))
    sizes = sizes_for({"heads": split, "ffn": split, "vocab": split, "seq": split}, 1)
    sizes["batch"] = draw(st.sampled_from((4, 6, 8, 12, 24)))
    # Where a file says no links, plans have those of usual machines.
    links = ", ".join(f"{name} -> ib400" for name in mesh)
    device = draw(
        st.sampled_from(
            (
                "",
                f"device = h100 link = [{links}]",
                "device = device(flops = 1TFLOP/s, memory = 24KiB, bandwidth = 1GB/s)",
            )
        )
    )
    shown = ", ".join(f"{name} = {size}" for name, size in mesh.items())
    text = axes(sizes) + model + f"mesh cluster({shown}) {{ {device} }}\n"
    rules = draw(
        st.lists(
            st.sampled_from(
                (
                    "shard batch -> data",
                    "shard heads, ffn -> tensor",
                    "shard state -> data",
                    "stage layer -> pipe",
                    "shard wte: vocab -> tensor",
                    draw(st.sampled_from(("shard seq -> context", "shard seq -> context by zigzag"))),
                    "shard vocab -> pipe",
                    "offload state",
                )
            ),
            unique=True,
        )
    )
    if draw(st.booleans()):  # without these, sizes of the mesh may have no use
        wanted = ("shard batch -> data", "shard heads, ffn -> tensor", "stage layer -> pipe", "shard seq -> context")
        wanted = tuple(each for each in wanted if "context" not in each or not any("seq" in rule for rule in rules))
        rules = list(dict.fromkeys((*wanted, *rules)))
    rules.append(draw(recomputations(model)))
    text += "layout cut on cluster {\n" + "\n".join(rules) + "\n}\n"
    name = draw(st.sampled_from(("one_f_one_b", "gpipe", "zb_h2", "zb_v", "policy", "auto")))
    text += f"schedule s = {name}(microbatches = {draw(st.sampled_from((1, 2)))})\n" + draw(endings())
    return text, devices, draw(st.integers(1, 3))


def as_it_is(path: str, devices: int) -> tuple[float, int] | None:
    """The step and the memory of a file by itself, where it compiles for so many devices."""
    given, _ = load(path)
    if given is None:
        return None
    try:
        state, _ = compile_run(given)
    except Refused:
        return None
    if state.mesh.ranks != devices:
        return None
    return predict(state, exposed=False).step_time, max(peak_memory(state, rank) for rank in state.plan.ranks)


def check(problem: tuple[str, int, int], within: float = 5) -> None:
    """Plan within so many seconds, write the best, and hold the file to what is promised."""
    text, devices, top = problem
    note(text)
    note(f"{devices} devices")
    with TemporaryDirectory() as folder:
        path = os.path.join(folder, "random.par")
        Path(path).write_text(text)
        given, diagnostics = load(path, fitting=False)
        assert given is not None, "\n".join(each.render() for each in diagnostics)
        own = as_it_is(path, devices)
        fits = own is not None and own[1] <= device_of(given.mesh).memory
        try:
            found = Search(space_of(given, devices), top, within).run()
        except Refused as refused:
            event(refused.diagnostics[0].code)
            if refused.diagnostics[0].code not in ("E0901", "E0902"):
                raise
            assert not fits
            return
        event("planned")
        if own is not None:
            assert (found.own.prediction.step_time, found.own.peak) == own
            assert found.own_fits == fits
        if fits:
            event("the file fits")
            assert found.plans[0].prediction.step_time <= own[0]
        elif found.own is not None or found.wrong is not None:
            event("the file is wrong" if found.own is None else "the file does not fit")
            assert not any(plan.given for plan in found.plans)
        assert 1 <= len(found.plans) <= top
        steps = [plan.prediction.step_time for plan in found.plans]
        assert steps == sorted(steps)
        for plan in found.plans:
            state, _ = compile_run(plan.file)
            assert state.mesh.ranks == devices
            assert max(peak_memory(state, rank) for rank in state.plan.ranks) == plan.peak <= found.device.memory
            assert predict(state).step_time == plan.prediction.step_time
        output = os.path.join(folder, "planned.par")
        Path(output).write_text(written_plan(found.plans[0], path, output=output))
        note(Path(output).read_text())
        planned, diagnostics = load(output)
        assert planned is not None, "\n".join(each.render() for each in diagnostics)
        state, _ = compile_run(planned)
        assert predict(state).step_time == pytest.approx(steps[0])
        assert planned.expect
        assert not failures(outcomes(state, summarize(state)))
        verified = verify(planned)
        assert not verified.diagnostics, "\n".join(each.render() for each in verified.diagnostics)


@given(problem=problems())
@settings(max_examples=2, deadline=None, suppress_health_check=SLOW)
def test_plans_hold(problem):
    check(problem)


@pytest.mark.soak
@given(problem=problems())
@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
def test_plans_hold_at_length(problem):
    check(problem, within=1)

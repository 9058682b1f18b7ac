"""What `partita doctor` overlooks, or leaves behind."""

from tests.planted.planted import Planted

FINDINGS = "tests/runtime/doctor/test_findings.py"
COMMAND = "tests/cli/test_doctor.py"

MISTAKES = [
    Planted(
        "wrong-numbers-overlooked",
        "runtime/doctor/selftest.py",
        "    places = (here != right).nonzero().view(-1)\n",
        "    places = (here > right).all().nonzero().view(-1)\n",
        FINDINGS,
    ),
    Planted(
        "sum-expected-of-one-rank-fewer",
        "runtime/doctor/selftest.py",
        "total = plain * ranks + ranks * (ranks - 1) / 2",
        "total = plain * ranks + (ranks - 1) * (ranks - 2) / 2",
        FINDINGS,
    ),
    Planted(
        "training-that-is-not-a-number-passes",
        "runtime/doctor/selftest.py",
        "not abs(own - other) <= GPU_TOLERANCE * abs(other)",
        "abs(own - other) > GPU_TOLERANCE * abs(other)",
        FINDINGS,
    ),
    Planted(
        "children-of-a-part-stay",
        "runtime/doctor/parts.py",
        "os.killpg(process.pid, signal.SIGKILL)",
        "process.kill()",
        FINDINGS,
    ),
    Planted(
        "gloo-takes-a-prefix-of-an-interface",
        "runtime/doctor/findings.py",
        'variable.startswith("NCCL") and each.startswith(name)',
        "each.startswith(name)",
        FINDINGS,
    ),
    Planted(
        "errors-do-not-change-the-status",
        "cli/doctor.py",
        "return deliver(text, arguments.output) or int(not passed)",
        "return deliver(text, arguments.output)",
        COMMAND,
    ),
]

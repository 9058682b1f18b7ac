"""What a run may use of a machine: by control groups of both versions, its own and those around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.runtime.supervision import capacity
from partita.runtime.supervision.capacity import Limit

GIB = 1 << 30
JOB = "slurm/job_7"
OWN_V2, OWN_V1 = f"0::/{JOB}", f"4:memory:/{JOB}\n3:cpu,cpuacct:/{JOB}\n1:name=systemd:/{JOB}"


@pytest.mark.parametrize(
    ("own", "files", "limit", "quota"),
    [
        (OWN_V2, {}, None, None),
        (OWN_V2, {"memory.max": "max", "cpu.max": "max 100000"}, None, None),
        # A container, which sees its own group at the root.
        ("0::/", {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}"}, Limit(4 * GIB, GIB), None),
        (OWN_V2, {"memory.max": f"{4 * GIB}", "cpu.max": "150000 100000"}, Limit(4 * GIB, 0), 1.5),
        # A job, whose step may use all that the job may.
        (OWN_V2, {f"{JOB}/memory.max": "max", "slurm/memory.max": f"{2 * GIB}"}, Limit(2 * GIB, 0), None),
        (OWN_V2, {f"{JOB}/memory.max": f"{GIB}", "slurm/memory.max": f"{2 * GIB}"}, Limit(GIB, 0), None),
        (
            OWN_V1,
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                f"memory/{JOB}/memory.limit_in_bytes": f"{GIB}",
                f"memory/{JOB}/memory.usage_in_bytes": "7",
                f"cpu/{JOB}/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_quota_us": "400000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            Limit(GIB, 7),
            4.0,
        ),
        (OWN_V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, None, None),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    files: dict[str, str],
    limit: Limit | None,
    quota: float | None,
):
    for name, text in {"own": own, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(capacity, "GROUPS", tmp_path)
    monkeypatch.setattr(capacity, "OWN", tmp_path / "own")
    monkeypatch.setattr(capacity, "total", lambda: 64 * GIB)
    monkeypatch.setattr(capacity, "usable", lambda: list(range(16)))
    assert (capacity.limit(), capacity.quota()) == (limit, quota)
    assert capacity.memory() == (64 * GIB if limit is None else limit.bytes)
    assert capacity.cores() == (16 if quota is None else round(quota))

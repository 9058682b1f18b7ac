"""A rank of several machines that waits for ever in a step, as NCCL does, and is watched: FILE RANK MACHINES FOLDER."""

import sys
import time
from pathlib import Path

from partita.dsl.load import load
from partita.runtime.rank import prepare
from partita.runtime.run_directory import RunDirectory
from partita.runtime.supervision.diagnosis import Diagnosis
from partita.runtime.supervision.statuses import PEER_LOST
from partita.runtime.supervision.store import in_file
from partita.runtime.supervision.views import ProgressExchange
from partita.runtime.supervision.watchdog import FOLDER, Watchdog, Watcher
from partita.runtime.supervision.watchdog import prepare as recorder_in
from partita.runtime.tracing.flight import TRAINING

file, (rank, *machines), folder = sys.argv[1], map(int, sys.argv[2] + sys.argv[3]), Path(sys.argv[4])
spec, _ = load(file)
assert spec is not None
run = RunDirectory.open(folder / str(machines[rank]))
recorder = recorder_in(run, rank)
views = ProgressExchange(rank, machines, lambda: in_file(str(folder / "store")))
watchdog = Watchdog(Diagnosis(prepare(spec).program), len(machines), 600.0, run)
Watcher(watchdog, run.path / FOLDER, views, PEER_LOST).start()
recorder.begin(TRAINING, 3)
print("waits", flush=True)
time.sleep(600)

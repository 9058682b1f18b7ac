"""TensorBoard: event files in the run's directory, which `tensorboard --logdir runs` shows.

Written by TensorBoard's own writer, without torch: each number of a record is a scalar summary.
"""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from partita.runtime.metrics import MetricsRecord, numbers
from partita.runtime.tracking.tracker import TrackedRun, Tracker, TrackerKind, register

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Event files of one run. A resumed run has one more, in the same folder."""

    identity = FOLDER

    def __init__(self, run: TrackedRun) -> None:
        folder: Path = run.directory / FOLDER
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link")
        if run.identity is None and folder.is_dir():
            for path in folder.glob("events.out.tfevents.*"):  # of an earlier run in this directory
                path.unlink()
        self._writer = EventFileWriter(str(folder))
        for name, text in run.facts.items() if run.identity is None else ():
            shown = "".join(f"    {line}\n" for line in text.splitlines())  # as Markdown: a block of code
            shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
            tensor = TensorProto(dtype="DT_STRING", string_val=[shown.encode()], tensor_shape=shape)
            value = Summary.Value(tag=name, metadata=create_summary_metadata("", ""), tensor=tensor)
            self._writer.add_event(Event(step=0, summary=Summary(value=[value])))

    def log(self, record: MetricsRecord) -> None:
        """One event, with the time at which the step was done."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers(record).items()]
        self._writer.add_event(
            Event(wall_time=record.get("unix_time", 0.0), step=record["step"], summary=Summary(value=values))
        )

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


register(TrackerKind("tensorboard", TensorBoard))

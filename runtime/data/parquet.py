"""`parquet(glob, column, …)`: Parquet files, each row of a column of which is a document. Reads by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partita.dsl.config.builtins import HOLDOUT, Setting, Text
from partita.dsl.diagnostic import refuse, shown
from partita.dsl.syntax.source import Span
from partita.runtime.data.files import END, PACK, TOKENIZER, listed, matched, with_tokenizer
from partita.runtime.data.packages import package
from partita.runtime.data.registry import Source, opened_by, register

ROWS = 1024  # that are read at once


def texts(path: Path, name: str, column: str, span: Span | None) -> Iterator[str]:
    """Each row of a column of a file. Raises Refused (E0603, E0616, E0617) and OSError."""
    arrow = package("pyarrow", "data", "`parquet`", span)
    tables = package("pyarrow.parquet", "data", "`parquet`", span)
    number = 0
    try:
        with tables.ParquetFile(path) as file:
            text = _kind(file.schema_arrow, column, name, arrow, span)
            for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
                for value in batch.column(0).cast(text).to_pylist():
                    number += 1
                    if value is None:
                        raise refuse("E0616", f"`{shown(column)}` in row {number} of `{name}` is null", span)
                    yield value
    except UnicodeDecodeError as error:
        where = f"`{shown(column)}` in row {number + 1} of `{name}`, or soon after,"
        raise refuse("E0616", f"{where} is not UTF-8: {error.reason}", span) from error
    except arrow.ArrowException as error:
        beyond = f" beyond row {number}" if number else ""
        reason = shown(str(error).split("\n")[0])
        raise refuse("E0603", f"cannot read `{name}`{beyond}: {reason}", span) from error


def _kind(schema: Any, column: str, name: str, arrow: Any, span: Span | None) -> Any:
    """The type of text that a column is read as. Raises Refused (E0616)."""
    kinds = arrow.types
    if column not in schema.names:
        strings = [each.name for each in schema if kinds.is_string(each.type) or kinds.is_large_string(each.type)]
        raise refuse(
            "E0616",
            f"`{name}` has no column `{shown(column)}`",
            span,
            notes=[f"its columns: {listed(schema.names)}"],
            help=f'`column = "{shown(strings[0])}"`' if len(strings) == 1 else "`column` names the one with the text",
        )
    column_type = schema.field(column).type
    inner = column_type.value_type if kinds.is_dictionary(column_type) else column_type
    textual = (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary)
    if not any(fits(inner) for fits in textual):
        raise refuse("E0616", f"`{shown(column)}` of `{name}` holds {shown(str(column_type))}, not text", span)
    return arrow.large_string()


register(
    Source(
        "parquet",
        (Setting("glob", Text()), Setting("column", Text(), "text"), TOKENIZER, END, PACK, HOLDOUT),
        example='parquet("corpus/*.parquet")',
        open=opened_by("documents", "open_records", read=texts, argument="column"),
        textual=True,
        endings=(".parquet",),
        files=with_tokenizer(matched("glob")),
    )
)

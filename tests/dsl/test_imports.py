"""Imports: what they bring, what they may not reach, and files that cannot be read."""

import os

import pytest

from partita.dsl.load import load

LIBRARY = """\
axis batch = 4, embed = 6
block f(x: [batch, embed]) {
  return relu(x)
}
schedule spare = gpipe(microbatches = 2)
train {
  nonsense = 3
}
expect {
  nonsense <= 3
}
"""
MAIN = """\
import "lib/library.par"
axis batch = 8
model m(x: [batch, embed]) {
  loss mean(f(x))
}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "library.par").write_text(LIBRARY)
    (tmp_path / "main.par").write_text(MAIN)
    return tmp_path


def codes(path, **options):
    return [d.code for d in load(path, **options)[1]]


def test_an_import_makes_declarations_visible(folder):
    found, diagnostics = load(folder / "main.par")
    assert diagnostics == ()
    # The importing file's axis wins; the imported train and expect are ignored, and unused names are no matter.
    assert found.axes["batch"].size == 8
    assert found.model.body.types[0].names == ("batch", "embed")
    assert (found.train, found.expect) == (None, ())


def test_axes_of_imports_can_be_overridden(folder):
    assert load(folder / "main.par", ["embed=3"])[0].axes["embed"].size == 3


def test_a_file_imported_twice_is_read_once(folder):
    (folder / "lib" / "other.par").write_text('import "library.par"\nimport "../lib/library.par"\n')
    (folder / "main.par").write_text('import "lib/other.par"\n' + MAIN)
    assert codes(folder / "main.par") == []


def test_an_error_in_an_import_has_its_place(folder):
    (folder / "lib" / "library.par").write_text(LIBRARY.replace("relu", "rellu"))
    (diagnostic,) = load(folder / "main.par")[1]
    assert diagnostic.span.place == f"{folder}/lib/library.par:3:10"


def test_an_import_may_not_leave_the_root(folder):
    (folder / "lib" / "up.par").write_text('import "../top.par"\n')
    (folder / "top.par").write_text("axis a = 1\n")
    assert codes(folder / "lib" / "up.par") == ["E0010"]
    assert codes(folder / "lib" / "up.par", root=folder) == []
    (folder / "main.par").write_text(f'import "{folder}/lib/library.par"\nimport "/etc/passwd"\n')
    assert codes(folder / "main.par") == ["E0010"]


def test_nor_by_a_symbolic_link(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret.par"
    outside.write_text("axis secret = 1\n")
    os.symlink(outside, folder / "link.par")
    (folder / "main.par").write_text('import "link.par"\n')
    assert codes(folder / "main.par") == ["E0010"]


def test_a_chain_of_imports_is_bounded(folder):
    for i in range(150):
        (folder / f"f{i}.par").write_text(f'import "f{i + 1}.par"\n')
    (folder / "f150.par").write_text("axis a = 1\n")
    assert codes(folder / "f0.par") == ["E0013"]
    assert "E0013" not in codes(folder / "f60.par")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"axis a = 1 # \xff\n", "E0002"),
        (b"\xff\xfea\x00", "E0002"),
        (b"axis a = 1\x00", "E0003"),
        (b"#" * (1 << 20) + b"#", "E0004"),
        (b"axis a = 1, " + b"b = 1, " * 20_000, "E0004"),
    ],
    ids=["latin-1", "utf-16", "nul", "bytes", "words"],
)
def test_what_is_no_text_or_too_much(tmp_path, content, code):
    path = tmp_path / "x.par"
    path.write_bytes(content)
    assert codes(path) == [code]


def test_the_first_byte_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "x.par"
    path.write_bytes(b"axis a = 1\r\n# \xc3\xa9\n# \xe9 \xff\n")
    (diagnostic,) = load(path)[1]
    assert diagnostic.message == f"`{path}` is not UTF-8 text: byte 19 on line 3"


def test_files_that_are_none(tmp_path):
    (tmp_path / "near.par").write_text("axis a = 1\n")
    os.mkfifo(tmp_path / "pipe.par")
    found = {name: load(tmp_path / name)[1] for name in ("neer.par", ".", "pipe.par", "a\0b")}
    assert {name: [d.code for d in diagnostics] for name, diagnostics in found.items()} == {
        name: ["E0001"] for name in found
    }
    assert found["neer.par"][0].help == "did you mean `near.par`?"


def test_line_ends_do_not_matter(tmp_path):
    path = tmp_path / "x.par"
    path.write_bytes(b"\xef\xbb\xbfaxis a = 1\r\n\taxis b = c\r\n")
    (diagnostic,) = load(path)[1]
    assert (diagnostic.code, diagnostic.span.line, diagnostic.span.column) == ("E0202", 2, 11)

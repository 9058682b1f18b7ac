"""What a path of a rule refers to: whole parts at the end of a name, whatever iteration it is in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.naming import matches, means
from partita.dsl.names.paths import is_end

# Names that end each other, as text.
NAMES = st.lists(st.sampled_from(["up", "backup", "p", "mlp"]), min_size=1, max_size=4)


@given(name=NAMES, path=NAMES, iteration=st.integers(0, 4))
def test_a_path_is_whole_parts_at_the_end_of_a_name(name: list[str], path: list[str], iteration: int):
    expected = len(path) <= len(name) and all(a == b for a, b in zip(reversed(path), reversed(name), strict=False))
    repeated = ".".join([*name[:iteration], "3", *name[iteration:]])
    assert is_end(path, ".".join(name)) is matches(path, repeated) is means(".".join(path), repeated) is expected


@given(name=NAMES, other=NAMES)
def test_a_cotangent_is_named_by_its_tensor(name: list[str], other: list[str]):
    path, tensor = ".".join(name), ".".join(["m", *other])
    assert means(f"d({path})", f"d({tensor})") is means(path, tensor)
    assert not means(path, f"d({tensor})")
    assert not means(f"d({path})", tensor)


def test_an_iteration_is_named_by_its_number():
    assert means("layer.3.up", "m.layer.3.up")
    assert not means("layer.2.up", "m.layer.3.up")
    assert not means("3.up", "m.layer.13.up")

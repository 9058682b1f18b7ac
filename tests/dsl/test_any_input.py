"""Whatever the input, checking it gives diagnostics: no exception, no hang."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from partita.dsl.advice.report import Full, Report
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.dsl.syntax.format import format_text
from partita.dsl.syntax.lexer import language, tokenize
from partita.dsl.syntax.parser import parse_file
from partita.dsl.syntax.source import Source
from tests.docs.errors import CODES
from tests.dsl.strategies import texts
from tests.marks import examples

HERE = Path(__file__).parent
EXAMPLES = [path.read_text() for path in sorted((HERE.parents[1] / "specs").glob("*.par"))]
EXAMPLES += [path.read_text() for path in sorted((HERE / "wrong").glob("*.par")) if path.stat().st_size < 2000]
WORDS = sorted(language().words)
WORDS += ["x", "w", "batch", "embed", "seq", "layer", "gpt", "mlp", "attention", "f32", "i64", "size", "dot", "over"]
WORDS += ["1", "0", "2.5", "8%", "80GiB", "1e300", "1e999", "9" * 45, "10_000_000"]
WORDS += ['"a"', '"', "#", "\n", "@", "é"]


def tokens_of(text):
    try:
        return [t.text or text[t.start : t.end] for t in tokenize(Source("x", text), Report())][:-1]
    except Full:
        return []


@st.composite
def mutated(draw):
    """An example with some of its words removed, doubled, exchanged or replaced."""
    text = draw(st.sampled_from(EXAMPLES))
    tokens = tokens_of(text)
    for _ in range(draw(st.integers(1, 4))):
        if not tokens:
            break
        i, j = (draw(st.integers(0, len(tokens) - 1)) for _ in range(2))
        match draw(st.sampled_from(["remove", "double", "exchange", "replace", "cut", "repeat"])):
            case "remove":
                del tokens[i]
            case "double":
                tokens.insert(j, tokens[i])
            case "exchange":
                tokens[i], tokens[j] = tokens[j], tokens[i]
            case "replace":
                tokens[i] = draw(st.sampled_from(WORDS))
            case "cut":
                del tokens[min(i, j) : max(i, j)]
            case "repeat":
                tokens[i:i] = tokens[min(i, j) : max(i, j)][:200] * draw(st.integers(1, 4))
    return " ".join(tokens)


anything = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(WORDS), max_size=80).map(" ".join),
    mutated(),
    texts().map(lambda pair: pair[1]),
)


def formatted(text):
    try:
        return format_text(text, "any.par"), ()
    except Refused as refused:
        return None, refused.diagnostics


def only_diagnostics(text):
    found, diagnostics = load_text(text, "any.par")
    for diagnostic in diagnostics:
        assert diagnostic.code in CODES, diagnostic
        assert diagnostic.message
        assert diagnostic.render()
        assert diagnostic.as_json()["code"] == diagnostic.code
    assert (found is None) == any(d.severity == "error" for d in diagnostics)
    once, complaints = formatted(text)
    # The formatter has no complaints of its own, and is idempotent.
    assert all(d.code < "E0108" for d in complaints), complaints
    if once is not None:
        assert formatted(once) == (once, ())


@examples(100, suppress_health_check=[HealthCheck.too_slow])
@given(anything)
def test_any_text_gives_only_diagnostics(text):
    only_diagnostics(text)


@examples(40)
@given(st.sampled_from(EXAMPLES), st.text(max_size=40))
def test_any_override_gives_only_diagnostics(text, override):
    found, diagnostics = load_text(text, overrides=[override, f"batch={override}", f"train.optimizer.{override}=1"])
    assert (found is None) == any(d.severity == "error" for d in diagnostics)


HARD = {
    "brackets": "axis a = " + "(" * 100_000,
    "closed brackets": "axis a = " + "(" * 60 + "1" + ")" * 60,
    "minus": "axis a = " + "-" * 148 + "1",
    "calls in calls": "axis a = 1\nmodel m(x: [a]) { loss sum(" + "relu(" * 60 + "x" + ")" * 61 + " }",
    "as deep as can be": "axis a = 1\nmodel m(x: [a]) { loss sum("
    + "relu(-" * 22
    + "relu(" * 40
    + "x"
    + ")" * 63
    + " }",
    "deep within brackets": "axis a = 1\nmodel m(x: [a]) { loss sum(" + "(-" * 50 + "x" + ")" * 51 + " }",
    "sum": "axis a = " + "1+" * 149 + "1",
    "long sum": "axis a = " + "1+" * 10_000 + "1",
    "product": "axis a = " + "1e300*" * 100 + "1",
    "squares": "axis a = 1\nmodel m(x: [a]) { let n = 3\n" + "let n = n * n\n" * 200 + "loss sum(x) }",
    "roots": "axis a = 1\nmodel m(x: [a]) { loss sum(x * sqrt(1e300) * exp(1000) * log(0) * rsqrt(0)) }",
    "axis chain": "axis a0 = 1" + "".join(f", a{i} = a{i - 1}" for i in range(1, 1500)),
    "axis ring": "axis a0 = a1499" + "".join(f", a{i} = a{i - 1}" for i in range(1, 1500)),
    "block chain": "axis a = 1\nblock b0(x: [a]) { return x }\n"
    + "".join(f"block b{i}(x: [a]) {{ return b{i - 1}(x) }}\n" for i in range(1, 400)),
    "block ring": "axis a = 1\nblock b0(x: [a]) { return b399(x) }\n"
    + "".join(f"block b{i}(x: [a]) {{ return b{i - 1}(x) }}\n" for i in range(1, 400)),
    "nested repeats": "axis a = 1\nmodel m(x: [a]) { "
    + "repeat 2 as l { let x = relu(x) " * 60
    + "}" * 60
    + " loss sum(x) }",
    "permuted axes": "axis "
    + ", ".join(f"a{i} = 2" for i in range(8))
    + "\nblock b0(x: [a0, a1, a2, a3, a4, a5, a6, a7]) { return relu(x) }\n"
    + "".join(
        f"block b{i}(x: [a0, a1, a2, a3, a4, a5, a6, a7]) {{ return b{i - 1}(x, a{i % 8} -> a{(i + 1) % 8}, "
        f"a{(i + 1) % 8} -> a{i % 8}) + b{i - 1}(x, a0 -> a{i % 8}, a{i % 8} -> a0) }}\n"
        for i in range(1, 30)
    ),
    "unknown names": "axis a = 1\nmodel m(x: [a]) { " + "let y = z\n" * 1500 + "loss sum(x) }",
    "numbers": "axis a = 1e999999999, b = 1e-300 / 1e300, c = " + "9" * 100_000 + ", d = 0x1, e = 1__0",
    "name": "axis " + "n" * 100_000 + " = 1",
    "string": 'import "' + "s" * 100_000 + '"',
    "tabs": "\t" * 100_000 + "axis a = b",
    "one line": "axis a = 1 " * 2000,
    "unicode": "axis \u0430 = 1 \ud800 \U0001f600",
    "expected sum": "expect { " + "bubble <= 8% " * 1500 + "}",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
def test_hard_inputs_give_only_diagnostics(text):
    only_diagnostics(text)


@pytest.mark.soak
def test_hard_inputs_are_checked_within_500_mebibytes(tmp_path):
    """All of them in one process of its own, whose address space is limited to that."""
    for i, text in enumerate(HARD.values()):
        (tmp_path / f"{i}.par").write_text(text, encoding="utf-8", errors="replace")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20))\n"
        "from pathlib import Path; from partita.dsl.load import load\n"
        "for path in Path(sys.argv[1]).iterdir(): load(path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_errors_are_recovered_from_at_declarations():
    report = Report()
    text = "axis a 1\nblock f( {\n}\naxis b = 2\nmesh m(\ntrain { layout = 3 + }\nexpect { }\n"
    file = parse_file(Source("x", text), report)
    assert [d.span.line for d in report.diagnostics()] == [1, 2, 5, 6]
    assert [type(declaration).__name__ for declaration in file.declarations] == ["Axes", "Expect"]


@pytest.mark.soak
def test_any_text_for_ten_minutes():
    """Random text, mutated examples, deep nesting, huge numbers: nothing but diagnostics, each within two seconds."""
    end = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "600"))
    count = 0

    @settings(
        max_examples=2000,
        deadline=2000,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        database=None,
    )
    @given(anything)
    def one_round(text):
        nonlocal count
        count += 1
        only_diagnostics(text)

    while time.monotonic() < end:
        one_round()
    print(f"{count} inputs")

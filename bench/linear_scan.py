"""A linear scan beside moving its tensors once: the kernels of `linear_scan` and of its gradient, on one thread.

    python bench/linear_scan.py [--rounds 5] [--pairs 15] [FORM ...]

What is moved: forward, `torch.add(a, b, out=c)`, which reads as much and writes as much; backward, `torch.add(h, d,
out=c)` and a copy of a, as the gradient reads a, h and d and writes those of a and b. Each is done in turn with ours,
which also allocates what it returns, in inference mode and with the heap as a run has it. A figure is CPU time. The
ratio of a round is the median of its pairs'; the table has the median of the rounds, and their range.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import thread_time

from measure import ratios_table, report

# The shapes of a and b, position second; those of the zoo's models, with fewer heads.
POSITIONS = 4096
FORMS = {
    "4 rows of 1024 channels": ((4, POSITIONS, 1024), (4, POSITIONS, 1024)),
    "1 row of 1024 channels": ((1, POSITIONS, 1024), (1, POSITIONS, 1024)),
    "4 rows of 64 channels": ((4, POSITIONS, 64), (4, POSITIONS, 64)),
    "mamba2.par, 8 heads of 64 × 32": ((1, POSITIONS, 8, 1, 1), (1, POSITIONS, 8, 64, 32)),
    "gla.par, 4 heads of 64 × 64": ((1, POSITIONS, 4, 64, 1), (1, POSITIONS, 4, 64, 64)),
}
SYSTEMS = ("moved", "scan")
WARM_UP = 2


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("forms", nargs="*", default=tuple(FORMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=15, help="in each round")
    parser.add_argument("--as", dest="form", help=argparse.SUPPRESS)
    parser.add_argument("--backward", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.form:
        run(arguments.form, arguments.pairs, arguments.backward)
        return
    for title, options in (("forward", []), ("backward", ["--backward"])):
        command = [__file__, "--pairs", str(arguments.pairs), *options]
        cases = {form: [*command, "--as", form] for form in arguments.forms}
        ratios_table(f"{title}, {POSITIONS} positions, ms of CPU time", SYSTEMS, cases, arguments.rounds)


def run(form: str, pairs: int, backward: bool) -> None:
    """One round of a form."""
    import torch

    from partita.runtime import kernels
    from partita.runtime.heap import keep_pages

    keep_pages()
    torch.set_num_threads(1)
    few, full = FORMS[form]
    summed = tuple(i for i, (own, whole) in enumerate(zip(few, full, strict=True)) if own < whole)
    order = tuple(range(len(full) - len(summed)))
    with torch.inference_mode():
        a, b, d, c = torch.rand(few) / 2 + 0.5, torch.randn(full), torch.randn(full), torch.empty(full)
        h, copied = kernels.linear_scan(a, b, dim=1), torch.empty(few)

        def moved() -> None:
            torch.add(h if backward else a, d if backward else b, out=c)
            if backward:
                copied.copy_(a)

        def scan() -> None:
            if backward:
                kernels.linear_scan_gradient(a, h, d, dim=1, summed=summed, order=order)
            else:
                kernels.linear_scan(a, b, dim=1)

        seconds = [(_seconds(moved), _seconds(scan)) for _ in range(WARM_UP + pairs)][WARM_UP:]
    report(dict(zip(SYSTEMS, map(list, zip(*seconds, strict=True)), strict=True)))


def _seconds(run: Callable[[], None]) -> float:
    begun = thread_time()
    run()
    return thread_time() - begun


if __name__ == "__main__":
    main()

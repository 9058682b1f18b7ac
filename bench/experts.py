"""Experts beside one network of the same number of products: training steps of `bench/models/experts.par`.

    python bench/experts.py [--rounds 5] [--pairs 8] [TOKENS×EMBED×FFN ...]

In `sparse`, each token goes through 2 of 8 experts of width ffn, without capacity (`routed_dot`); in `dense`, through
one gated MLP of width 2·ffn. Both train from random batches, a step of each in turn, in one process of one thread. A
figure is the CPU time of a step's forward and backward pass, with norms, router and loss, but without the
update, which changes four times as many parameters in `sparse`. The ratio of a round is the median of its pairs'; the
table has the median of the rounds, and their range.
"""

from __future__ import annotations

import argparse
from itertools import islice

from measure import joined, ratios_table, report

USUAL = ("4096x512x1024", "2048x256x512", "4096x1024x1024", "1024x512x2048", "512x64x96")
MODELS = ("dense", "sparse")
SEQUENCE = 512
WARM_UP = 2


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", default=USUAL, metavar="TOKENSxEMBEDxFFN")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=8, help="of steps, in each round")
    parser.add_argument("--as", dest="case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run(arguments.case, arguments.pairs)
        return
    command = [__file__, "--pairs", str(arguments.pairs)]
    ratios_table(
        "forward and backward, ms of CPU time",
        MODELS,
        {case: [*command, "--as", case] for case in arguments.cases},
        arguments.rounds,
    )


def run(case: str, pairs: int) -> None:
    """One round of a case."""
    from peers.ours import Clock, Ours
    from peers.workload import workload

    joined()
    tokens, embed, ffn = map(int, case.split("x"))
    sizes = (f"batch={tokens // SEQUENCE}", f"seq={SEQUENCE}", f"embed={embed}", f"ffn={ffn}")
    works = [workload("experts.par", (f"model={model}", *sizes)) for model in MODELS]
    systems = [Ours(work, Clock()) for work in works]
    batches = list(islice(works[0].batches(), 2))
    seconds: list[list[float]] = [[], []]
    for number in range(WARM_UP + pairs):
        for system, times in zip(systems, seconds, strict=True):
            system.step(*batches[number % len(batches)])
            times.append(system.computed)
    report(dict(zip(MODELS, (times[WARM_UP:] for times in seconds), strict=True)))


if __name__ == "__main__":
    main()

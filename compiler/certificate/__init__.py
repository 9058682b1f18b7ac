"""The certificate: that the partitioned program is the whole program, whoever laid it out.

Comes in: a finished compilation. Goes out: what was checked, and what does not hold. Nothing is run, and nothing is
asked of the passes that chose (`choice`, `shard`, `cut`, `moves`): a program with the same values that someone had
written by hand would be certified alike. Proved is, in time linear in the program:

1. every local operation is its rank's share of a whole one, by a way that the operation has, and every change of
   layout is a legal step (`rules`);
2. without its changes of layout, sends and receives, the program of each stage computes values of the whole program
   and no others, by the same operations from the same operands, and accumulates the same contributions to the same
   totals in the same order (`stages`);
3. every message is sent once, by the stage that makes it, received once, in the same layout, and in a phase in which
   it is there (`messages`);
4. at the end of the step every gradient is the sum of its totals, reduced as the update wants it, every parameter
   is updated by the declared optimizer and stored again as it was, and each entry of the statistics counts once over
   all ranks: the loss, the metrics, the squares of every gradient, which together clip (`ending`, `updates`).

The whole program is that of one microbatch and of the end of the step (`Compilation.step`). What the checks lean on:
the types and ways of operations and their replacements (`partita.compiler.ops`), which are tested one by one.
"""

from __future__ import annotations

from partita.compiler.certificate.ending import Ending
from partita.compiler.certificate.meanings import Meanings
from partita.compiler.certificate.messages import Messages
from partita.compiler.certificate.records import Records
from partita.compiler.certificate.report import Certificate, Checker
from partita.compiler.certificate.rules import Rules
from partita.compiler.certificate.stages import Stages
from partita.compiler.certificate.transfers import Transfers
from partita.compiler.certificate.updates import Updates
from partita.compiler.certificate.whole import Whole
from partita.compiler.state import Compilation

__all__ = ["Certificate", "certify"]


def certify(compilation: Compilation, program: bool = True, laws: bool = True) -> Certificate:
    """Check a finished compilation. Problems (E0701) are returned, however broken it is.

    Without `program`, only what that is assembled from is checked; without `laws`, its instructions are not held to
    the laws once more: compiling has done that.
    """
    check = Checker(Rules(compilation.mesh), Meanings())
    count = 0
    with check.at():
        whole = Whole.of(compilation.step, check.meanings)
        layouts = compilation.sharded.parameters
        messages = Messages.of(compilation.partitioned, check)
        count = messages.count
        Stages(compilation.partitioned, layouts, whole, messages, check).run()
        ending = Ending(compilation.partitioned, compilation.update, layouts, whole, check)
        ending.run()
        train = compilation.train
        call = train.optimizer if train and compilation.training else None
        Updates(ending, call, train.clip if train else None).run()
        if program:
            Records(compilation.partitioned, layouts, compilation.update, whole, compilation.program, check).run()
            Transfers(compilation.partitioned, compilation.update, compilation.program, check, laws).run()
    return Certificate(
        check.nodes,
        check.moves,
        count,
        len(compilation.step.parameters) if compilation.step else 0,
        tuple(check.problems),
    )

"""Translation validation: proves that the partitioned program is equivalent to the single-device program.

Nothing is run, and the passes that chose layouts and stages (`choice`, `shard`, `cut`, `resharding`) are not
consulted: a program written by hand would be validated the same way. The checks are linear in the size of the program:

1. Every local operation is its rank's share of a global one, by a sharding rule of the operation, and every resharding
   is a valid step (`rules`).
   What is sent in pieces is first put together again (`pieces`), and rows that stand in the order of their experts are
   taken back into their own (`row_orders`).
2. Apart from resharding, sends and receives, each stage computes only values of the single-device program, by the same
   operations, and adds the same contributions to the same accumulators in the same order (`stages`).
   What slices of a sequence share is held by one operation each (`slices`).
3. Every message is sent once, by the stage that computes it, and received once, in the same layout (`messages`).
4. At the end of the step every gradient is the sum of its totals, in the layout that the update needs; every parameter
   is updated by the declared optimizer and stored back, its mean follows if `ema` keeps one, and every buffer is
   updated by its update; and each entry of the statistics counts once over all ranks: the loss, the metrics, and the
   squared gradients from which the clipping coefficient is computed (`ending`, `buffers`, `updates`). Where groups
   train apart, this is so within each of them, and their average is that of all copies (`outer`).
5. Parameters lie in the memory that the layout says, and are read once they have arrived on the device (`copies`).
6. The assembled program agrees with these graphs in its records, its transfers, and its copies of what microbatches
   keep (`records`, `transfers`, `copies`), and its functions read what they add up in whole (`written`); that of an
   evaluation reads parameters as training stores them (`reading`).

The single-device program is that of one microbatch and of the end of the step (`Compilation.step`). An axis that all
ranks of the pipeline share is in parts there already:

7. These parts amount to the whole (`division`).

A sequence that is cut into slices is so there, too; that these amount to the whole is what running a proxy shows. The
types, sharding rules and decompositions (`Op.split`) of operations are trusted; they have their own tests.
"""

from __future__ import annotations

from partita.compiler.state import Compilation
from partita.compiler.verify.buffers import Buffers
from partita.compiler.verify.checker import Checker, Validation
from partita.compiler.verify.chunked_collectives import in_one_piece
from partita.compiler.verify.copies import Copies
from partita.compiler.verify.division import Division
from partita.compiler.verify.ending import Ending
from partita.compiler.verify.messages import Messages
from partita.compiler.verify.outer import Outers
from partita.compiler.verify.reading import check_reading
from partita.compiler.verify.records import Records
from partita.compiler.verify.reference import Reference
from partita.compiler.verify.row_orders import in_own_order
from partita.compiler.verify.rules import Rules
from partita.compiler.verify.slices import Slices
from partita.compiler.verify.stages import Stages
from partita.compiler.verify.transfers import Transfers
from partita.compiler.verify.updates import Updates
from partita.compiler.verify.value_numbering import ValueNumbering
from partita.compiler.verify.written import check_written

__all__ = ["Validation", "validate"]


def validate(
    compilation: Compilation, program: bool = True, invariants: bool = True, training: Compilation | None = None
) -> Validation:
    """Check a finished compilation; of an evaluation also that it reads what its `training` stores. Problems (E0701)
    are returned, never raised.

    Without `program`, only the graphs that it is assembled from are checked. Without `invariants`, the schedule
    invariants are not checked again, as compiling has checked them.
    """
    check = Checker(Rules(compilation.mesh), ValueNumbering(compilation.mesh.parts))
    count = 0
    with check.at():
        if compilation.spread is not None and compilation.undivided is not None:
            over = str(compilation.pipeline.axis)
            Division(compilation.undivided, compilation.joint, over, compilation.spread, check).run()
        whole = Reference.of(compilation.step, check.numbering)
        layouts = compilation.sharded.parameters
        partitioned = in_own_order(in_one_piece(compilation.partitioned, check), check)
        messages = Messages.of(partitioned, check)
        count = messages.count
        Stages(partitioned, layouts, whole, messages, check).run()
        Slices(partitioned, compilation.schedule, check).run()
        ending = Ending(partitioned, compilation.update, layouts, whole, check)
        ending.run()
        train = compilation.train
        Buffers(ending, compilation.training).run()
        memories = compilation.states_on_host, compilation.on_host
        Updates(ending, compilation.updated, train.clip, train.ema, *memories).run()
        apart = (compilation.groups, train.local) if compilation.training else (None, None)
        Outers(ending, *apart, *memories).run()
        stages = compilation.partitioned, compilation.update, compilation.program if program else None
        Copies(*stages, check, compilation.prefetched).run()
        if program:
            older = (train.late, train.delay, train.paired) if compilation.training else (False, 0, False)
            context = compilation.update, whole, compilation.program, check, compilation.on_host
            sizes = compilation.joint.own_sizes
            Records(partitioned, layouts, *context, *older, compilation.replicas_per_rank, sizes).run()
            Transfers(partitioned, compilation.update, compilation.program, check, invariants).run()
            check_written(compilation.program)
            if training is not None:
                check_reading(compilation.program, training.program, compilation.reads_means)
    return Validation(
        check.nodes,
        check.reshardings,
        count,
        len(compilation.step.parameters) if compilation.step else 0,
        tuple(check.problems),
    )

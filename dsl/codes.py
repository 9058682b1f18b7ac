"""The error index: what each diagnostic code means and how to fix it. The documentation's index is made from it.

E00 files and limits, E01 syntax, E02 models, E03 declarations and settings, E04 placement, E05 schedules, E06 runs,
E07 verification, E08 checkpoints, E09 planning; W is a warning. A test holds that every code that is reported stands here.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Code:
    """One kind of error: its title, a paragraph that explains it, and the fix by example."""

    title: str
    explanation: str
    fix: str


# fmt: off
# ruff: noqa: E501
CODES: dict[str, Code] = {
    # ------------------------------------------------------------ files and limits
    "E0001": Code("file cannot be read", "The file does not exist, is no regular file, or may not be read.", "Check the name; imports are relative to the importing file."),
    "E0002": Code("not UTF-8 text", "A .par file is UTF-8 text. The message gives the first byte that is none.", "Save the file as UTF-8."),
    "E0003": Code("NUL character", "The file contains a character of code zero, so it is likely no text.", "Remove it."),
    "E0004": Code("file too large", "A file, with what it imports, may have one mebibyte and 30,000 words and signs; so may the schedules that it names have one mebibyte together. Generated files that are larger should use `repeat`.", "`repeat 96 as layer { … }` instead of 96 calls."),
    "E0005": Code("nested too deeply", "Brackets, expressions, and blocks within blocks may be nested to a limit that no written model comes near.", "Bind parts of the expression with `let`."),
    "E0006": Code("name or number too long", "Names have at most 200 characters, numbers at most 40 digits and exponents up to 300; what is not zero lies between 1e-300 and 1e300.", "`1e-5` instead of forty zeros."),
    "E0007": Code("size out of range", "An axis has at most 2^40 entries, a tensor 2^62 elements, a mesh 2^20 ranks.", "Check the sizes that the message names."),
    "E0008": Code("program too large", "A model expands to at most two million steps, counting every turn of every repeat and every call of every block.", "Lower the count of the `repeat`."),
    "E0009": Code("too many errors", "Checking stopped, because more errors would likely follow from the first ones.", "Fix the first errors, and check again."),
    "E0010": Code("import outside the root", "An import, or a schedule in a file, may not leave the directory of the main file, nor by a symbolic link, unless --root names one that holds both.", "`partita check specs/gpt.par --root .`"),
    "E0011": Code("import cycle", "A file imports itself, directly or through others.", "Move what both need into a third file."),
    "E0012": Code("imported names clash", "Two files declare the same name in one kind of thing. Only an axis of the importing file may replace an imported one.", "Rename one of them."),
    "E0013": Code("too many imports", "At most 100 files take part.", "Join some of them."),
    # ------------------------------------------------------------ syntax
    "E0101": Code("unexpected character", "This character has no meaning outside of strings and comments.", "Remove it; strings stand in double quotation marks."),
    "E0102": Code("unclosed string", "A string ends on the line on which it begins.", '`import "llama.par"`'),
    "E0103": Code("unexpected word or sign", "The grammar wants something else here; `help` says what.", "`axis batch = 32`, not `axis batch 32`."),
    "E0104": Code("reserved word as a name", "Keywords, and `param`, `state`, `grad`, `all`, `auto`, cannot be names.", "`let error = …` instead of `let loss = …`."),
    "E0105": Code("brackets do not match", "A bracket is never closed, closes nothing, or closes one of another kind.", "`[1, 2]`, not `[1, 2)`."),
    "E0106": Code("malformed number", "Underscores stand between digits.", "`10_000`, not `10__000`."),
    "E0107": Code("unknown unit", "The units are %, B and its multiples (GB, GiB), the same per second, FLOP/s and its multiples, ns, us, ms, s, min and h.", "`80GiB`, `900GB/s`, `989TFLOP/s`, `5us`, `8%`."),
    "E0108": Code("cannot be formatted", "The canonical form would not parse to the same tree. This is a defect of the formatter; the file is left as it is.", "Please report it with the file."),
    # ------------------------------------------------------------ models
    "E0201": Code("unknown name", "No input, parameter, sample or `let` of this name stands before this place.", "Check the spelling; an axis's size is `size(axis)`."),
    "E0202": Code("unknown axis", "Where an axis is expected, only declared axes are looked up.", "`axis heads = 12`"),
    "E0203": Code("tensor lacks an axis", "The operation works along an axis that the tensor does not have.", "`dot(h, wq, over = embed)` where both have `embed`."),
    "E0204": Code("axes do not fit", "One operand's axes must include the other's; arguments of blocks have the declared axes.", "`x + expand(bias, seq)`; `attention(y, seq -> target)`."),
    "E0205": Code("wrong dtype", "Operands have one dtype; integers and floats mix only through `cast`. Integers cannot be divided.", "`cast(ids, f32) / 2`"),
    "E0206": Code("unknown function", "No block of the file and no function of the language has this name.", "Check the spelling, or declare a `block`."),
    "E0207": Code("unknown dtype", "The dtypes are f32, bf16, f64, i64, i32 and bool.", "`tokens: i64[batch, seq]`"),
    "E0208": Code("used before it is bound", "Statements are read in order, and names that are first bound inside a `repeat` end with it.", "Move the `let` up."),
    "E0209": Code("unknown or surplus argument", "The function takes no argument of this name, or fewer by position.", "`softmax(s, over = keys)`, not `softmax(s, axis = keys)`."),
    "E0210": Code("argument missing", "A required argument is not given.", "`dot(a, b, over = embed)`"),
    "E0211": Code("argument given twice", "An argument is given by position and by name, or twice by name.", "Remove one of them."),
    "E0212": Code("wrong kind of argument", "A tensor, a number, an axis, a string or a list stands where another of them is needed.", "`size(embed)` is a number, `embed` an axis."),
    "E0213": Code("number instead of a tensor", "A number alone is no tensor.", "`expand(x, axis)` or an operation on a tensor."),
    "E0214": Code("number out of range", "The function has a meaning only for numbers in a range.", "`dropout(x, rate = 0.1)`"),
    "E0215": Code("sizes do not fit", "`split` and `merge` keep the number of elements, `concat` adds sizes, `slice` stays within its axis, `rename` keeps the size.", "`axis embed = heads * key`"),
    "E0216": Code("axis stands twice", "A tensor has each of its axes once.", "`rename(x, seq -> keys)` before the product."),
    "E0217": Code("name declared twice", "Inputs, parameters and samples of one scope have different names.", "Rename one of them."),
    "E0218": Code("block calls itself", "Blocks are expanded, so they cannot be recursive.", "`repeat 12 as layer { let x = mlp(x) }`"),
    "E0219": Code("wrong number of results", "A block that returns several values is bound to as many names.", "`let a, b = both(x)`"),
    "E0220": Code("carried value changes its type", "A name bound before a `repeat` and rebound inside is carried from turn to turn and keeps its axes and dtype.", "Give the new value another name."),
    "E0221": Code("wrong loss", "A model has one `loss`, a scalar float, at its top level.", "`loss cross_entropy(logits, targets, over = vocab)`"),
    "E0222": Code("wrong metric", "A metric is a scalar with a name of its own, at the top level of a model.", "`metric accuracy = accuracy(logits, targets, over = vocab)`"),
    "E0223": Code("wrong arrow", "Arrows rename axes; how many a function takes, and whether a side is a list, is the function's.", "`split(x, embed -> [heads, key])`"),
    "E0224": Code("impossible arithmetic", "A division by zero, a root of a negative number, or a number that is too large or too near to zero.", "Check the numbers."),
    # ------------------------------------------------------------ declarations and settings
    "E0301": Code("declared twice", "Two declarations of one kind have the same name; a file has one `train`.", "Rename one of them."),
    "E0302": Code("unknown declaration", "`train`, a layout or the command line names something that is not declared.", "Check the spelling."),
    "E0303": Code("unknown entry", "The table has no entry of this name.", "`train { steps = 100 … }`"),
    "E0304": Code("entry given twice", "An entry stands once in its table.", "Remove one of them."),
    "E0305": Code("entry missing", "A train block needs `data`, `optimizer` and `steps`.", "`steps = 1_000`"),
    "E0306": Code("wrong kind of value", "A number, word, string, list or call stands where another of them is needed.", '`data = text("corpus/*.txt")`'),
    "E0307": Code("wrong or missing unit", "Ratios and sizes in bytes need their unit; counts have none.", "`holdout = 10%`, `memory = 80GiB`"),
    "E0308": Code("value out of range", "The number is outside of what the setting allows.", "`momentum = 0.9`"),
    "E0309": Code("unknown setting function", "No schedule, optimizer, data source, distribution, device, link or measure has this name.", "`optimizer = adamw(lr = 1e-3)`"),
    "E0310": Code("not a positive integer", "Sizes and counts are positive integers; the arithmetic of axes is exact.", "`axis ffn = 8 * embed / 3` needs `embed` divisible by 3."),
    "E0311": Code("axes depend on each other", "The size of an axis depends on itself, directly or through others.", "Give one of them a number."),
    "E0313": Code("unknown mesh axis", "The mesh has no axis of this name.", "`mesh cluster(data = 2, pipe = 4)`"),
    "E0314": Code("wrong stage numbers", "Stages count from 0, the last one is not before the first, and turns per stage are positive.", "`place encoder -> pipe[0..1]`"),
    "E0315": Code("wrong override", "An override on the command line is `key=value` for an axis, `MESH.AXIS`, `train.KEY`, `SCHEDULE.ARGUMENT`, `model`, `layout` or `schedule`.", "`partita run gpt.par batch=128 train.steps=10`"),
    "E0316": Code("choice needed", "Several models, layouts or schedules are declared, and `train` does not say which is meant.", "`train { layout = megatron … }`"),
    "E0317": Code("unknown part of the model", "A layout names a block, repeat, parameter or value that the model does not have.", "`stage layer -> pipe` for `repeat 12 as layer`."),
    "E0318": Code("entries do not go together", "An entry of `train` needs another one: `on_bad_step = rewind` goes back to a checkpoint, and the file asks for none.", "`checkpoint = every(500)`, or `on_bad_step = skip`."),
    # ------------------------------------------------------------ layout and placement
    "E0401": Code("not supported yet", "The language has this, and this version gives it no meaning.", "Remove it, or use what `help` names."),
    "E0402": Code("unused mesh axis", "A mesh axis larger than 1 that no rule uses would hold idle ranks.", "Add a rule that uses it, or set its size to 1."),
    "E0403": Code("more stages than turns", "Every stage has at least one turn of the repeats that `stage` names.", "Fewer ranks, or fewer chunks."),
    "E0404": Code("stages do not fit", "The turns per stage, or the stages of a `place` rule, do not go with the number of stages.", "`stage layer -> pipe [3, 3]` for 6 turns on 2 stages."),
    "E0405": Code("value flows backwards", "A value is made on a later stage than one that reads it.", "Change the `place` rule."),
    "E0406": Code("batch does not divide", "The batch axis must divide by the number of microbatches.", "`axis batch = 32` with `microbatches = 8`."),
    "E0407": Code("loss cannot be split", "After the reduction over the batch the loss may only be scaled or added to, so that microbatches can be summed.", "Move the nonlinear part into a metric."),
    "E0408": Code("parameter does not reach the loss", "Such a parameter has no gradient, and is likely forgotten.", "Use it, or remove it."),
    "E0409": Code("rule matches nothing", "A path of a `place` or `recompute` rule is no part of the model.", "Check the spelling."),
    "E0410": Code("nothing to compile", "Compiling needs a model and a train block.", "Add `train { … }`."),
    "E0411": Code("size does not divide", "What a rule splits must divide into the parts of its mesh axes; microbatches cut the batch first.", "Choose sizes of the axis and of the mesh that divide."),
    "E0412": Code("mesh axis used twice", "A mesh axis is the pipeline's, or splits tensors; not both.", "Use another mesh axis for one of the two."),
    "E0413": Code("not a profile", "`profile(…)` reads what `partita profile` has written of a machine.", "`partita profile -o machine.json`"),
    # ------------------------------------------------------------ schedules
    "E0501": Code("schedule is incomplete", "Every forward and backward action of every chunk and microbatch stands once, in the order in which they need each other.", "See the laws of schedules."),
    "E0502": Code("schedule deadlocks", "Ranks would wait for each other forever; the message shows the cycle.", "Reorder the actions in the cycle."),
    "E0503": Code("transfers do not match", "The sends and receives of a channel must match one to one and in order.", "See the laws of schedules."),
    "E0504": Code("too many live activations", "The schedule holds more activations than it promises.", "Raise its bound, or run backward actions earlier."),
    "E0505": Code("schedule does not fit the mesh", "Ranks, chunks, microbatches and groups do not go together, or no order keeps within the memory.", "`interleaved_1f1b(microbatches = 8, chunks = 2)` on 4 ranks."),
    "E0506": Code("schedule file is wrong", "A schedule as text has one line a rank, of actions such as `F0.0 B0.0 W0.0`: kind, chunk, microbatch.", "Check the word that the message names."),
    # ------------------------------------------------------------ runs
    "E0601": Code("data missing", "No file has this name, or matches this pattern.", "Paths are relative to the .par file."),
    "E0602": Code("data outside the root", "Data files stay under the folder of the .par file.", "Move the data there."),
    "E0603": Code("data cannot be read", "The file's content is not what its kind of data needs.", "`dtype` must be what the file was written with."),
    "E0604": Code("too little data", "One window, or one batch, is longer than the data, or than its held-out share.", "A smaller `batch` or `seq`, or more data."),
    "E0605": Code("id out of range", "The data holds ids beyond the axis that they index.", "`axis vocab = 256` for bytes."),
    "E0606": Code("input missing in the data", "Inputs of the model are bound by name to what the data yields.", "`tokens` and `targets` for text."),
    "E0607": Code("data of the wrong shape", "The arrays differ in shape or dtype from the model's inputs.", "Compare the message's shapes."),
    "E0608": Code("nothing to evaluate on", "`eval` needs data that training does not see.", "`stdlib(holdout = 5%)`"),
    "E0609": Code("range of random integers unknown", "`random()` draws integers within the axis that they index, and this input indexes none.", "Use the input in an `embedding` or a loss."),
    "E0610": Code("ranks and mesh differ", "A launcher has started another number of processes than the mesh has ranks.", "`torchrun --nproc-per-node 4` for a mesh of four."),
    "E0611": Code("no GPU for a rank", "With `--transport nccl` each rank uses one GPU of its machine, by its local number.", "As many ranks on a machine as it has GPUs, or `--transport gloo`."),
    "E0612": Code("ranks have different files", "Every rank reads the file by itself, and before the first step they compare hashes of what it means and of the program made of it. The notes show who has which.", "Copy one file to all machines; give all ranks the same overrides, and the same version of Partita."),
    "E0613": Code("too many ranks for one machine", "`partita run` starts at most 256 ranks on one machine by itself, so that a file alone cannot fill it with processes.", "`torchrun` or Slurm on several machines; or a smaller mesh: `cluster.data=1`."),
    "E0614": Code("no compiler for torch", "With `compile = true`, torch writes C++ for a CPU and has it compiled.", "Install g++ or clang++, or name one in `CXX`; or leave `compile` out."),
    "E0615": Code("ranks have different data", "Before the first step the ranks compare the files of their data: names, sizes, and hashes of their content, of large files in part. The notes say which differ.", "Copy the same files to all machines."),
    # ------------------------------------------------------------ verification
    "E0701": Code("program is not certified", "An operation or a collective does not lead to the layout that its value is said to have. The file is right; the compiler is not.", "Please report it with the file."),
    "E0702": Code("execution differs", "On a shrunken copy of the file, the partitioned program does not compute what the single-device program computes. The file is right; the compiler is not.", "Please report it with the file."),
    "E0704": Code("more memory than there is", "By its static bound a rank's tensors need more memory than the `device` that the mesh declares. Kernels' own workspace comes on top.", "`shard param -> data`, `recompute`, more ranks for the axes that are split, or a schedule that keeps fewer microbatches in flight."),
    "E0705": Code("claim does not hold", "A claim of an `expect` block is not true of the program as it is compiled. The notes show its value and what contributes most to it.", "Change the layout or the schedule as `help` says; or the claim, if it asks for too much."),
    # ------------------------------------------------------------ checkpoints
    "E0801": Code("checkpoints outside the folder", "The `dir` of a `checkpoint` is relative to the folder of the .par file, and stays under it, links included.", 'Leave `dir` out: then it is `checkpoints` in the directory of `--run-dir`, which may be anywhere.'),
    "E0802": Code("checkpoints cannot be written", "The directory of the checkpoints cannot be made or written to, or is a link.", "Check its permissions, and the space that is left."),
    "E0803": Code("another run writes there", "A run holds its directory, and that of its checkpoints, for as long as it lives.", "Wait for the end of the other run, or give this one another `--run-dir`."),
    "E0804": Code("checkpoint of another model", "A run goes on from the newest checkpoint in its directory, which must be of the same model: the same tensors, optimizer and steps. The notes show what differs. Layout, mesh, schedule and settings such as the learning rate may differ.", "Another `--run-dir`; or move the directory away to begin anew."),
    "E0805": Code("checkpoint of a later version", "The checkpoint was written by a later Partita, in a format that this one does not know.", "Use the Partita that has written it."),
    "E0806": Code("no checkpoint is whole", "There are checkpoints, and all of them are damaged; beginning anew would hide that.", "Restore one from a copy; or move the directory away to begin anew."),
    "E0807": Code("no such checkpoint", "The directory holds no checkpoint, or none of this step.", "`partita checkpoint ls DIR` lists what is there."),
    "E0808": Code("checkpoint is damaged", "A file of the checkpoint is missing, is a link, or its size or content is not what was saved. The message names it.", "`partita checkpoint ls DIR` lists others; a run passes damaged ones over by itself."),
    "E0809": Code("tensors do not fit", "A file of tensors lacks some that the model has, or has them in other shapes.", "Map the names, and the order of axes, with `--names`."),
    "E0810": Code("name map is wrong", "A name map is a JSON object from names of this model to names of the other, or to objects with `name` and `axes`. Names are those that a safetensors file can have: not `__metadata__`, and no half of a surrogate pair.", '`{"gpt.wte": "transformer.wte.weight"}`'),
    "E0811": Code("tensors are not used", "With `--strict`, every tensor of a file that is imported must be one of the model's.", "Map their names with `--names`, or leave `--strict` out."),
    "E0812": Code("order of axes is open", "With `--strict`, a tensor that has several axes of one size must have its `axes` in the name map: its shape does not show whether it stands as it does here, or transposed.", '`{"m.wq": {"name": "q_proj.weight", "axes": ["out", "in"]}}`'),
    "E0813": Code("numbers that cannot be trained from", "A tensor that is imported has NaN, an infinity, or a number that is too large for the dtype of the parameter. The notes name the tensor, how many, and the place of the first.", "Look at how the file was made; declare a parameter in a wider dtype."),
    "E0814": Code("checkpoints would not be used", "The directory of a run holds checkpoints from which this run would not go on: the file asks for none, or for others elsewhere. Training would begin anew beside them.", "`checkpoint = every(100)` in the train block; or another `--run-dir`."),
    "E0815": Code("data of the checkpoint has changed", "A checkpoint says which files it was trained on: names, sizes, and hashes of their content, of large files in part. A run that goes on from it has others. The notes say how they differ.", "Put the files back; or `--changed-data` to go on with what is there now."),
    # ------------------------------------------------------------ planning
    "E0901": Code("devices cannot be used", "No mesh of so many devices divides the batch, the axes that can be split and the turns of repeats. The notes show them.", "Another number of devices, or a batch with more factors."),
    "E0902": Code("nothing fits", "No candidate that was found fits into the memory of the device. The notes show what came nearest.", "More devices, a smaller `batch`, or a shorter sequence."),
    "E0903": Code("plan in another folder", "A plan names what its file names: imports, data, profiles. They are relative to its folder.", "`partita plan specs/gpt.par -o specs/planned.par`"),
    # ------------------------------------------------------------ warnings
    "W0201": Code("unused name", "The main file declares something that nothing uses.", "Remove it, or begin its name with `_`."),
    "W0301": Code("rule never applies", "No tensor of the model is touched by this layout rule.", "Remove it, or move it before the rule that hides it."),
    "W0302": Code("ranks do the same", "A mesh axis splits only what is stored between uses, and no value of the model: its ranks all compute the same.", "Split the batch over it: `shard batch -> data`."),
    "W0601": Code("evaluation is not finite", "The loss of an evaluation is not a number, or infinite. That says nothing against the parameters: training goes on to its end, and the exit status is then 3. The note says where it began.", "Look at the rows of the held-out data that the note names."),
    "W0602": Code("step left out", "A step was bad, and `on_bad_step` lets the run go past it. It counts for the data and the learning rate; its update is left out, and with `rewind` those since the checkpoint before.", "Look at the rows that the notes name, if there are many."),
    "W0603": Code("ids look like halves", "The ids at even places of a file are of very different sizes from those at odd ones. That is how wider ids look when they are read in halves.", "`dtype` as the file was written; nothing, where the ids do alternate."),
    "W0604": Code("slow rank", "A rank was at work for longer than its peers, which waited for it, and that cost the run more than a tenth of its time. The message names the action in which it lost most. `metrics.jsonl` has it by period, as `slow_ranks`.", "Look at what else that machine does, at its clock and its disk; `--trace` shows when each rank did what."),
    "W0701": Code("claim does not hold", "A claim of an `expect` block is not true of the program that is run. Training goes on: a run on another machine, or with overrides, is not what the claim is about.", "`partita compile` refuses the file, and says what contributes most."),
    "W0702": Code("not decided by execution", "The proofs hold, and no small copy of the file was found that compiles, runs and can be compared: its sizes do not go together when they are small, or random data leads to numbers that are not finite, or to rounding errors that grow without bounds. That is not known to be wrong.", "`log(exp(x) + 1.0)` instead of a logarithm of what may be negative."),
    "W0801": Code("checkpoint passed over", "A checkpoint is damaged; the run goes on from the one before it, and gives the damaged one the ending `.damaged`.", "Look for the cause: a checkpoint does not change once it is written."),
    "W0802": Code("checkpoint not saved", "A save failed; the message says why. Training goes on, and the checkpoints before stay. Should the last save of a run fail, it ends with exit status 3.", "Make room. The next save is tried when it is due."),
    "W0803": Code("training waits for a checkpoint", "The checkpoint before was still being written when the next one was due. One is written at a time.", "A larger interval, or a faster disk."),
    "W0804": Code("settings differ from the checkpoint's", "The run goes on from a checkpoint under other settings: data, batch, optimizer, precision or seed. That is allowed, and not the same run any more.", "Nothing, if it is meant."),
    "W0805": Code("fewer checkpoints kept", "There is no room for `keep` checkpoints and one that is being saved. The oldest one was removed, or one that was set aside as damaged, and the save tried again. The newest whole checkpoint always stays.", "Make room, or a smaller `keep`."),
    "W0806": Code("directory cannot be locked", "The file system has no locks, so that nothing keeps two runs from writing checkpoints to one directory.", "See to it that only one run does; on NFS, mount with locking."),
    "W0807": Code("order of axes is a guess", "Tensors that are imported have several axes of one size, and the name map does not say in which order they stand in the file. They are taken in the order of the .par file. If the file has them transposed, training goes on from wrong weights, without another word.", "Give their `axes` in the `--names` map; with `--strict` this is an error."),
}
# fmt: on

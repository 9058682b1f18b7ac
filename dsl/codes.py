"""The error index: what each diagnostic code means and how to fix it. docs/errors.md is generated from it.

E00 files and limits, E01 syntax, E02 models, E03 declarations and settings, E04 placement, E05 schedules, E06 runs,
E07 verification, E08 checkpoints, E09 planning; W is a warning. A test checks that every reported code is listed.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Code:
    """One kind of error: its title, an explanation, and an example of the fix."""

    title: str
    explanation: str
    fix: str


# fmt: off
# ruff: noqa: E501
CODES: dict[str, Code] = {
    # ------------------------------------------------------------ files and limits
    "E0001": Code("file cannot be read", "The file does not exist, is not a regular file, or cannot be read.", "Check the name; imports are relative to the importing file."),
    "E0002": Code("not UTF-8 text", "A .par file is UTF-8 text. The message gives the first invalid byte.", "Save the file as UTF-8."),
    "E0003": Code("NUL character", "The file contains a NUL character, so it is probably not text.", "Remove it."),
    "E0004": Code("file too large", "A file including its imports may have at most 1 MiB and 30,000 tokens, and the schedules that it names at most 1 MiB together. Larger generated files should use `repeat`.", "`repeat 96 as layer { … }` instead of 96 calls."),
    "E0005": Code("nested too deeply", "Brackets, expressions and blocks are nested beyond a limit that no hand-written model comes near.", "Bind parts of the expression with `let`."),
    "E0006": Code("name or number too long", "Names have at most 200 characters, numbers at most 40 digits and exponents up to 300; nonzero numbers lie between 1e-300 and 1e300 in magnitude.", "`1e-5` instead of forty zeros."),
    "E0007": Code("size out of range", "An axis has at most 2^40 entries, a tensor 2^62 elements, a mesh 2^20 ranks.", "Check the sizes that the message names."),
    "E0008": Code("program too large", "A model expands to at most two million steps, counting every iteration of every repeat and every call of every block.", "Lower the count of the `repeat`."),
    "E0009": Code("too many errors", "Checking stopped, because further errors are likely consequences of the first ones.", "Fix the first errors, and check again."),
    "E0010": Code("import outside the root", "An import or a schedule file must lie within the directory of the main file, symbolic links included, unless --root names a directory that contains both.", "`partita check specs/gpt.par --root .`"),
    "E0011": Code("import cycle", "A file imports itself, directly or through others.", "Move what both need into a third file."),
    "E0012": Code("imported names clash", "Two files declare the same name in one namespace. Only an axis or a constant of the importing file may replace an imported one.", "Rename one of them."),
    "E0013": Code("too many imports", "At most 100 files may be imported.", "Merge some of them."),
    # ------------------------------------------------------------ syntax
    "E0101": Code("unexpected character", "This character has no meaning outside strings and comments.", "Remove it; strings are written in double quotes."),
    "E0102": Code("unterminated string", "A string must end on the line on which it begins.", '`import "llama.par"`'),
    "E0103": Code("unexpected token", "The grammar expects something else here; `help` says what.", "`axis batch = 32`, not `axis batch 32`."),
    "E0104": Code("reserved word as a name", "Keywords, and `param`, `state`, `grad`, `all`, `auto`, cannot be names.", "`let error = …` instead of `let loss = …`."),
    "E0105": Code("mismatched brackets", "A bracket is never closed, closes nothing, or closes a bracket of another kind.", "`[1, 2]`, not `[1, 2)`."),
    "E0106": Code("malformed number", "Underscores may only separate digits.", "`10_000`, not `10__000`."),
    "E0107": Code("unknown unit", "The units are %, B and its multiples (GB, GiB), the same per second, FLOP/s and its multiples, ns, us, ms, s, min and h.", "`80GiB`, `900GB/s`, `989TFLOP/s`, `5us`, `8%`."),
    "E0108": Code("cannot be formatted", "The canonical form would not parse to the same tree. This is a bug in the formatter; the file is left unchanged.", "Please report it with the file."),
    # ------------------------------------------------------------ models
    "E0201": Code("unknown name", "No input, parameter, sample, `let` or constant of this name is in scope here.", "Check the spelling; an axis's size is `size(axis)`."),
    "E0202": Code("unknown axis", "Where an axis is expected, only declared axes are looked up.", "`axis heads = 12`"),
    "E0203": Code("tensor lacks an axis", "The operation works along an axis that the tensor does not have.", "`dot(h, wq, over = embed)` where both have `embed`."),
    "E0204": Code("axes do not match", "One operand's axes must include the other's; arguments of blocks must have the declared axes.", "`x + expand(bias, seq)`; `attention(y, seq -> target)`."),
    "E0205": Code("wrong dtype", "Operands must have the same dtype; integers and floats mix only through `cast`. Integers cannot be divided.", "`cast(ids, f32) / 2`"),
    "E0206": Code("unknown function", "No block of the file and no built-in function has this name.", "Check the spelling, or declare a `block`."),
    "E0207": Code("unknown dtype", "The dtypes are f32, bf16, f64, i64, i32 and bool.", "`tokens: i64[batch, seq]`"),
    "E0208": Code("used before it is bound", "Statements are read in order, and names first bound inside a `repeat` are local to it.", "Move the `let` up."),
    "E0209": Code("unknown or extra argument", "The function has no argument of this name, or takes fewer positional arguments.", "`softmax(s, over = keys)`, not `softmax(s, axis = keys)`."),
    "E0210": Code("missing argument", "A required argument is missing.", "`dot(a, b, over = embed)`"),
    "E0211": Code("argument given twice", "An argument is given both by position and by name, or twice by name.", "Remove one of them."),
    "E0212": Code("wrong kind of argument", "The argument is a tensor, a number, an axis, a string or a list where another of these is expected.", "`size(embed)` is a number, `embed` an axis."),
    "E0213": Code("number instead of a tensor", "A tensor is expected here, not a number.", "`expand(x, axis)` or an operation on a tensor."),
    "E0214": Code("number out of range", "The argument is outside the range for which the function is defined.", "`dropout(x, rate = 0.1)`"),
    "E0215": Code("sizes do not match", "`split` and `merge` keep the number of elements, `concat` adds sizes, `slice` stays within its axis, `rename` keeps the size. A window has (axis + padding - window) / stride + 1 positions, rounded down.", "`axis embed = heads * key`"),
    "E0216": Code("duplicate axis", "A tensor has each of its axes only once.", "`rename(x, seq -> keys)` before the product."),
    "E0217": Code("name declared twice", "Inputs, parameters and samples of one scope must have different names.", "Rename one of them."),
    "E0218": Code("recursive block", "Blocks are expanded, so they cannot be recursive.", "`repeat 12 as layer { let x = mlp(x) }`"),
    "E0219": Code("wrong number of results", "A block that returns several values must be bound to as many names.", "`let a, b = both(x)`"),
    "E0220": Code("carried value changes its type", "A name bound before a `repeat` and rebound inside is carried from iteration to iteration and must keep its axes and dtype.", "Give the new value another name."),
    "E0221": Code("invalid loss", "A model has exactly one `loss`, a scalar float, at its top level.", "`loss cross_entropy(logits, targets, over = vocab)`"),
    "E0222": Code("invalid metric", "A metric is a scalar with a unique name, at the top level of a model.", "`metric accuracy = accuracy(logits, targets, over = vocab)`"),
    "E0223": Code("invalid arrow", "Arrows rename or resize axes; the function determines how many it takes, and which side is a list.", "`split(x, embed -> [heads, key])`"),
    "E0224": Code("invalid arithmetic", "A division by zero, a root of a negative number, or a result that is too large or too close to zero.", "Check the numbers."),
    # ------------------------------------------------------------ declarations and settings
    "E0301": Code("declared twice", "Two declarations of the same kind have the same name, or an axis and a constant have; a file has one `train`.", "Rename one of them."),
    "E0302": Code("unknown declaration", "`train`, a layout or the command line names something that is not declared.", "Check the spelling."),
    "E0303": Code("unknown entry", "The table has no entry of this name.", "`train { steps = 100 … }`"),
    "E0304": Code("entry given twice", "An entry may appear only once in its table.", "Remove one of them."),
    "E0305": Code("missing entry", "A train block needs `data`, `optimizer` and `steps`.", "`steps = 1_000`"),
    "E0306": Code("wrong kind of value", "The value is a number, word, string, list or call where another of these is expected.", '`data = text("corpus/*.txt")`'),
    "E0307": Code("wrong or missing unit", "Ratios, sizes in bytes, rates and times need a unit; counts have none.", "`holdout = 10%`, `memory = 80GiB`"),
    "E0308": Code("value out of range", "The number is outside the range that the setting allows.", "`momentum = 0.9`"),
    "E0309": Code("unknown setting", "No schedule, optimizer, data source, distribution, device, link or measure has this name.", "`optimizer = adamw(lr = 1e-3)`"),
    "E0310": Code("not a positive integer", "Sizes and counts must be positive integers; axis arithmetic is exact.", "`axis ffn = 8 * embed / 3` needs `embed` divisible by 3."),
    "E0311": Code("cyclic definition", "The size of an axis, or a constant, depends on itself, directly or through others.", "Give one of them a number."),
    "E0313": Code("unknown mesh axis", "The mesh has no axis of this name.", "`mesh cluster(data = 2, pipe = 4)`"),
    "E0314": Code("invalid stage numbers", "Stages count from 0, a range must not be empty, and the number of layers per stage must be positive.", "`place encoder -> pipe[0..1]`"),
    "E0315": Code("invalid override", "An override on the command line is `key=value` for an axis, a constant, `MESH.AXIS`, `train.KEY`, `SCHEDULE.ARGUMENT`, `model`, `layout` or `schedule`.", "`partita run gpt.par batch=128 train.steps=10`"),
    "E0316": Code("ambiguous choice", "Several models, layouts or schedules are declared, and `train` does not select one.", "`train { layout = megatron … }`"),
    "E0317": Code("unknown part of the model", "A layout or an optimizer names a block, repeat, parameter or value that the model does not have.", "`stage layer -> pipe` for `repeat 12 as layer`."),
    "E0318": Code("incompatible entries", "An entry of `train` requires another: `on_bad_step = rewind` restores a checkpoint, but the file has no `checkpoint` entry.", "`checkpoint = every(500)`, or `on_bad_step = skip`."),
    "E0319": Code("rule after a rule for all", "The rules of an optimizer are tried in order: after one for `all`, no other applies.", "`update all -> …` as the last rule."),
    "E0330": Code("not in the Python file", "An `op` names a function that its Python file does not mention. The file is read for this, and not run.", "`forward = python(\"kernels.py\", \"fused_norm\")` for `def fused_norm(x, w):`."),
    # ------------------------------------------------------------ layout and placement
    "E0401": Code("not supported yet", "This is part of the language, but this version does not implement it.", "Remove it, or use what `help` suggests."),
    "E0402": Code("unused mesh axis", "No rule uses a mesh axis larger than 1, so its ranks would do redundant work.", "Add a rule that uses it, or set its size to 1."),
    "E0403": Code("more stages than layers", "Every stage needs at least one iteration of the repeats that `stage` names.", "Fewer ranks, or fewer chunks."),
    "E0404": Code("stages do not match", "The number of layers per stage, or the stages of a `place` rule, do not match the number of stages.", "`stage layer -> pipe [3, 3]` for 6 layers on 2 stages."),
    "E0405": Code("value flows backwards", "A value is produced on a later stage than one that reads it.", "Change the `place` rule."),
    "E0406": Code("batch does not divide evenly", "The batch axis must be divisible by the number of microbatches.", "`axis batch = 32` with `microbatches = 8`."),
    "E0407": Code("loss cannot be split", "After the reduction over the batch the loss may only be scaled or added to, so that microbatches can be summed.", "Move the nonlinear part into a metric."),
    "E0408": Code("parameter does not reach the loss", "Such a parameter has no gradient, and was probably forgotten.", "Use it, or remove it."),
    "E0409": Code("rule matches nothing", "A path of a `place` or `recompute` rule does not name a part of the model, or that of an optimizer's rule no parameter.", "Check the spelling."),
    "E0410": Code("nothing to compile", "Compiling needs a model and a train block.", "Add `train { … }`."),
    "E0411": Code("size does not divide evenly", "An axis that a rule splits must be divisible by the sizes of its mesh axes, after the batch is split into microbatches.", "Choose sizes of the axis and of the mesh that divide evenly."),
    "E0412": Code("mesh axis used twice", "A mesh axis is used either for the pipeline or to split tensors, not both.", "Use another mesh axis for one of the two."),
    "E0413": Code("not a profile", "`profile(…)` reads a file written by `partita profile`.", "`partita profile -o machine.json`"),
    "E0414": Code("parameter without a rule", "Every parameter needs a rule of the optimizer: the first that matches it is its own.", "End with `update all -> adamw(…)`, or `freeze all`."),
    "E0415": Code("nothing is trained", "The optimizer freezes every parameter of the model.", "`update … -> adamw(…)` before `freeze all`."),
    "E0416": Code("optimizer does not fit", "The optimizer of a rule cannot update a parameter that the rule matches: `muon` updates matrices, which a `dot` reads.", "`update matrices -> muon(…)`, then a rule for the others."),
    # ------------------------------------------------------------ schedules
    "E0501": Code("invalid schedule", "Every forward and backward action of every chunk and microbatch must appear exactly once, after its dependencies.", "See the invariants in docs/schedules.md."),
    "E0502": Code("schedule deadlocks", "Ranks would wait for each other forever; the message shows the cycle.", "Reorder the actions in the cycle."),
    "E0503": Code("transfers do not match", "The sends and receives of a channel must match one to one and in order.", "See the invariants in docs/schedules.md."),
    "E0504": Code("too many live activations", "The schedule holds more activations than the bound that it declares.", "Raise its bound, or run backward actions earlier."),
    "E0505": Code("schedule does not fit the mesh", "The schedule does not support this combination of ranks, chunks, microbatches and groups, or no order fits into the memory.", "`interleaved_1f1b(microbatches = 8, chunks = 2)` on 4 ranks."),
    "E0506": Code("malformed schedule file", "A schedule file has one line per rank, of actions such as `F0.0 B0.0 W0.0`: kind, chunk, microbatch.", "Check the word that the message names."),
    # ------------------------------------------------------------ runs
    "E0601": Code("data not found", "No file has this name, or matches this pattern.", "Paths are relative to the .par file."),
    "E0602": Code("data outside the root", "Data files must lie within the directory of the .par file.", "Move the data there."),
    "E0603": Code("data cannot be read", "The content of the file is not what its data source expects.", "`dtype` must be what the file was written with."),
    "E0604": Code("too little data", "One window, or one batch, is longer than the data, or than its held-out fraction.", "A smaller `batch` or `seq`, or more data."),
    "E0605": Code("id out of range", "The data, or a computed value, has ids beyond the size of the axis that they index.", "`axis vocab = 256` for bytes."),
    "E0606": Code("input missing in the data", "Inputs of the model are bound by name to what the data source yields.", "`tokens` and `targets` for text."),
    "E0607": Code("data of the wrong shape", "The shapes or dtypes of the arrays differ from those of the model's inputs.", "Compare the shapes in the message."),
    "E0608": Code("no evaluation data", "`eval` needs data that training does not see.", "`stdlib(holdout = 5%)`"),
    "E0609": Code("unknown range of random integers", "`random()` draws integers below the size of the axis that they index, and this input indexes none.", "Use the input in an `embedding` or a loss."),
    "E0610": Code("number of ranks differs from the mesh", "The launcher started a different number of processes than the mesh has ranks.", "`torchrun --nproc-per-node 4` for a mesh of four."),
    "E0611": Code("no GPU for a rank", "With `--transport nccl` each rank uses one GPU of its machine, by its local rank.", "At most as many ranks per machine as it has GPUs, or `--transport gloo`."),
    "E0612": Code("ranks have different files", "Every rank reads the file by itself, and before the first step they compare hashes of its meaning and of the compiled program. The notes show which ranks have which.", "Copy the same file to all machines; give all ranks the same overrides, and the same version of Partita."),
    "E0613": Code("too many ranks for one machine", "A standalone `partita run` starts at most 256 ranks, so that a file alone cannot flood the machine with processes.", "`torchrun` or Slurm on several machines; or a smaller mesh: `cluster.data=1`."),
    "E0614": Code("no C++ compiler for torch", "With `compile = true` on a CPU, torch generates C++ and needs a compiler.", "Install g++ or clang++, or name one in `CXX`; or remove `compile`."),
    "E0615": Code("ranks have different data", "Before the first step the ranks compare their data files: names, sizes, and hashes of their content (of large files, in part). The notes say which differ.", "Copy the same files to all machines."),
    "E0620": Code("Python code is not allowed", "The file has operations of its own, which are Python code. `run` and `verify` import it only if they are told to, since it can do whatever you can; no other command ever does.", "Read the Python file; then `partita run gpt.par --allow-python`."),
    "E0621": Code("Python file cannot be imported", "The Python file of an `op` raises an error when it is imported, or does not define the function. The notes name the lines that led there.", "Run the file with `python` first. It may import what is installed, but no files beside it."),
    "E0622": Code("operation failed", "A Python function of an `op` raised an error, or did not return what is declared: a tensor of the shape and dtype of the result, or a gradient for each float operand. The notes name the lines that led there.", "Tensors come with their axes in the order in which the `op` declares them."),
    # ------------------------------------------------------------ verification
    "E0701": Code("translation validation failed", "An operation or a collective does not produce the layout that its result claims. This is a bug in the compiler, not in the file.", "Please report it with the file."),
    "E0702": Code("execution differs", "On a small proxy of the file, the partitioned program does not compute the same as the single-device program. This is a bug in the compiler, not in the file.", "Please report it with the file."),
    "E0704": Code("out of memory", "By its static bound, a rank's tensors need more memory than the mesh's `device` has. Workspace of kernels comes on top.", "`shard param -> data`, `recompute`, more ranks for the axes that are split, or a schedule with fewer microbatches in flight."),
    "E0705": Code("claim does not hold", "A claim of an `expect` block is not true of the compiled program. The notes show its value and what contributes most to it.", "Change the layout or the schedule as `help` says; or relax the claim."),
    "E0710": Code("operation is not what it declares", "`verify` runs the Python functions of an `op` on random tensors, and something that is declared of them is false: they cannot be computed in parts along an axis of `split`, are not linear, change their operands, return something else each time, or the gradient is not that of finite differences. Layouts rely on it, and would change the numbers.", "Remove what is false from the `op`, or correct the function."),
    # ------------------------------------------------------------ checkpoints
    "E0801": Code("checkpoints outside the directory", "The `dir` of a `checkpoint` entry must lie within the directory of the .par file, symbolic links included.", "Omit `dir`: then it is `checkpoints` in the directory of `--run-dir`, which may be anywhere."),
    "E0802": Code("checkpoints cannot be written", "The directory of the checkpoints cannot be created or written to, or is a link.", "Check its permissions, and the free space."),
    "E0803": Code("directory in use", "Another run owns this run directory, or its checkpoint directory.", "Wait for the other run to end, or give this one another `--run-dir`."),
    "E0804": Code("checkpoint of another model", "A run resumes from the newest checkpoint in its directory, which must be of the same model: the same tensors, optimizer and operations. The notes show what differs. Layout, mesh, schedule and settings such as the learning rate may differ.", "Another `--run-dir`; or move the directory away to start over."),
    "E0805": Code("checkpoint of a newer version", "The checkpoint was written by a newer version of Partita, in a format that this one does not know.", "Use the version that wrote it."),
    "E0806": Code("no intact checkpoint", "There are checkpoints, but all of them are damaged; starting over would hide that.", "Restore one from a backup; or move the directory away to start over."),
    "E0807": Code("no such checkpoint", "The directory has no checkpoint, or none of this step.", "`partita checkpoint ls DIR` lists what is there."),
    "E0808": Code("checkpoint is damaged", "A file of the checkpoint is missing, is a link, or its size or content is not what was saved. The message names it.", "`partita checkpoint ls DIR` lists others; a run skips damaged ones by itself."),
    "E0809": Code("tensors do not match", "An imported file lacks tensors of the model, or has them in other shapes.", "Map the names, and the order of axes, with `--names`."),
    "E0810": Code("invalid name map", "A name map is a JSON object from names of this model to names of the other, or to objects with `name` and `axes`. Names must be valid in a safetensors file: not `__metadata__`, and without lone surrogates.", '`{"gpt.wte": "transformer.wte.weight"}`'),
    "E0811": Code("unused tensors", "With `--strict`, every tensor of an imported file must be one of the model's.", "Map their names with `--names`, or omit `--strict`."),
    "E0812": Code("ambiguous order of axes", "With `--strict`, a tensor that has several axes of the same size must have its `axes` in the name map: its shape does not show whether it is transposed.", '`{"m.wq": {"name": "q_proj.weight", "axes": ["out", "in"]}}`'),
    "E0813": Code("numbers that cannot be trained from", "An imported tensor has NaN, an infinity, or a number that is too large for the dtype of the parameter. The notes name the tensor, how many, and the position of the first.", "Check how the file was made, or declare the parameter with a wider dtype."),
    "E0814": Code("checkpoints would be ignored", "The run directory has checkpoints that this run would not resume from: the file has no `checkpoint` entry, or one with another directory. Training would start over next to them.", "`checkpoint = every(100)` in the train block; or another `--run-dir`."),
    "E0815": Code("data has changed since the checkpoint", "A checkpoint records which files it was trained on: names, sizes, and hashes of their content (of large files, in part). The run that resumes from it has different ones. The notes say how they differ.", "Restore the files; or `--changed-data` to resume with the data as it is now."),
    # ------------------------------------------------------------ planning
    "E0901": Code("devices cannot all be used", "No mesh with this many devices divides the batch, the axes that can be split and the number of layers. The notes show them.", "Another number of devices, or a batch with more factors."),
    "E0902": Code("nothing fits", "No candidate that was found fits into the memory of the device. The notes show what came closest.", "More devices, a smaller `batch`, or a shorter sequence."),
    "E0903": Code("plan in another directory", "The paths in a plan (imports, data, profiles) are relative to its directory, as in the original file.", "`partita plan specs/gpt.par -o specs/planned.par`"),
    # ------------------------------------------------------------ warnings
    "W0201": Code("unused name", "The main file declares something that nothing uses.", "Remove it, or begin its name with `_`."),
    "W0301": Code("rule never applies", "This rule of a layout or an optimizer applies to no tensor of the model.", "Remove it, or move it before the rule that shadows it."),
    "W0302": Code("redundant computation", "A mesh axis splits only stored tensors, and no computed value: its ranks all compute the same.", "Split the batch over it: `shard batch -> data`."),
    "W0601": Code("evaluation is not finite", "The loss of an evaluation is NaN or infinite. This does not invalidate the parameters: training continues to the end, and the exit status is then 3. The note says where it began.", "Look at the rows of the held-out data that the note names."),
    "W0602": Code("step skipped", "A step was bad, and `on_bad_step` lets the run get past it. It counts for the data and the learning rate; its update is dropped, and with `rewind` also those since the last checkpoint.", "Look at the rows that the notes name, if there are many."),
    "W0603": Code("ids look split in half", "The ids at even positions of a file are of very different magnitudes from those at odd ones. That happens when wider ids are read as pairs of halves.", "`dtype` as the file was written; nothing, if the ids really alternate."),
    "W0604": Code("slow rank", "A rank was busy for longer than its peers, which waited for it, and that cost the run more than a tenth of its time. The message names the action in which it lost most. `metrics.jsonl` has it by period, as `slow_ranks`.", "Check what else runs on that machine, its clock speed and its disk; `--trace` shows when each rank did what."),
    "W0701": Code("claim does not hold", "A claim of an `expect` block is not true of this program. Training continues: the claim may not be meant for another machine, or for other overrides.", "`partita compile` rejects the file, and says what contributes most."),
    "W0702": Code("execution undecided", "Translation validation passed, but no proxy of the file was found that compiles, runs and can be compared: no small sizes satisfy its constraints, or random data leads to non-finite numbers, or rounding errors grow without bound. Nothing is known to be wrong.", "`log(exp(x) + 1.0)` instead of a logarithm of something that may be negative."),
    "W0801": Code("checkpoint skipped", "A checkpoint is damaged; the run resumes from the one before it, and renames the damaged one to end in `.damaged`.", "Look for the cause: a checkpoint does not change once it is written."),
    "W0802": Code("checkpoint not saved", "A save failed; the message says why. Training continues, and earlier checkpoints stay. If the last save of a run fails, it ends with exit status 3.", "Free some space. The next save is attempted when it is due."),
    "W0803": Code("training waits for a checkpoint", "The previous checkpoint was still being written when the next one was due. Only one is written at a time.", "A larger interval, or a faster disk."),
    "W0804": Code("settings differ from the checkpoint", "The run resumes from a checkpoint under other settings: data, batch, optimizer, precision or seed. That is allowed, but it is no longer the same run.", "Nothing, if it is intended."),
    "W0805": Code("fewer checkpoints kept", "There is no space for `keep` checkpoints and one that is being saved. The oldest one was removed, or one that was set aside as damaged, and the save was retried. The newest intact checkpoint is never removed.", "Free some space, or lower `keep`."),
    "W0806": Code("directory cannot be locked", "The file system does not support locks, so nothing prevents two runs from writing checkpoints to one directory.", "Make sure that only one run does; on NFS, mount with locking."),
    "W0807": Code("order of axes is a guess", "Imported tensors have several axes of the same size, and the name map does not say in which order they are in the file. The order of the .par file is assumed. If the file has them transposed, training silently starts from wrong weights.", "Give their `axes` in the `--names` map; with `--strict` this is an error."),
}
# fmt: on

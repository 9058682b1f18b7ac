"""What to do about errors of some codes that come without a help of their own. docs/errors.md explains all codes.

E00 files and limits, E01 syntax, E02 models, E03 declarations and settings, E04 placement, E05 schedules, E06 runs,
E07 verification, E08 checkpoints, E09 planning, E10 use of trained models, E11 machines, E12 import of modules; W is a
warning. Tests check that the page has every code that is reported, and gives the same advice.
"""

from __future__ import annotations

from collections.abc import Mapping

# By code; a code whose fix is an example of what fits some files has none.
ADVICE: Mapping[str, str] = {
    "E0001": "check the name; imports are relative to the importing file",
    "E0002": "save the file as UTF-8",
    "E0003": "remove it",
    "E0005": "bind parts of the expression with `let`",
    "E0007": "check the sizes that the message names",
    "E0008": "lower the count of the `repeat`",
    "E0009": "fix the first errors, and check again",
    "E0011": "move what both need into a third file",
    "E0012": "rename one of them",
    "E0013": "merge some of them",
    "E0101": "remove it; strings are written in double quotes",
    "E0102": 'end it with a double quote: `import "llama.par"`',
    "E0105": "close each bracket by its own kind: `[1, 2]`, not `[1, 2)`",
    "E0108": "please report it with the file",
    "E0201": "check the spelling; an axis's size is `size(axis)`",
    "E0206": "check the spelling, or declare a `block`",
    "E0208": "move the `let` up",
    "E0211": "remove one of them",
    "E0217": "rename one of them",
    "E0220": "give the new value another name",
    "E0224": "check the numbers",
    "E0229": "write two repeats, one after the other",
    "E0301": "rename one of them",
    "E0302": "check the spelling",
    "E0304": "remove one of them",
    "E0308": "a number that the message allows",
    "E0310": "a whole number of 1 or more; `8 * embed / 3` needs `embed` divisible by 3",
    "E0311": "give one of them a number",
    "E0322": "remove one of them",
    "E0401": "remove it, or use what `help` suggests",
    "E0402": "add a rule that uses it, or set its size to 1",
    "E0403": "fewer ranks, or fewer chunks",
    "E0405": "change the `place` rule",
    "E0407": "move the nonlinear part into a metric; cut the batch alone",
    "E0408": "use it, remove it, or freeze it; another loss after `by`",
    "E0409": "check the spelling",
    "E0410": "add `train { … }`",
    "E0411": (
        "choose sizes of the axis and of the mesh that divide evenly; or say `padded` or `repeated` after the mesh axes"
    ),
    "E0412": "use another mesh axis for one of the two",
    "E0414": "end with `update all -> adamw(…)`, or `freeze all`",
    "E0417": "split it over another mesh axis",
    "E0422": "leave out `graphs`, or what the message names",
    "E0501": "see the invariants in docs/schedules.md",
    "E0502": "reorder the actions in the cycle",
    "E0503": "see the invariants in docs/schedules.md",
    "E0504": "raise its bound, or run backward actions earlier",
    "E0506": "check the word that the message names",
    "E0601": "paths are relative to the .par file",
    "E0602": "move the data there",
    "E0603": "check that the file is whole, and of the kind that the data source reads",
    "E0604": "a smaller `batch` or `seq`, or more data",
    "E0607": "compare the shapes in the message",
    "E0609": "use the input in an `embedding` or a loss",
    "E0611": "at most as many ranks per machine as it has GPUs, or `--transport gloo`",
    "E0612": "copy the same file to all machines; give all ranks the same overrides, and the same version of Partita",
    "E0614": "install g++ or clang++, or name one in `CXX`; or remove `compile`",
    "E0615": "copy the same files to all machines",
    "E0616": 'correct that line; or `jsonl("corpus/*.jsonl", field = "content")`, if another field has the text',
    "E0620": "read the Python file; then `partita run gpt.par --allow-python`",
    "E0621": "run the file with `python` first. It may import what is installed, but no files beside it",
    "E0622": "tensors come with their axes in the order in which the `op` declares them",
    "E0625": (
        "install a C++ compiler on all machines; or `PARTITA_NATIVE=0` on all. "
        "`partita doctor` shows what a machine has"
    ),
    "E0626": (
        "a smaller mesh or batch; several machines, by `torchrun` or Slurm; "
        "`--transport virtual`, if it is the processes that are too many"
    ),
    "E0627": (
        "check the id, `hf auth login`, or, where there is a network, "
        "`hf download Qwen/Qwen3-0.6B --local-dir qwen3`; then name that folder"
    ),
    "E0701": "please report it with the file",
    "E0702": "please report it with the file",
    "E0705": "change the layout or the schedule as `help` says; or relax the claim",
    "E0706": "please report it with the file",
    "E0707": "please report it with the file",
    "E0710": "remove what is false from the `op`, or correct the function",
    "E0801": "omit `dir`: then it is `checkpoints` in the directory of `--run-dir`, which may be anywhere",
    "E0802": "check its permissions, and the free space",
    "E0803": "wait for the other run to end, or give this one another `--run-dir`",
    "E0804": "another `--run-dir`; or move the directory away to start over",
    "E0805": "use the version that wrote it",
    "E0806": "restore one from a backup; or move the directory away to start over",
    "E0810": "another name",
    "E0811": "a line in `weights`, or `skip` for what the model does not have; or omit `--strict`",
    "E0813": "check how the file was made, or declare the parameter with a wider dtype",
    "E0815": "restore the files; or `--changed-data` to resume with the data as it is now",
    "E0817": "a parameter of its own, and a line, for each",
    "E0819": "check the address, the network, and that your credentials may read there",
    "E0901": "another number of devices, or a batch with more factors; no `--keep-mesh`",
    "E0902": "more devices, a smaller `batch`, or a shorter sequence",
    "E1002": "a shorter prompt; the tokenizer with which the model was trained",
    "E1102": "a driver and a build of torch that fit each other; `nvidia-smi -q` shows the state of each GPU",
    "E1103": "firewalls, `MASTER_ADDR`, and the interface that `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` name",
    "E1106": "another machine; if it is the same there, please report it",
    "E1107": "the name by which this machine knows the first one; one of the interfaces that the message lists",
    "E1108": "one image for all",
    "E1202": "change that line; or write the file by hand, from the part that is understood",
    "E1203": "example inputs of other sizes, longer than any window; or report it with the module",
}

"""Checkpoints: everything a run needs to resume as if it had never stopped, on any mesh and in any layout.

    DIR/lock                            held by the run that writes here
    DIR/step-00000010/                  a commit: complete, on disk, never modified
        manifest.json                   its contents (`manifest`), with a SHA-256 of itself
        rank-0.safetensors …            the parts that each rank saved
    DIR/step-00000020.partial-81f3…/    a save in progress or interrupted: not a commit, removed at the next start
        rank-0.json …                   markers: this rank's file is on disk
    DIR/step-00000005.removed/          a commit beyond `keep`, being removed
    DIR/step-00000008.damaged/          a commit that could not be read and was skipped

At an address, where nothing can be renamed, the manifest is what makes a commit (`address_store`).

A tensor is sharded over the mesh axes that its layout names. Along all other axes every rank holds the same values, and
one of them saves these, at the coordinates given in the manifest (`parts`). Nothing else is needed to read any region
of any tensor. Everything a step draws from (data, samples, dropout) is a function of the seed and the step, so the step
number is the data cursor, and the seed is the state of the random number generator.
"""

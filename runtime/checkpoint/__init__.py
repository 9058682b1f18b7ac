"""Checkpoints: what a run needs to go on as if nothing had happened, on any mesh and in any layout.

    DIR/lock                            held by the run that writes here
    DIR/step-00000010/                  a commit: complete, on disk, never changed again
        manifest.json                   what it holds (`manifest`), sealed by its own SHA-256
        rank-0.safetensors …            the parts that each rank has saved
    DIR/step-00000020.partial-81f3…/    a save under way, or one that was cut off: no commit, removed at the next start
        rank-0.json …                   markers: this rank's file is on disk
    DIR/step-00000005.removed/          a commit beyond `keep`, while it is being removed
    DIR/step-00000008.damaged/          a commit that could not be read, and was passed over

A tensor is cut along the mesh axes that its layout names. Along all others every rank holds the same, and one of them
saves it, at the coordinates that the manifest says (`parts`). Nothing else has to be known to read any part of any
tensor, whoever wants it. All that a step draws from (data, samples, dropout) is a function of the seed and the step, so
the number of the step is the cursor of the data, and the seed the state of the random numbers.
"""

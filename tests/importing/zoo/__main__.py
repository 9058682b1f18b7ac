"""`python -m tests.importing.zoo [NAME …]`: write the files of modules to `golden`, to be read before they are kept."""

import sys
import warnings

from partita.importing.imported import imported
from tests.importing.zoo import theirs
from tests.importing.zoo.own import MODULES
from tests.importing.zoo.test_zoo import GOLDEN, own

warnings.simplefilter("ignore")
for name in sys.argv[1:] or (*MODULES, *theirs.NAMES):
    module, inputs = own(name) if name in MODULES else theirs.made(name)
    imported(module.train(), inputs, name).write(GOLDEN / f"{name}.par")

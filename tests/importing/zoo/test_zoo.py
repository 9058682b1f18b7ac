"""Files of many modules: written as `golden` has them, which a person has read, equal, and verified when split."""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from shutil import copy

import pytest
import torch
from torch import Tensor, nn

from partita.cli.main import main
from partita.dsl.load import load_text
from partita.importing.imported import imported
from partita.importing.prove import prove
from tests.importing.zoo import theirs
from tests.importing.zoo.own import MODULES

GOLDEN = Path(__file__).with_name("golden")
FAST = ("mlp", "nanogpt", "lstm", "two_tower")
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def own(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    return make().train(), inputs()


def holds(name: str, module: nn.Module, inputs: dict[str, Tensor]) -> None:
    """The file is that in `golden`, and proven equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = imported(module, inputs, name)
        spec, diagnostics = load_text(re.sub(r"file\([^)]*\)", "ones()", file.text))
        assert spec is not None, [each.render() for each in diagnostics]
        proof = prove(module, inputs, file)
    assert proof.holds, proof
    assert len(proof.sizes) > 1
    golden = GOLDEN / f"{name}.par"
    assert golden.is_file(), f"there is no {golden}: `python -m tests.importing.zoo {name}` writes it"
    text = file.with_tables(f"{name}.safetensors")
    assert text == golden.read_text(), f"{name} is written otherwise: `python -m tests.importing.zoo {name}`"


@pytest.mark.parametrize("name", FAST)
def test_a_file_is_equal_to_its_module(name: str):
    holds(name, *own(name))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(MODULES.keys() - {*FAST}))
def test_files_are_equal_to_their_modules(name: str):
    holds(name, *own(name))


@needs_transformers
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", theirs.NAMES)
def test_files_are_equal_to_models_of_transformers(name: str):
    module, inputs = theirs.made(name)
    holds(name, module.train(), inputs)


SPLIT = """
mesh pod(data = {data}, tensor = {tensor}, pipe = {pipe})

layout split on pod {{
  {rules}
}}

schedule turns = one_f_one_b(microbatches = {microbatches})
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.par")))
@pytest.mark.parametrize("way", ["tensor", "pipe"])
def test_files_are_verified_when_they_are_split(name: str, way: str, tmp_path: Path):
    """Along heads or hidden units, and in stages where there is a repeat."""
    text = (GOLDEN / f"{name}.par").read_text()
    spec, _ = load_text(text)
    assert spec is not None
    axes = {axis.name: axis.size for axis in spec.axes.values()}
    split = next(
        (each for each in ("groups", "heads", "ffn", "hidden", "embed") if axes.get(each, 1) % 2 == 0 and each in axes),
        None,
    )
    staged = "repeat " in text.partition("\nmodel ")[2] and "update" not in text
    sizes = {"data": 1, "tensor": 1, "pipe": 1, "microbatches": 1}
    if way == "tensor":
        rules = f"shard {split} -> tensor"
        sizes["tensor"] = 2
        if split is None:
            pytest.skip("there is no axis that divides")
    else:
        rules, sizes["pipe"], sizes["microbatches"] = "stage layer -> pipe", 2, 1 if "other_batch" in text else 2
        if not staged:
            pytest.skip("there is no repeat to cut")
    file = tmp_path / f"{name}.par"
    if (tables := GOLDEN / f"{name}.safetensors").is_file():
        copy(tables, tmp_path)
    laid_out = text.replace(
        "train {", SPLIT.format(rules=rules, **sizes) + "\ntrain {\n  layout = split\n  schedule = turns", 1
    )
    file.write_text(laid_out)
    assert main(["verify", str(file), "batch=4"]) == 0

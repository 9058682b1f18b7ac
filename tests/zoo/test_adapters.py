"""Adapters of a model that `transformers` saved: trained here, they go out as PEFT loads them, or in the matrices."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from partita.cli.main import main
from partita.runtime.outputs import outputs
from tests.marks import every
from tests.zoo.against import ZOO, check, draw, loaded
from tests.zoo.test_against import model
from tests.zoo.test_foreign import read

# By name of the case: the model, and the rules of its adapters.
CASES = {
    "joined": (
        "gpt2",
        "lora attention.wq, wo -> dora(rank = 2)\n  lora wv -> dora(rank = 2, alpha = 5)\n"
        "  lora mlp -> dora(rank = 3, alpha = 5)",
    ),
    "llama": ("llama3", "lora layer.attention, mlp.down -> lora(rank = 4, alpha = 8)"),
    "layers": ("llama3", "lora layer[1].mlp.gate -> lora(rank = 3, alpha = 1)\n  lora wq -> lora(rank = 2)"),
    "dora": ("llama3", "lora layer -> dora(rank = 2)"),
}


@pytest.mark.parametrize("case", every(4, [*CASES]))
def test_they_go_out_as_peft_loads_them(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name, rules = CASES[case]
    against = model(name)
    text = (
        (ZOO / against.file)
        .read_text()
        .replace("\ntrain {", f"\nadapters own {{\n  {rules}\n  freeze all\n}}\n\ntrain {{\n  adapters = own")
    )
    file = tmp_path / against.file
    file.write_text(text)
    overrides = (*against.overrides, "train.data=random()", "train.eval=none", "train.precision=f32", "train.steps=3")
    overrides += ("train.checkpoint=every(3)", "train.optimizer=adamw(lr=1e-1)")
    torch.manual_seed(5)
    theirs = against.theirs()
    draw(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    run, ours = str(tmp_path / "run"), tmp_path / "run" / "checkpoints"
    assert main(["checkpoint", "import", str(ours), str(tmp_path / "theirs"), str(file), *overrides, "--as", "hf"]) == 0
    assert main(["run", str(file), *overrides, "--run-dir", run, "--transport", "virtual"]) == 0
    export = ["checkpoint", "export", run, str(file), *overrides, "--as"]
    assert main([*export, "peft", "-o", str(tmp_path / "adapter")]) == 0
    assert main([*export, "hf", "--merge", "-o", str(tmp_path / "merged")]) == 0
    capsys.readouterr()
    assert main([*export, "hf", "-o", str(tmp_path / "lost")]) == 1
    assert "`--merge` adds them" in capsys.readouterr().err

    spec = loaded(file, *overrides)
    (tokens,) = (
        type
        for input, type in zip(spec.trained[0].body.inputs, spec.trained[0].body.types, strict=False)
        if input == "tokens"
    )
    batch = {"tokens": torch.randint(0, 29, tokens.shape, generator=torch.Generator().manual_seed(3))}
    batch["targets"] = batch["tokens"]
    (found,) = outputs(spec, read(ours), batch).values()
    with torch.no_grad():
        before = against.logits(theirs.eval(), batch)
        merged = type(theirs).from_pretrained(tmp_path / "merged").eval()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module="peft")  # such as of names that it does not find
            adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
        check("merged", found, against.logits(merged, batch))
        check("adapters", found, against.logits(adapted, batch))
    assert (found - before).abs().max() > 1e-2
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"

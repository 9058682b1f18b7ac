"""Models that `transformers` saved come in, are trained, and go out as it reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from partita.cli.main import main
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.outputs import outputs
from tests.marks import soak
from tests.zoo.against import ZOO, Against, check, draw, loaded
from tests.zoo.test_against import MODELS, model

# Those that every run of the tests tries.
ALWAYS = ("gpt2", "llama3")
STEPS = 20


def read(checkpoints: Path) -> dict[str, Tensor]:
    """The parameters of the newest checkpoint."""
    step = steps_in(checkpoints)[-1]
    manifest = read_manifest(checkpoints, step)
    with Commit(checkpoints, manifest) as commit:
        return {each.name: commit.read(each.name) for each in manifest.tensors if "/" not in each.name}


def same_logits(ours: Path, theirs: nn.Module, against: Against, overrides: tuple[str, ...]) -> None:
    spec = loaded(ZOO / against.file, *overrides)
    generator = torch.Generator().manual_seed(3)
    model_, _ = spec.trained
    types = dict(zip(model_.body.inputs, model_.body.types, strict=False))
    batch = {name: torch.randint(0, 29, type.shape, generator=generator) for name, type in types.items()}
    (found,) = outputs(spec, read(ours), batch).values()
    with torch.no_grad():
        expected = against.logits(theirs.eval(), batch)
    check("logits", found, expected)


@pytest.mark.soak
@pytest.mark.parametrize("name", [*ALWAYS, "mixtral", "qwen3_moe", "gemma2", "deepseek_v3", "mamba2"])
def test_there_through_training_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    against = model(name)
    file = str(ZOO / against.file)
    overrides = (*against.overrides, "train.data=random()", "train.eval=none", "train.precision=f32")
    torch.manual_seed(5)
    theirs = against.theirs()
    draw(theirs)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()

    run, ours = str(tmp_path / "run"), tmp_path / "run" / "checkpoints"
    assert main(["checkpoint", "import", str(ours), str(tmp_path / "theirs"), file, *overrides, "--as", "hf"]) == 0
    same_logits(ours, theirs, against, overrides)

    more = (f"train.steps={STEPS}", f"train.checkpoint=every({STEPS})")
    assert main(["run", file, *overrides, *more, "--run-dir", run, "--transport", "virtual"]) == 0
    out = tmp_path / "out"
    export = ["checkpoint", "export", run, "--as", "hf", "-o", str(out), "--shard-size", "20KB"]
    assert main([*export, file, *overrides]) == 0
    again, told = type(theirs).from_pretrained(out, output_loading_info=True)
    assert not any(told[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert steps_in(ours)[-1] == STEPS
    same_logits(ours, again, against, overrides)
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[each], after[each]) for each in before)
    capsys.readouterr()


@pytest.mark.parametrize("name", soak(*MODELS))
def test_what_transformers_saves_is_named_whole(name: str, tmp_path: Path):
    """What goes out untrained is bit by bit what came in."""
    against = model(name)
    file = str(ZOO / against.file)
    overrides = (*against.overrides, "train.data=random()")
    theirs = against.theirs()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = tmp_path / "run" / "checkpoints"
    assert main(["checkpoint", "import", str(ours), str(tmp_path / "theirs"), file, *overrides, "--as", "hf"]) == 0
    export = ["checkpoint", "export", str(ours), file, *overrides, "--as", "hf", "-o", str(tmp_path / "out")]
    assert main(export) == 0
    again, told = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    # Which batch norms do not read: with a momentum, they count no batches.
    missing = {each for each in told["missing_keys"] if not each.endswith("num_batches_tracked")}
    assert not missing
    assert not told["unexpected_keys"]
    after = again.state_dict()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, after[key]), key


@pytest.mark.soak
def test_the_base_of_adapters_comes_in_and_the_adapters_go_out(tmp_path: Path):
    """Adapters begin as the file says, and go out alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=24, num_attention_heads=6, num_key_value_heads=2, intermediate_size=40, vocab_size=29,
        num_hidden_layers=2, head_dim=4,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config)
    draw(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    sizes = ("batch=2", "seq=12", "embed=24", "groups=2", "heads=3", "key=4", "ffn=40", "vocab=29", "layers=2")
    file = [str(ZOO / "lora.par"), *sizes, "train.data=random()"]
    ours, out = tmp_path / "run" / "checkpoints", tmp_path / "out"
    assert main(["checkpoint", "import", str(ours), str(tmp_path / "theirs"), *file, "--as", "hf"]) == 0
    found = read(ours)
    assert torch.equal(found["lora.table"], theirs.model.embed_tokens.weight)
    assert not found["lora.layer.1.attention.wq.lora_b"].any()
    assert found["lora.layer.1.attention.wq.lora_a"].std() > 0
    assert main(["checkpoint", "export", str(ours), *file, "--as", "peft", "-o", str(out)]) == 0
    adapters = load_file(out / "adapter_model.safetensors")
    assert len(adapters) == 8
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert torch.equal(adapters[name], found["lora.layer.1.attention.wq.lora_a"].T)

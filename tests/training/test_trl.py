"""Preference losses against the trainers of TRL, on the same pairs and weights: batches, losses and gradients.

TRL is not among the packages that the tests install: `pip install trl` for these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partita.dsl.load import load
from partita.dsl.names.correspondence import Weights
from partita.runtime.checkpoint.foreign import seen_as_ours, seen_as_theirs
from partita.runtime.data.binding import bind
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import SPECS
from tests.runtime.data.test_chat import TEMPLATES
from tests.runtime.data.test_chat import written as tokenizer_with

pytestmark = pytest.mark.soak
WHY = "`pip install trl` brings what these tests compare with"
trl, orpo = (pytest.importorskip(name, reason=WHY) for name in ("trl", "trl.experimental.orpo"))
datasets, transformers = (pytest.importorskip(name, reason=WHY) for name in ("datasets", "transformers"))

SIZES = ("batch=4", "seq=72", "embed=24", "groups=2", "heads=3", "key=4", "ffn=40", "vocab=320", "layers=2")
CONFIG = transformers.LlamaConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=40,
    vocab_size=320,
    rms_norm_eps=1e-5,
    max_position_embeddings=1 << 17,
    num_labels=1,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
TEXTS = [
    {"prompt": "what is two and two?", "chosen": " it is four.", "rejected": " it is it"},
    {"prompt": "say hello", "chosen": " hello\nthere", "rejected": " no"},
    {"prompt": "and", "chosen": " now", "rejected": " and now and there"},
    {"prompt": "who", "chosen": " is it?", "rejected": ""},
]
EARLIER = [{"role": "user", "content": "say hello"}, {"role": "assistant", "content": "hello"}]
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def message(name: str, text: str) -> dict[str, str]:
    return {"role": ROLES[name], "content": text or "it"}


CHATS = [
    {name: [*(EARLIER if name == "prompt" else ()), message(name, text)] for name, text in row.items()} for row in TEXTS
]
ONE_TOKEN = [{**row, "prompt": "a"} for row in TEXTS]
# Norms, angles and softmax of transformers' Llama are f32 in f64, too.
EXACT = {"f64": {"rtol": 1e-5, "atol": 1e-7}, "f32": {"rtol": 1e-5, "atol": 1e-6}}
DTYPES = {"f64": torch.float64, "f32": torch.float32}


class Both:
    """A file of the zoo, and a module with the same random weights; with one more for a reference."""

    def __init__(self, name: str, kind: type[nn.Module], rows: list[Any], precision: str, folder: Path) -> None:
        torch.manual_seed(3)
        self.tokenizer = tokenizer_with(folder, (TEMPLATES / "llama3.jinja").read_text())
        self.tokenizer.pad_token = "<bos>"
        CONFIG.pad_token_id = self.tokenizer.pad_token_id
        self.module, self.reference = (kind(CONFIG).to(DTYPES[precision]) for _ in range(2))
        with torch.no_grad():
            for each in (*self.module.parameters(), *self.reference.parameters()):
                each.add_(0.1 * torch.randn_like(each))
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = 'train.data=preferences("pairs.jsonl", tokenizer = "own")'
        overrides = (*SIZES, data, f"train.precision={precision}", "train.eval=none", "train.clip=none")
        spec, diagnostics = load(SPECS / "zoo" / f"{name}.par", overrides)
        assert spec is not None, [each.render() for each in diagnostics]
        plan = prepare(spec)
        self.weights: Weights = spec.weights["llama"]
        self.run = VirtualRun(plan)
        self.run.set_parameters(self.ours(lambda each: each))
        data = bind(plan.program, plan.train, folder).dataset
        assert data is not None
        self.order = [int(each.split()[1]) for each in data.row_names(1)]
        self.batch = {each: torch.as_tensor(array) for each, array in data.batch(1).items()}
        self.rows = datasets.Dataset.from_list(rows)
        self.options = {
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "gradient_checkpointing": False,
        }

    def ours(self, read: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
        """What is read of their parameters, by our names."""
        found: dict[str, Tensor] = {}
        for theirs in self.weights.tensors():
            for part in theirs.parts:
                module = self.reference if "reference" in part.name else self.module
                (whole,) = (each for name, each in module.named_parameters() if name in theirs.names)
                value = read(whole)
                if value is not None:
                    ours = found.setdefault(part.name, torch.empty(part.type.shape, dtype=value.dtype))
                    seen_as_theirs(ours, part).copy_(seen_as_ours(value.detach().contiguous(), part, theirs.joined))
        return found

    def same_batch(self, batch: dict[str, Tensor], answers: str | None) -> None:
        """Ids and, if there is a mask of what answers are, targets."""
        ids = batch["input_ids"]
        for side, part in zip(("chosen", "rejected"), ids.chunk(2), strict=True):
            there = batch["attention_mask"].chunk(2)[side == "rejected"]
            tokens = self.batch[f"{side}_tokens"][:, : part.shape[1]]
            torch.testing.assert_close(tokens, part * there)
            if answers is not None:
                own = batch[answers].chunk(2)[side == "rejected"]
                expected = torch.where(own == 1, part, -1)[:, 1:]
                torch.testing.assert_close(self.batch[f"{side}_targets"][:, : part.shape[1] - 1], expected)

    def same_numbers(self, loss: Tensor, **exact: float) -> None:
        """The loss and every gradient."""
        loss.backward()
        found, _ = self.run.step(1, self.batch, 0.0)
        print(f"loss {found:.8f}, off by {abs(found - loss.item()):.2g}")
        assert found == pytest.approx(loss.item(), rel=1e-6)
        expected, gradients = self.ours(lambda each: each.grad), self.run.gradients()
        assert gradients.keys() == {each for each in expected if "reference" not in each}
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], **exact)


@pytest.mark.parametrize("precision", EXACT)
@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
def test_dpo(rows: list[Any], precision: str, tmp_path: Path):
    both = Both("dpo", transformers.LlamaForCausalLM, rows, precision, tmp_path)
    options = trl.DPOConfig(beta=0.1, **both.options)
    trainer = trl.DPOTrainer(
        model=both.module,
        ref_model=both.reference,
        args=options,
        train_dataset=both.rows,
        processing_class=both.tokenizer,
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in both.order])
    both.same_batch(batch, "completion_mask")
    both.same_numbers(trainer.compute_loss(both.module, batch), **EXACT[precision])


@pytest.mark.parametrize("precision", EXACT)
@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
def test_reward(rows: list[Any], precision: str, tmp_path: Path):
    both = Both("reward", transformers.LlamaForSequenceClassification, rows, precision, tmp_path)
    options = trl.RewardConfig(**both.options)
    trainer = trl.RewardTrainer(
        model=both.module, args=options, train_dataset=both.rows, processing_class=both.tokenizer
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in both.order])
    both.same_batch(batch, None)
    both.same_numbers(trainer.compute_loss(both.module, batch), **EXACT[precision])


@pytest.mark.parametrize("rows", [TEXTS, ONE_TOKEN], ids=["texts", "one_token"])
def test_orpo(rows: list[Any], tmp_path: Path):
    """In f32, which TRL makes of likelihoods. It learns prompts, too: that part of its loss is replaced, where they
    have more than the first token, which nothing predicts.
    """
    both = Both("orpo", transformers.LlamaForCausalLM, rows, "f32", tmp_path)
    options = orpo.ORPOConfig(beta=0.1, **both.options)
    trainer = orpo.ORPOTrainer(
        model=both.module, args=options, train_dataset=both.rows, processing_class=both.tokenizer
    )
    batch = {}
    for side in ("chosen", "rejected"):
        tokens, targets = both.batch[f"{side}_tokens"], both.batch[f"{side}_targets"]
        answer = F.pad(targets, (1, 0), value=-1)[:, :-1] != -1
        ends = answer.int().cumsum(1).argmax(1)
        batch[f"{side}_input_ids"] = tokens
        batch[f"{side}_attention_mask"] = (torch.arange(tokens.shape[1]) <= ends[:, None]).long()
        batch[f"{side}_labels"] = torch.where(answer, tokens, -100)
    loss, _ = trainer.get_batch_loss_metrics(both.module, batch)
    if rows is TEXTS:
        *_, with_prompts = trainer.concatenated_forward(both.module, batch)
        logits = both.module(batch["chosen_input_ids"], batch["chosen_attention_mask"]).logits
        answers = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["chosen_labels"][:, 1:].flatten())
        loss = loss - with_prompts + answers
    both.same_numbers(loss, **EXACT["f32"])

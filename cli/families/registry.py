"""The families of models that `partita init CONFIG.json` knows: how the files of the zoo say their configs.

Defaults are those of the configs of `transformers`, for settings that a config leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from partita.cli.families.config import Config, File, published, refuse_problems
from partita.cli.families.decoders import deepseek_v3, gemma2, gpt2, llama, mamba2, mixtral, qwen3_moe
from partita.cli.families.images import clip, resnet, vit
from partita.cli.families.text import bert, t5
from partita.dsl.advice.report import listed
from partita.dsl.diagnostic import refuse, shown

MOST_BYTES = 1 << 24
TOKENIZER = "tokenizer.json"  # as `save_pretrained` of transformers calls it


@frozen
class Family:
    """A `model_type`: its file, the classes of `transformers` that it is, and how it says a config."""

    file: str
    classes: tuple[str, ...]
    say: Callable[[Config, File], None]


def from_config(path: Path, ignored: tuple[str, ...] = ()) -> tuple[str, str]:
    """The `model_type` of a config, and the text of a `.par` file that says it.

    Raises Refused (E0001, E0329), which names what it cannot say.
    """
    values = _read(path)
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        message = f"{path} is of a `model_type` {shown(json.dumps(kind))} that is not known"
        raise refuse("E0329", message, help=f"there are {listed(FAMILIES)}")
    config = Config({key: value for key, value in values.items() if key not in ignored})
    file = File(published(family.file))
    classes = config.get("architectures", [])
    if classes and not {*classes} & {*family.classes}:
        config.problem("architectures", classes, f"and the file is {family.classes[0]}")
    config.fixed(quantization_config=None)
    family.say(config, file)
    config.settle()
    if config.problems:
        raise refuse_problems(str(path), family.file, config.problems)
    beside = path.with_name(TOKENIZER)
    near = beside.is_file() and not beside.is_absolute() and ".." not in beside.parts
    return str(kind), file.written(path.name, beside.as_posix() if near else TOKENIZER)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except OSError as error:
        help = "it is taken for the config.json of a model of Hugging Face, which its page there has: download that; "
        help += "or, for a starter file, `partita init NAME` without `.json`"
        raise refuse("E0001", f"cannot read {path}: {error.strerror}", help=help) from error
    except (ValueError, RecursionError) as error:
        raise refuse("E0329", f"{path} is not a config: {shown(str(error))}") from error
    return values


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama3.par", ("LlamaForCausalLM",), llama),
    "mixtral": Family("mixtral.par", ("MixtralForCausalLM",), mixtral),
    "qwen3_moe": Family("qwen3_moe.par", ("Qwen3MoeForCausalLM",), qwen3_moe),
    "gemma2": Family("gemma2.par", ("Gemma2ForCausalLM",), gemma2),
    "gpt2": Family("gpt2.par", ("GPT2LMHeadModel",), gpt2),
    "deepseek_v3": Family("deepseek_v3.par", ("DeepseekV3ForCausalLM",), deepseek_v3),
    "mamba2": Family("mamba2.par", ("Mamba2ForCausalLM",), mamba2),
    "bert": Family("bert.par", ("BertForMaskedLM", "BertForPreTraining"), bert),
    "t5": Family("t5.par", ("T5ForConditionalGeneration", "T5WithLMHeadModel"), t5),
    "clip": Family("clip.par", ("CLIPModel",), clip),
    "vit": Family("vit.par", ("ViTForImageClassification",), vit),
    "resnet": Family("resnet.par", ("ResNetForImageClassification",), resnet),
}

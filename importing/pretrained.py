"""Models of transformers: a config.json makes modules without memory for parameters, and a small one for the proof.

The file is written of a module as wide as the whole and with all kinds of layers, but few of them, and its repeats are
then as long as those of the whole: all names and shapes of weights must be the module's. The proof is of a small module
of as many layers, whose file must be the same but for numbers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import chain, combinations, groupby
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.nn import functional as F

from partita.dsl.diagnostic import refuse, shown
from partita.dsl.load import load_text, spec_of
from partita.dsl.spec import Spec
from partita.importing.from_torch import Example, quiet
from partita.importing.imported import Imported
from partita.importing.prove import free_axes
from partita.importing.rows import in_rows
from partita.runtime.hub import ADDRESS, MODEL, is_id, model_folder

BATCH, SEQUENCE = 8, 1024  # of the file
EXAMPLE = 2, 10  # what is exported, beyond a window
IMAGE = 64  # rows and columns, where a config says none: of two more at the end of five halvings
WINDOW = 6  # of attention, in what is exported
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")


# ------------------------------------------------------------ what models are for


@frozen
class Task:
    """What models of some classes are for: the suffix of these, the arguments of `forward` by the inputs of the file,
    the input that logits are compared with (or "" where the model computes its loss), and settings of the call.
    """

    suffix: str
    arguments: Mapping[str, str]
    targets: str
    settings: Mapping[str, bool]


TASKS = (
    Task("ForCausalLM", {"tokens": "input_ids"}, "targets", {"use_cache": False}),
    Task("LMHeadModel", {"tokens": "input_ids"}, "targets", {"use_cache": False}),
    Task("ForMaskedLM", {"tokens": "input_ids"}, "targets", {}),
    Task(
        "ForConditionalGeneration",
        {"source": "input_ids", "tokens": "decoder_input_ids"},
        "targets",
        {"use_cache": False},
    ),
    Task("ForImageClassification", {"image": "pixel_values"}, "label", {}),
    Task("CLIPModel", {"tokens": "input_ids", "image": "pixel_values"}, "", {"return_loss": True}),
)
CONTINUING = ("ForCausalLM", "LMHeadModel")
# Where a config names no class, these are asked for one, in this order.
AUTO = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")


@frozen(eq=False)
class Pretrained:
    """The modules of a config: the `whole`, one with `few` layers, and a `small` one of these `sizes`. `length` is of
    the sequences of the file, `more` how many iterations of a repeat it has more than that of few layers, and `window`
    that of its attention, or 0. `tokenizer` is of text that it learns to continue, or ""; it knows how `chats` are
    written.
    """

    name: str
    whole: nn.Module
    few: Example
    small: Example
    length: int
    more: int
    window: int
    sizes: str
    tokenizer: str
    chats: bool


def pretrained(source: str) -> Pretrained:
    """The model of a folder, of a config.json, or of the hub. Raises Refused (E0627, E1205)."""
    if find_spec("transformers") is None:
        raise refuse("E1205", f"{shown(source)} is read by transformers", help="`pip install transformers`")
    source = ADDRESS.sub("", source)
    folder = source if os.path.exists(source) or not is_id(source) else str(model_folder(source, MODEL))
    with quiet():
        config = _config(folder)
        kind, task = _class_of(config, source)
        try:
            fewer = _fewer(config.to_dict())
            windows = {key: size for key, size in config.to_dict().items() if key in WINDOWS and isinstance(size, int)}
            narrow = _with(config, dict.fromkeys(windows, WINDOW))
            shallow = _with(narrow, fewer.settings)
            with in_rows():
                whole, few = _made(kind, config), _made(kind, narrow if fewer.more is None else shallow)
            _begin_alike(few, whole)
            is_small = sum(each.numel() for each in few.parameters()) <= FEW_PARAMETERS
            small = shallow if is_small else _reduced(shallow)
            little = _made(kind, small)
            examples = _example(few, task), _example(little, task)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            message = f"{kind.__name__} cannot be made from {shown(source)}: {type(error).__name__}: {lines[0]}"
            raise refuse("E1205", message) from error
    layers = next((value for key, value in small.to_dict().items() if key in LAYERS), None)
    parameters = sum(each.numel() for each in little.parameters())
    sizes = f"{parameters:,} parameters" if layers is None else f"{layers} layers, {parameters:,} parameters"
    longer, window = fewer.more or 0, max(windows.values(), default=0)
    tokenizer = os.path.join(folder if os.path.isdir(folder) else os.path.dirname(folder), "tokenizer.json")
    if not os.path.isfile(tokenizer) or task.suffix not in CONTINUING:
        tokenizer = ""
    chats = bool(tokenizer) and _has_template(os.path.dirname(tokenizer))
    if tokenizer and folder != source:
        tokenizer = source
    return Pretrained(config.model_type, whole, *examples, _length(config), longer, window, sizes, tokenizer, chats)


def _has_template(folder: str) -> bool:
    """Whether a folder says how its tokenizer writes conversations."""
    if os.path.isfile(os.path.join(folder, "chat_template.jinja")):
        return True
    config = os.path.join(folder, "tokenizer_config.json")
    return os.path.isfile(config) and "chat_template" in json.loads(Path(config).read_text(encoding="utf-8"))


def _config(source: str) -> Any:
    import transformers

    if not os.path.exists(source):
        raise refuse(
            "E1205", f"there is no {'file' if source.endswith('.json') else 'folder'} {shown(source)}", help=_AN_ID
        )
    if os.path.isdir(source) and not os.path.isfile(os.path.join(source, "config.json")):
        raise refuse("E1205", f"{shown(source)} has no config.json, which says what a model is")
    try:
        return transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise refuse("E1205", f"{shown(source)} is no config that transformers knows: {shown(line)}") from error


_AN_ID = "name a folder or a config.json of transformers, or a model of the hub, such as `Qwen/Qwen3-0.6B`"


def _class_of(config: Any, source: str) -> tuple[Any, Task]:
    """The class of a config's model, and what it is for."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = list(config.architectures or ())
    for each in AUTO if not names else ():
        found = getattr(modeling_auto, f"MODEL_FOR_{each}_MAPPING_NAMES").get(config.model_type)
        names += [found] if isinstance(found, str) else []
    for name in names:
        kind = getattr(transformers, name, None)
        task = next((each for each in TASKS if name.endswith(each.suffix)), None)
        if kind is not None and task is not None:
            return kind, task
    known = ", ".join(f"…{each.suffix}" for each in TASKS)
    what = names[0] if names else f"a `{config.model_type}`"
    raise refuse("E1205", f"{shown(source)} is {shown(what)}, and there are {known}")


def _made(kind: Any, config: Any) -> nn.Module:
    module: nn.Module = kind._from_config(config, dtype=torch.float32).train()
    return module


def _example(module: Any, task: Task) -> Example:
    """A model that takes the inputs of the file, and computes its loss; targets are what logits are compared with."""
    inner: Callable[..., Any] = type(module).forward
    config, (batch, length) = module.config, EXAMPLE

    def forward(self: nn.Module, **given: Tensor) -> dict[str, Tensor]:
        own = {argument: given[name] for name, argument in task.arguments.items()}
        outputs = inner(self, **own, **task.settings)
        if not task.targets:
            return {"logits": outputs.logits_per_text, "loss": outputs.loss}
        logits, targets = outputs.logits, given[task.targets]
        # What is not to be learned of a text has no target.
        ignored = -1 if task.targets == "targets" else -100
        return {
            "logits": logits,
            "loss": F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignored),
        }

    vars(module)["forward"] = MethodType(forward, module)
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name in filter(None, (*task.arguments, task.targets)):
        if name == "image":
            seen = getattr(config, "vision_config", config)
            side = getattr(seen, "image_size", IMAGE)
            rows, columns = side if isinstance(side, list | tuple) else (side, side)
            inputs[name] = torch.randn((batch, seen.num_channels, rows, columns), generator=generator)
        elif name == "label":
            inputs[name] = torch.randint(0, config.num_labels, (batch,), generator=generator)
        else:
            shape = (batch, length + _window(config) + (3 if name == "source" else 0))
            inputs[name] = torch.randint(0, config.get_text_config().vocab_size, shape, generator=generator)
    return Example(module, inputs)


def _window(config: Any) -> int:
    values = config.get_text_config().to_dict()
    return max((int(values[key]) for key in WINDOWS if isinstance(values.get(key), int)), default=0)


def _length(config: Any) -> int:
    """The length of sequences: longer than any window, and no longer than there are positions."""
    values = config.get_text_config().to_dict()
    positions = [values[key] for key in ("max_position_embeddings", "n_positions") if isinstance(values.get(key), int)]
    window = _window(config)
    return min([SEQUENCE if window < SEQUENCE else window + SEQUENCE, *(int(each) for each in positions if each > 0)])


def _begin_alike(few: nn.Module, whole: nn.Module) -> None:
    """Let parameters begin as those of the whole do, where that depends on the number of layers."""
    theirs = dict(whole.named_parameters())
    for name, each in few.named_parameters():
        if name in theirs and theirs[name].shape == each.shape:
            each.data = theirs[name].data


def whole(model: Pretrained, few: Imported) -> Imported:
    """The file of all layers, given that of few, for batches that one would train with. Raises Refused (E1202) if its
    weights are not those of the module.
    """
    text = few.text
    for name, places in free_axes(few).items():
        given, dim = places[0]
        if dim == 0 or not model.few.inputs[given].is_floating_point():
            old, new = few.program.file.axes.sizes[name], model.length if dim else BATCH
            text = re.sub(rf"(?<![\w.]){name} = {old}\b", f"{name} = {new}", text, count=1)
    text = re.sub(rf"\bwindow = {WINDOW}\b", f"window = {model.window}", text)
    repeats = {each: n for each, n in few.program.file.constants.items() if re.fullmatch(r"layers(_\d+)?", each)}
    for changed in chain.from_iterable(combinations(repeats, count) for count in range(len(repeats) + 1)):
        longer = text
        for name in changed:
            number = int(repeats[name])
            longer = longer.replace(f" {name} = {number}", f" {name} = {number + model.more}", 1)
        if not model.more or _has_weights_of(longer, few.text, model):
            longer = longer.replace("\n  data = random()", f"{_of_text(model)}\n  data = random()", 1)
            return evolve(
                few, text=longer.replace("\n  steps = 100\n", "\n  steps = 100\n  checkpoint = every(100)\n", 1)
            )
    raise refuse("E1202", f"layers of {model.name} cannot be said as repeats of its first ones")


def _of_text(model: Pretrained) -> str:
    if not model.tokenizer or not model.tokenizer.isprintable() or set(model.tokenizer) & set('"\\'):
        return ""
    source = f'jsonl("*.jsonl", tokenizer = "{model.tokenizer}", holdout = 5%)'
    if model.chats:
        folder = model.tokenizer.removesuffix("/tokenizer.json")
        source = f'chat("chats.jsonl", tokenizer = "{folder}", holdout = 5%)'
    return f"\n  # Text of your own, in the ids of this model:\n  #   {source}"


def _has_weights_of(text: str, before: str, model: Pretrained) -> bool:
    """Whether a file has all weights of the whole module, in their shapes, if that of few layers has all of its."""
    shapes = {name: tuple(each.shape) for name, each in model.whole.state_dict().items()}
    found, few = (
        {each.names[0]: each.shape for each in _spec(each).weights["hf"].tensors()} for each in (text, before)
    )
    counts = [len(list(each.parameters())) for each in (model.whole, model.few.module)]
    return found.items() <= shapes.items() and len(found) - len(few) == counts[0] - counts[1]


def _spec(text: str) -> Spec:
    return spec_of(load_text(text, "model.par"))


# ------------------------------------------------------------ a small configuration

FEW_PARAMETERS = 300_000  # with which a module is proven as it is
HEADS, KEY = 4, 8
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
MOST_HEADS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads"),
)
# Sizes of a small configuration, where the whole one is larger. Heads and layers come on top.
SMALL: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), HEADS * KEY),
    **dict.fromkeys(("head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim"), KEY),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 40),
    **dict.fromkeys(("hidden_dim", "intermediate_size_mlp"), 40),
    **dict.fromkeys(("moe_intermediate_size", "expert_dim"), 20),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 28),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "topk_group"), 2),
    **{"n_group": 4, "vocab_size": 61, "embedding_size": 8, "image_size": 32},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6},
}
SCALED = ("short_factor", "long_factor")  # a number for each frequency


@frozen
class Layers:
    """Settings of fewer layers; and how many iterations of a repeat the whole has more, where that is all."""

    settings: Mapping[str, Any]
    more: int | None = None


def _fewer(values: Mapping[str, Any]) -> Layers:
    """Fewer layers: the first, if they are of another kind, and some periods of those that alternate."""
    counts = {key: values[key] for key in LAYERS if isinstance(values.get(key), int)}
    count = max(counts.values(), default=0)
    lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count > 0}
    own = values.get("first_k_dense_replace") or int("relative_attention_num_buckets" in values)
    kinds = [(i < own, *(str(each[i]) for each in lists.values())) for i in range(count)]
    for first in range(count):
        for period in range(1, (count - first) // 2 + 1):
            # Another number than of the first, which are a repeat of their own.
            kept = first + (next(n for n in (3, 4) if n != first) if period == 1 else 2) * period
            alternate = all(kinds[i] == kinds[i - period] for i in range(first + period, count))
            if alternate and kept < count and min(counts.values()) == count:
                # What is left of a period follows the repeat, and its weights have numbers of layers in their names.
                rest = (count - first) % period
                shorter = {key: value[: kept + rest] for key, value in lists.items()}
                settings = dict.fromkeys(counts, kept + rest) | shorter
                return Layers(settings, None if rest else (count - kept) // period)
    return Layers({})


def _reduced(config: Any) -> Any:
    """A small configuration of the same kind: all kinds of layers, the same ratios where they matter."""
    return _with(config, _small(config.to_dict()))


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a small configuration has otherwise; of its parts as well, such as that of a text."""
    small: dict[str, Any] = {
        key: min(value, SMALL[key]) for key, value in values.items() if key in SMALL and isinstance(value, int)
    }
    heads = [key for key in MOST_HEADS if isinstance(values.get(key), int)]
    for key in heads:
        small[key] = min(values[key], HEADS if values[key] == values[heads[0]] else HEADS // 2)
    if "head_dim" in small and values.get("query_pre_attn_scalar") == values["head_dim"]:
        small["query_pre_attn_scalar"] = small["head_dim"]
    if "expand" in values and "num_heads" in values:  # of Mamba-2
        small["num_heads"] = values["expand"] * small["hidden_size"] // small["head_dim"]
        small |= {"n_groups": min(values["n_groups"], 2), "state_size": min(values["state_size"], 12)}
    if isinstance(values.get("n_group"), int):
        small["n_routed_experts"] = 2 * small["n_group"]
    if "qk_rope_head_dim" in values:
        small |= {"head_dim": SMALL["qk_rope_head_dim"], "qk_head_dim": 12}
    if isinstance(values.get("hidden_sizes"), list):
        # All by one factor: widths that are the same at several places stay so.
        factor = max(min(values["hidden_sizes"]) // 16, 1)
        small |= {"hidden_sizes": [each // factor for each in values["hidden_sizes"]], "image_size": IMAGE}
        small["embedding_size"] = values.get("embedding_size", factor) // factor
    elif isinstance(values.get("patch_size"), int):
        small |= {"patch_size": 4, "image_size": 12}
    for key in (each for each in values if each.endswith("_token_id") and isinstance(values[each], int)):
        small[key] = min(values[key], small.get("vocab_size", values[key] + 1) - 1)
    rope = values.get("rope_parameters") or {}
    if any(key in rope for key in SCALED):
        small["rope_parameters"] = {k: v[: KEY // 2] if k in SCALED else v for k, v in rope.items()}
    parts = {key: each for key, each in values.items() if isinstance(each, dict) and "model_type" in each}
    return small | {key: each | _small(each) for key, each in parts.items()}


def _with(config: Any, settings: Mapping[str, Any]) -> Any:
    return type(config).from_dict({**config.to_dict(), **settings})


def differing(whole: Imported, small: Imported) -> str | None:
    """The first line of the file that the small one has otherwise, but for numbers and the sizes of axes."""
    lines = zip(_skeleton(whole.text), _skeleton(small.text), strict=False)
    return next(
        (f"`{one.strip()}`, and of the small one `{other.strip()}`" for one, other in lines if one != other), None
    )


def _skeleton(text: str) -> list[str]:
    body = re.sub(r"\A(axis|const) .*?\n\n(const .*?\n\n)?", "", text, flags=re.DOTALL)
    words = re.sub(r"(?<![\w.])\d[\d_.]*(e-?\d+)?", "#", " ".join(body.split()))
    words = re.sub(r"\blayers(_\d+)?\b", "layers", words)
    lines = re.split(r"(?= (?:let|param|loss|output|block|model|return|repeat) )", words)
    # What parameters begin with, and so which of them stand in one line, depends on widths.
    single = chain.from_iterable(_declared(each) or [each] for each in lines)
    runs = groupby(single, lambda each: each.startswith(" param "))
    return [each for declared, own in runs for each in (sorted(own) if declared else own)]


def _declared(line: str) -> list[str]:
    """The declarations of parameters in a line, one by one, without what they begin with."""
    names, _, rest = line.removeprefix(" param ").partition(": ")
    return (
        [f" param {each}: {rest.partition(' ~ ')[0]}" for each in names.split(", ")]
        if line.startswith(" param ")
        else []
    )

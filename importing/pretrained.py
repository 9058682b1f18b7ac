"""Models of transformers: a config.json makes the module as it is, without memory for parameters, and a small one.

The file is written of the first, and the proof is of the second: of few layers and small widths, but with all kinds of
layers, and with sequences longer than any window.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from partita.dsl.diagnostic import refuse, shown
from partita.importing.from_torch import Example
from partita.importing.imported import Imported

BATCH, SMALL_BATCH = 8, 2
SEQUENCE, SMALL_SEQUENCE = 1024, 10
STORED = 1 << 14  # elements; of larger parameters only one row has memory
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")


# ------------------------------------------------------------ what models are for


@frozen
class Task:
    """What models of some classes are for: the suffix of these, the arguments of `forward` by the inputs of the file,
    and settings of the call.
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
)
# Where a config names no class, these are asked for one, in this order.
AUTO = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")


@frozen(eq=False)
class Pretrained:
    """A model of a config, and a small one of the same kind, of these `sizes`."""

    name: str
    whole: Example
    small: Example
    sizes: str


def pretrained(source: str) -> Pretrained:
    """The model of a folder, of a config.json, or of the hub, if it is on this machine. Raises Refused (E1205), and
    ImportError where there is no transformers.
    """
    if find_spec("transformers") is None:
        raise ImportError("models of transformers need it: pip install transformers", name="transformers")
    config = _config(source)
    kind, task = _class_of(config, source)
    small = _reduced(config)
    try:
        with _unstored():
            whole = _example(kind, config, task, BATCH, _length(config))
        little = _example(kind, small, task, SMALL_BATCH, SMALL_SEQUENCE + _window(small))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        message = f"{kind.__name__} cannot be made from {shown(source)}: {type(error).__name__}: {lines[0]}"
        raise refuse("E1205", message) from error
    layers = next((value for key, value in small.to_dict().items() if key in LAYERS), 0)
    return Pretrained(
        config.model_type,
        whole,
        little,
        f"{layers} layers, {sum(p.numel() for p in little.module.parameters()):,} parameters",
    )


def _config(source: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    if source.endswith(".json") and not os.path.isfile(source):
        raise refuse("E1205", f"there is no file {shown(source)}")
    if os.path.isdir(source) and not os.path.isfile(os.path.join(source, "config.json")):
        raise refuse("E1205", f"{shown(source)} has no config.json, which says what a model is")
    try:
        return transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if os.path.exists(source):
            raise refuse("E1205", f"{shown(source)} is no config that transformers knows: {shown(line)}") from error
        help = f"`hf download {shown(source)} config.json --local-dir model`, then `partita import model`"
        message = f"{shown(source)} is no folder, no file, and no model that is on this machine; nothing is downloaded"
        raise refuse("E1205", message, help=help) from error


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


def _example(kind: Any, config: Any, task: Task, batch: int, length: int) -> Example:
    """A model that takes the inputs of the file, and computes its loss; targets are what logits are compared with."""
    module: nn.Module = kind._from_config(config, dtype=torch.float32).train()
    inner: Callable[..., Any] = type(module).forward

    def forward(self: nn.Module, **given: Tensor) -> dict[str, Tensor]:
        own = {argument: given[name] for name, argument in task.arguments.items()}
        logits = inner(self, **own, **task.settings).logits
        targets = given[task.targets]
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, -2), targets.flatten())}

    vars(module)["forward"] = MethodType(forward, module)
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Tensor] = {}
    if "image" in task.arguments:
        side = getattr(config, "image_size", 32)
        rows, columns = side if isinstance(side, list | tuple) else (side, side)
        inputs["image"] = torch.randn((batch, config.num_channels, rows, columns), generator=generator)
        inputs["label"] = torch.randint(0, config.num_labels, (batch,), generator=generator)
        return Example(module, inputs)
    for name in (*task.arguments, task.targets):
        longer = 3 if name == "source" else 0
        shape = (batch, length + longer)
        inputs[name] = torch.randint(0, config.get_text_config().vocab_size, shape, generator=generator)
    return Example(module, inputs)


def _window(config: Any) -> int:
    values = config.get_text_config().to_dict()
    return max((values[key] for key in WINDOWS if isinstance(values.get(key), int)), default=0)


def _length(config: Any) -> int:
    """The length of sequences: longer than any window, and no longer than there are positions."""
    values = config.get_text_config().to_dict()
    positions = [values[key] for key in ("max_position_embeddings", "n_positions") if isinstance(values.get(key), int)]
    window = _window(config)
    length = SEQUENCE if window < SEQUENCE else window + SEQUENCE
    return min([length, *(each for each in positions if each > 0)])


# ------------------------------------------------------------ a small configuration

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
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "n_group"), 2),
    **{"topk_group": 1, "vocab_size": 61, "embedding_size": 8, "image_size": 32},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6},
    **dict.fromkeys(WINDOWS, 6),
}
SCALED = ("short_factor", "long_factor")  # a number for each frequency


def _reduced(config: Any) -> Any:
    """A small configuration of the same kind: all kinds of layers, the same ratios where they matter."""
    values = {**config.to_dict()}
    small = {key: min(value, SMALL[key]) for key, value in values.items() if key in SMALL and isinstance(value, int)}
    for key in (each for each in MOST_HEADS if isinstance(values.get(each), int)):
        several = values[key] == next(values[each] for each in MOST_HEADS if each in values)
        small[key] = min(values[key], HEADS if several else HEADS // 2)
    if "qk_rope_head_dim" in values:
        small |= {"head_dim": SMALL["qk_rope_head_dim"], "qk_head_dim": 12}
    if isinstance(values.get("hidden_sizes"), list):
        small["hidden_sizes"] = [16 * (i + 1) for i in range(len(values["hidden_sizes"]))]
        small["depths"] = [min(each, 2) for each in values["depths"]]
    if isinstance(values.get("patch_size"), int):
        small |= {"patch_size": 4, "image_size": 12}
    small |= _fewer_layers(values)
    for key in (each for each in values if each.endswith("_token_id") and isinstance(values[each], int)):
        small[key] = min(values[key], small.get("vocab_size", values[key] + 1) - 1)
    rope = values.get("rope_parameters") or {}
    if any(key in rope for key in SCALED):
        small["rope_parameters"] = {k: v[: KEY // 2] if k in SCALED else v for k, v in rope.items()}
    return type(config).from_dict(values | small)


def _fewer_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of fewer layers: the first of another kind, a whole period of those that alternate, and what is left of
    one at the end.
    """
    counts = {key: values[key] for key in LAYERS if isinstance(values.get(key), int)}
    count = max(counts.values(), default=0)
    lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count > 0}
    dense = values.get("first_k_dense_replace") or 0
    kinds = [(i < dense, *(str(each[i]) for each in lists.values())) for i in range(count)]
    first, period = (
        next(
            (first, period)
            for first in range(count + 1)
            for period in range(1, count - first + 1)
            if (
                all(kinds[i] == kinds[i - period] for i in range(first + period, count)) and 2 * period <= count - first
            )
            or first + period >= count
        )
        if count
        else (0, 1)
    )
    before = min(first, 2)
    kept = before + (3 if period == 1 else 2 if period == 2 else 1) * period + (count - first) % period
    if kept >= count:
        return {}
    small: dict[str, Any] = dict.fromkeys(counts, kept)
    small |= {key: value[first - before :][:kept] for key, value in lists.items()}
    return small | ({"first_k_dense_replace": before} if dense else {})


def differing(whole: Imported, small: Imported) -> str | None:
    """The first line of the file that the small one has otherwise, but for numbers and the sizes of axes."""
    lines = zip(_skeleton(whole.text), _skeleton(small.text), strict=False)
    return next(
        (f"`{one.strip()}`, and of the small one `{other.strip()}`" for one, other in lines if one != other), None
    )


def _skeleton(text: str) -> list[str]:
    body = re.sub(r"\A(axis|const) .*?\n\n(const .*?\n\n)?", "", text, flags=re.DOTALL)
    words = re.sub(r"(?<![\w.])\d[\d_.]*(e-?\d+)?", "#", " ".join(body.split()))
    return re.split(r"(?= (?:let|param|loss|output|block|model|return|repeat) )", words)


# ------------------------------------------------------------ without memory


class _InRows(TorchDispatchMode):
    """Within it, what changes a tensor of equal rows in place changes one row: parameters begin as they should."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.overloadpacket.__name__.endswith("_"):
            function(stored(args[0]), *args[1:], **(kwargs or {}))
            return args[0]
        return function(*args, **(kwargs or {}))


def stored(tensor: Tensor) -> Tensor:
    """The part of a tensor that has memory of its own; the tensor itself if all of it has."""
    if all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor
    return tensor[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())]


@contextmanager
def _unstored() -> Iterator[None]:
    """Within it, large parameters of modules have the memory of one row."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.numel() > STORED and stored(param) is param:
            longest = max(range(param.dim()), key=lambda dim: param.shape[dim])
            row = torch.zeros([size if dim == longest else 1 for dim, size in enumerate(param.shape)])
            param = nn.Parameter(row.expand(param.shape), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        with _InRows():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

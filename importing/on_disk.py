"""Names of tensors as transformers saves them, which for some models are not those of their modules.

Weights of all experts are one parameter, and in files each expert has its own; modules have been renamed since.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

PLACES = 10**6  # numbers that stand for formulas
ENTRY = re.compile(r'([\w.]+(?:,\s+[\w.]+)*) =\s+("[^"]*"(?:,\s+"[^"]*")*) \[([^\]]*)\]')


def on_disk(text: str, module: nn.Module) -> str:
    """A file with other names in `weights hf`, and without those that transformers skips. What it changes otherwise
    stays as it is, and importing such weights says which are missing.
    """
    from transformers import conversion_mapping, core_model_loading

    library: Any = conversion_mapping
    conversions = library.get_model_conversion_mapping(module, add_legacy=False)[::-1]
    # As transformers saves a model that it has not read.
    prefixes = getattr(core_model_loading, "PrefixChange", ())
    renamings = [
        each.reverse_transform()
        for each in conversions
        if not getattr(each, "operations", []) and not isinstance(each, prefixes)
    ]
    before, start, weights = text.partition("\nweights hf {\n")

    def renamed(name: str) -> str:
        # Patterns are of names with numbers.
        formulas = dict(enumerate(re.findall(r"{.*?}", name), PLACES))
        for number, formula in formulas.items():
            name = name.replace(formula, str(number), 1)
        for each in renamings:
            name, _ = each.rename_source_key(name)
        for number, formula in formulas.items():
            name = name.replace(str(number), formula)
        return name

    def entry(found: re.Match[str]) -> str:
        ours, (name, *others), dims = re.split(r",\s+", found[1]), re.findall(r'"([^"]*)"', found[2]), found[3]
        for each in conversions:
            kinds = [type(operation).__name__ for operation in getattr(each, "operations", [])]
            target = each.target_patterns[0]
            apart = kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
            if not apart or not name.endswith(target) or len(ours) != len(each.source_patterns):
                continue
            experts, first, *rest = re.split(r",\s+", dims)
            sizes = first.removeprefix("+ ").split(" + ")
            outer, *inner = experts.split(" * ")
            number = outer
            for axis in inner:
                (size,) = re.findall(rf"\b{axis} = (\d+)", before)[:1]
                number = f"{number} * {size} + {axis}"
            own = [
                f'{one} = "{renamed(name.removesuffix(target) + source.replace("*", f"{{{number}}}"))}" '
                f"[{', '.join([size, *rest])}]"
                for one, source, size in zip(ours, each.source_patterns, sizes * len(ours), strict=False)
            ]
            return "\n  ".join(own)
        quoted = ", ".join(f'"{renamed(each)}"' for each in (name, *others))
        return f"{found[1]} = {quoted} [{dims}]"

    skips = ", ".join(f'"{each}"' for each in _skipped(module))
    skipped = re.sub(r"}\s*\Z", f"  skip {skips}\n}}\n", weights) if skips else weights
    return before + start + ENTRY.sub(entry, skipped)


def _skipped(module: nn.Module) -> list[str]:
    """Names of tensors in older folders, with `*` for any text, that transformers does not load into this module."""
    patterns = {*(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())}
    # Two that it adds where a module has such buffers (`PreTrainedModel._adjust_missing_and_unexpected_keys`).
    for each in ("rotary_emb.inv_freq", "position_ids"):
        patterns |= {f"{each}$"} if any(name.endswith(each) for name, _ in module.named_buffers()) else set()
    globs = set()
    for each in patterns:
        text = re.sub(r"\\d\+|\.\*|\(.*\)", "*", each).replace("\\.", ".")
        text = ("" if text.startswith("^") else "*") + text.strip("^$") + ("" if text.endswith("$") else "*")
        globs.add(re.sub(r"\*+", "*", text))
    return sorted(globs)

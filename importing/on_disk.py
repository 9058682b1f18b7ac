"""Names of tensors as transformers saves them, which for some models are not those of their modules.

Weights of all experts are one parameter, and in files each expert has its own; modules have been renamed since.
"""

from __future__ import annotations

import re
from typing import Any

ENTRY = re.compile(r'([\w.]+(?:,\s+[\w.]+)*) =\s+("[^"]*"(?:,\s+"[^"]*")*) \[([^\]]*)\]')


def on_disk(text: str, kind: str) -> str:
    """A file, given its `model_type`, with other names in `weights hf`. What transformers changes otherwise stays as it
    is, and importing such weights says which are missing.
    """
    from transformers import conversion_mapping

    table: Any = conversion_mapping
    conversions = table.get_checkpoint_conversion_mapping(kind) or []
    before, start, weights = text.partition("\nweights hf {\n")

    def renamed(name: str) -> str:
        for each in conversions:
            if not getattr(each, "operations", []):
                for old, new in zip(each.source_patterns, each.target_patterns, strict=False):
                    name = name if old.startswith("^") else name.replace(new, old)
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
            if " " in experts:
                continue
            own = [
                f'{one} = "{renamed(name.removesuffix(target) + source.replace("*", f"{{{experts}}}"))}" '
                f"[{', '.join([size, *rest])}]"
                for one, source, size in zip(ours, each.source_patterns, sizes * len(ours), strict=False)
            ]
            return "\n  ".join(own)
        quoted = ", ".join(f'"{renamed(each)}"' for each in (name, *others))
        return f"{found[1]} = {quoted} [{dims}]"

    return before + start + ENTRY.sub(entry, weights)

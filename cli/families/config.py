"""A `config.json` of Hugging Face → a `.par` file: the file of the zoo for its family, with its sizes and constants.

A family, a function of the modules beside this, asks the config for each setting that it knows. What the file cannot
say is a problem, and so is every setting that nobody asked for, unless it has no part in what a model computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from attrs import define, field

from partita.dsl.advice.report import Report
from partita.dsl.diagnostic import Refused, refuse, shown
from partita.dsl.syntax import tree
from partita.dsl.syntax.format import format_text
from partita.dsl.syntax.parser import parse_file
from partita.dsl.syntax.source import Source

# Settings of generation, of other tasks, of how a model is made and kept: they have no part in its outputs.
NEUTRAL = frozenset(
    word
    for words in (
        "_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures auto_map",
        "bad_words_ids begin_suppress_tokens bos_token_id chunk_size chunk_size_feed_forward",
        "classifier_dropout decoder_start_token_id diversity_penalty do_sample dtype early_stopping",
        "encoder_no_repeat_ngram_size encoder_stride eos_token_id exponential_decay_length_penalty",
        "finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_factor",
        "initializer_range label2id length_penalty max_length min_length model_type n_ctx",
        "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions",
        "output_hidden_states output_past output_router_logits output_scores pad_token_id pooler_act",
        "pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_output_size",
        "pooler_size_per_head pooler_type prefix pretraining_tp problem_type reorder_and_upcast_attn",
        "remove_invalid_values repetition_penalty rescale_prenorm_residual return_dict",
        "return_dict_in_generate sep_token_id suppress_tokens summary_activation summary_first_dropout",
        "summary_proj_to_labels summary_type summary_use_proj task_specific_params temperature tf_legacy_loss",
        "tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16",
        "use_cache",
    )
    for word in words.split()
)


# The data of the zoo's language models.
STDLIB = "  data = stdlib(holdout = 5%)"


@define
class Config:
    """The settings of a config, or of a part of it. What cannot be said is collected in `problems`."""

    values: Mapping[str, Any]
    name: str = ""
    problems: list[str] = field(factory=list)
    asked: set[str] = field(factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """A setting; `null` means the default."""
        self.asked.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problem(key, value, "which is not a positive integer")
        return 1

    def number(self, key: str, default: float | None = None) -> str:
        """A number, as it is written in a `.par` file."""
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
            return str(value)
        self.problem(key, value, "which is not a number")
        return "1"

    def only(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Require that a setting is one of those that the file can say; the first is the one that it says."""
        value = self.get(key, allowed[0] if default is None else default)
        if value not in allowed:
            self.problem(key, value, f"and the file has {json.dumps(allowed[0])}")

    def fixed(self, **settings: Any) -> None:
        """Require settings to be what the file says; where it says several, those are a tuple."""
        for key, value in settings.items():
            self.only(key, *(value if isinstance(value, tuple) else (value,)))

    def problem(self, key: str, value: object, why: str) -> None:
        """The file cannot say a setting."""
        message = f"`{self.name}{key}` is {shown(json.dumps(value))[:60]}, {why}"
        if message not in self.problems:
            self.problems.append(message)

    def part(self, key: str) -> Config:
        """The settings of a part, with the same list of problems."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.problem(key, value, "which is not an object")
            value = {}
        return Config(value, f"{self.name}{key}.", self.problems)

    def settle(self) -> None:
        """What nobody asked for is a problem, unless it is neutral."""
        for key, value in self.values.items():
            if key not in self.asked and key not in NEUTRAL and value not in (None, False, [], {}):
                self.problem(key, value, "which is not known to be without effect")


@define
class File:
    """The text of a file of the zoo, being changed."""

    text: str

    def entries(self, **values: object) -> None:
        """Give axes and constants other values."""
        known = self._entries()
        # From the end, so that places before it stay where they are.
        for name in sorted(values, key=lambda name: -known[name].span.start):
            span = known[name].value.span
            self.text = f"{self.text[: span.start]}{values[name]}{self.text[span.end :]}"

    def drop(self, name: str) -> None:
        """Drop an axis or a constant, with the comma beside it."""
        span = self._entries()[name].span
        before, after = self.text[: span.start].rstrip(), self.text[span.end :].lstrip()
        if before.endswith(","):
            self.text = before[:-1] + self.text[span.end :]
        else:
            self.text = self.text[: span.start] + after.removeprefix(",").lstrip(" ")

    def replace(self, old: str, new: str) -> None:
        """Replace a part of the text, wherever it stands. Raises AssertionError if it does not."""
        assert old in self.text, old
        self.text = self.text.replace(old, new)

    def _entries(self) -> dict[str, tree.Entry]:
        """Its axes and constants by name."""
        parsed = parse_file(Source("zoo", self.text), Report())
        return {
            entry.key.text: entry
            for each in parsed.declarations
            if isinstance(each, tree.Axes | tree.Constants)
            for entry in each.entries
        }

    def written(self, origin: str, tokenizer: str) -> str:
        """The canonical text, with a word on where it is from instead of one on its size.

        It saves checkpoints, which a run needs to begin with weights from elsewhere. Ids of the data that it stands
        with are not those of the model's `tokenizer`: it says what reads text by it.
        """
        lines = self.text.split("\n")
        steps = next(i for i, line in enumerate(lines) if line.startswith("  steps = "))
        lines.insert(steps + 1, "  checkpoint = every(100)")
        if STDLIB in lines:
            data = lines.index(STDLIB)
            own = f'  #   jsonl("*.jsonl", tokenizer = "{tokenizer}", holdout = 5%)'
            lines[data:data] = ["  # Its ids are bytes. Text of your own, in the ids of this model:", own]
        first = next((i for i, line in enumerate(lines) if line.startswith("# As it stands")), 0)
        last = next(i for i in range(first, len(lines)) if not lines[i].startswith("#"))
        lines[first:last] = [f"# Sizes and constants are those of {origin}."]
        return format_text("\n".join(lines))


def published(name: str) -> str:
    """The text of a file of the zoo."""
    return files("partita.specs").joinpath("zoo", *name.split("/")).read_text(encoding="utf-8")


def refuse_problems(path: str, family: str, problems: Sequence[str]) -> Refused:
    """What a file of a family cannot say of a config (E0329)."""
    count = "a setting" if len(problems) == 1 else f"{len(problems)} settings"
    return refuse(
        "E0329",
        f"{path} has {count} that specs/zoo/{family} cannot say",
        notes=problems,
        help=f"`partita init --from {family.removesuffix('.par')}` copies that file, to change the model in it; or "
        "`--ignore KEY,…`, if a setting is without effect here",
    )

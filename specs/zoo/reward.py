"""What an answer of grpo.par is worth. It is called as `trl` calls such functions."""


def score(completions: list[str], answer: list[str], **others: object) -> list[float]:
    """1 for the right answer, and half for one that goes on after it."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if text == right else 0.5 * text.startswith(right) for text, right in pairs]

"""BLEU two ways: sacreBLEU with its signature, and the tokenised, compound-split BLEU that papers on WMT14 print.

The second is what the script `get_ende_bleu.sh` made usual since "Attention Is All You Need": output and reference are
tokenised as Moses does, a hyphen between letters becomes a word of its own (`##AT##-##AT##`), and plain corpus BLEU of
that is taken. It is about a point higher than sacreBLEU on German, and no number of it can be compared with one of the
other kind. The tokeniser here follows the rules of Moses's, without its lists of abbreviations.
"""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bleu:
    """Two BLEU scores of one output.

    Attributes:
        sacrebleu: sacreBLEU, from 0 to 100.
        signature: what sacreBLEU says of how that was computed.
        compound_split: tokenised BLEU with compounds split at hyphens.
        sentences: how many there were.
    """

    sacrebleu: float
    signature: str
    compound_split: float
    sentences: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def check_installed() -> None:
    """Refuse to begin what could not be scored in the end."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise ModuleNotFoundError("scores need sacrebleu: pip install sacrebleu", name="sacrebleu")


def bleu(outputs: Sequence[str], references: Sequence[str]) -> Bleu:
    """Score translations against one reference each.

    Args:
        outputs: what a model said, sentence by sentence, as plain text.
        references: what a person said, in the same order.
    """
    from sacrebleu.metrics.bleu import BLEU

    if len(outputs) != len(references):
        raise ValueError(f"outputs must be as many as references, {len(references)}, got {len(outputs)}")
    if not outputs:
        raise ValueError("outputs must be at least one sentence, got none")
    metric = BLEU()
    score = metric.corpus_score(list(outputs), [list(references)]).score
    tokenised = BLEU(tokenize="none", smooth_method="none", force=True)
    split = tokenised.corpus_score([split_compounds(text) for text in outputs], [
        [split_compounds(text) for text in references]
    ]).score  # fmt: skip
    return Bleu(float(score), str(metric.get_signature()), float(split), len(outputs))


def split_compounds(text: str) -> str:
    """Tokenised text whose compounds are split at their hyphens.

    Example:
        >>> split_compounds("Die E-Mail-Anlage, bitte.")
        'Die E ##AT##-##AT## Mail ##AT##-##AT## Anlage , bitte .'
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokenise(text))


def tokenise(text: str) -> str:
    """Words and punctuation with spaces between, as Moses's tokeniser does for German and English.

    Example:
        >>> tokenise('Er sagte: „Das kostet 1,50 Euro.“')
        'Er sagte : „ Das kostet 1,50 Euro . “'
    """
    # All but letters, digits and what has rules of its own.
    text = re.sub(r"([^\w\s.'`,\-]|_)", r" \1 ", text)
    text = re.sub(r"\.{2,}", lambda found: f" {found.group()} ", text)
    # A comma inside a number is part of it, and so is a dot.
    text = re.sub(r"(?<!\d),|,(?!\d)", " , ", text)
    text = re.sub(r"(['`])", r" \1 ", text)
    words = text.split()
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else None
        if word.endswith(".") and set(word) != {"."} and _ends_sentence(word[:-1], following):
            words[place] = f"{word[:-1]} ."
    return " ".join(words)


def _ends_sentence(stem: str, following: str | None) -> bool:
    """Whether the dot after a word is a full stop: not in U.S., in 3. Liga, or before a small letter."""
    if following is None or not following[0].isalnum():
        return True
    is_abbreviation = "." in stem and any(letter.isalpha() for letter in stem)
    return not (is_abbreviation or stem.isdigit() or following[0].islower() or len(stem) == 1)

"""Words and prose grammar of the needle documents, written for this project.

The same words and templates produced the training text of `needle-7m`: change them and the bundled model
reads prose it was not trained on.
"""

import random
import re
from pathlib import Path
from typing import Final


def _sections() -> dict[str, tuple[str, ...]]:
    """Read words.txt: the words, or the lines, of each section by its name."""
    found: dict[str, tuple[str, ...]] = {}
    for section in Path(__file__).with_name("words.txt").read_text("utf-8").split("\n[")[1:]:
        name, _, text = section.partition("]\n")
        found[name.removesuffix("/")] = tuple(text.strip().split("\n") if name.endswith("/") else text.split())
    return found


_WORDS: Final = _sections()
FIRST_NAMES: Final = _WORDS["first_names"]
LAST_NAMES: Final = _WORDS["last_names"]
PLACES: Final = _WORDS["place"]
TOPICS: Final = {name.removeprefix("topic "): its for name, its in _WORDS.items() if name.startswith("topic ")}
"""Templates of sentences, by topic.  {hero} {friend} {home} {away} are drawn once for a paragraph, and any other slot each time."""

# A key is an adjective and a noun.  The held-out words never occurred in a key during training.
KEY_ADJECTIVES: Final = _WORDS["key_adjectives"]
KEY_NOUNS: Final = _WORDS["key_nouns"]
HELD_OUT_ADJECTIVES: Final = _WORDS["held_out_adjectives"]
HELD_OUT_NOUNS: Final = _WORDS["held_out_nouns"]
TRAINED_ADJECTIVES: Final = tuple(word for word in KEY_ADJECTIVES if word not in HELD_OUT_ADJECTIVES)
TRAINED_NOUNS: Final = tuple(word for word in KEY_NOUNS if word not in HELD_OUT_NOUNS)


def is_held_out_pair(adjective: str, noun: str) -> bool:
    """Return whether training skipped this pair of key words.  It skipped one pair in ten, chosen by a hash."""
    value = 0
    for byte in f"{adjective}|{noun}".encode():
        value = (value * 131 + byte) & 0xFFFFFFFF
    return (value >> 7) % 10 == 0


def pseudo_word(rng: random.Random) -> str:
    """Draw a pronounceable word of two or three syllables that means nothing."""
    syllables = [rng.choice(_WORDS["syllables"]) for _ in range(rng.choice((2, 2, 3)))]
    return "".join(syllables) + rng.choice(_WORDS["codas"])


# ---- grammar -----------------------------------------------------------------------------------------------

_NUMBERS: Final = {"number": (10, 9999), "year": (1400, 1990)}
_SLOT: Final = re.compile(r"\{(\w+)\}")
_ARTICLE: Final = re.compile(r"\b([Aa]) (?=[aeio]|honest|u(?!se))")
_NOISE_SHARE: Final = 0.03  # of all paragraphs
_FULL_NAME_SHARE: Final = 0.3  # of all heroes
_TOPIC_NAMES: Final = tuple(TOPICS)


def _sentence(template: str, rng: random.Random, cast: dict[str, str]) -> str:
    """Fill every slot of `template`, from `cast` or drawn anew; "a" becomes "an" where due."""

    def value(slot: re.Match[str]) -> str:
        name = slot[1]
        if name in cast:
            return cast[name]
        if name in _NUMBERS:
            return str(rng.randint(*_NUMBERS[name]))
        return rng.choice(_WORDS[name])

    return _ARTICLE.sub(r"\1n ", _SLOT.sub(value, template))


def _noise(rng: random.Random) -> list[str]:
    """Draw sentences of pseudo-words, 6 to 33 words in all, so that recall does not depend on known prose."""
    left = rng.randint(6, 33)
    sentences = []
    while left:
        size = min(left, rng.randint(4, 9))
        sentences.append(" ".join(pseudo_word(rng) for _ in range(size)).capitalize() + ".")
        left -= size
    return sentences


def paragraph(rng: random.Random) -> list[str]:
    """Draw one paragraph: 2 to 7 sentences on one topic, with two people and two places.  3 % of paragraphs are noise."""
    if rng.random() < _NOISE_SHARE:
        return _noise(rng)
    templates = TOPICS[rng.choice(_TOPIC_NAMES)]
    hero, friend = rng.sample(FIRST_NAMES, 2)
    home, away = rng.sample(PLACES, 2)
    if rng.random() < _FULL_NAME_SHARE:
        hero += " " + rng.choice(LAST_NAMES)
    cast = {"hero": hero, "friend": friend, "home": home, "away": away}
    return [_sentence(template, rng, cast) for template in rng.sample(templates, rng.randint(2, 7))]

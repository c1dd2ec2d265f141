"""Documents of facts: secret codes at random depths, each with decoys that share its words but do not give the code."""

import random
from collections.abc import Callable, Iterator
from typing import Final

from . import words
from .prompt import _STATEMENT, NeedlePrompt, _draw_answers, _draw_keys, _fit, _needle, _Prose
from .words import _sentence

MAX_FACTS: Final = 64
MAX_DECOYS: Final = 8

_GAP: Final = 64  # tokens of prose between two places for lines, so that a usual paragraph stays whole
_APART: Final = 2  # places between a fact and its decoys, so that they seldom share a chunk of the cache
# No numbers: a second number for the same key ("The password for ...") misleads even the full cache.
_MENTIONS: Final = (
    "{hero} has forgotten the secret code for the {key}.",
    "The keeper of the {key} is {hero}.",
    "In {month} {hero} saw the {key} near the {noun} of {place}.",
    "{hero} drew a picture of the {key} and gave it to the teacher.",
    "Nobody in {place} knows who made the {key}.",
)


def make_facts(
    n_tokens: int,
    count: Callable[[str], int],
    *,
    n_facts: int = 8,
    n_decoys: int = 2,
    seed: int = 1,
) -> NeedlePrompt:
    """Write a document of prose with `n_facts` secret codes at random depths, each on a line of its own.

    Every fact has `n_decoys` decoys, lines elsewhere in the document.  Three kinds take turns, beginning with a random
    one: the code for another key with the same adjective, the code for another key with the same noun, and a sentence
    that mentions the fact's key without a code.  No key has two codes, and no code has two keys.

    The result depends on the arguments alone, as with `make_prompt`.  The same `seed`, `n_facts` and `n_decoys` give
    the same facts and decoys at every length, and the facts lie at about the same relative depths.  The bundled model
    was trained on the keys: with the full cache, it misses few codes or none.

    Args:
        n_tokens: tokens that the document may take.  It takes at most about 100 fewer.
        count: counts the tokens of a text with the model's own tokenizer, without BOS, as for `make_prompt`.
        n_facts: codes to be asked for, 1 to `MAX_FACTS`.
        n_decoys: decoys of each fact, 0 to `MAX_DECOYS`.
        seed: number of the document, 0 or more.

    Returns:
        The document.  Its needles are the facts, in document order; the decoys are in the text alone.

    Raises:
        ValueError: an argument is out of range, `n_tokens` cannot hold the facts and decoys, or `count` does
            not behave as a token counter.
    """
    if not 1 <= n_facts <= MAX_FACTS:
        raise ValueError(f"n_facts is {n_facts}: choose a number from 1 to {MAX_FACTS}.")
    if not 0 <= n_decoys <= MAX_DECOYS:
        raise ValueError(f"n_decoys is {n_decoys}: choose a number from 0 to {MAX_DECOYS}.")
    if seed < 0:
        raise ValueError(f"seed is {seed}: choose 0 or more.")

    rng = random.Random(seed)
    keys = _draw_keys(rng, n_facts, held_out=False)
    answers = _draw_answers(rng, n_facts * (1 + n_decoys))
    statements = [_STATEMENT.format(key=key, answer=answer) for key, answer in zip(keys, answers, strict=False)]
    decoys = _draw_decoys(rng, keys, iter(answers[n_facts:]), n_decoys)
    needed = count("".join(line + "\n" for group in (statements, *decoys) for line in group))
    if needed > n_tokens:
        raise ValueError(
            f"n_tokens is {n_tokens}, but the {n_facts} facts with {n_decoys} decoys each alone take {needed} "
            f"tokens: raise n_tokens to {needed} or more, or lower n_facts or n_decoys"
        )

    places, at = _spread(rng, statements, decoys, max(1, (n_tokens - needed) // _GAP))
    layout, total = _fit(_Prose(rng, count), places, n_tokens, needed)
    starts = [layout.starts[place] + offset for place, offset in at]
    needles = tuple(map(_needle, keys, answers, statements, starts))
    return NeedlePrompt(text=layout.text, needles=needles, n_tokens=total, seed=seed)


def _draw_decoys(rng: random.Random, keys: list[str], answers: Iterator[str], n: int) -> list[list[str]]:
    """Draw `n` decoys of every key.  A decoy with a code takes the next of `answers`."""
    used = set(keys)
    decoys = []
    for key in keys:
        adjective, noun = key.split()
        first = rng.randrange(3)
        group = []
        for kind in range(first, first + n):
            if kind % 3 == 2:
                cast = {"key": key, "hero": f"{rng.choice(words.FIRST_NAMES)} {rng.choice(words.LAST_NAMES)}"}
                group.append(_sentence(rng.choice(_MENTIONS), rng, cast))
                continue
            if kind % 3 == 0:
                pairs = [(adjective, other) for other in words.TRAINED_NOUNS]
            else:
                pairs = [(other, noun) for other in words.TRAINED_ADJECTIVES]
            trained = [" ".join(pair) for pair in pairs if not words.is_held_out_pair(*pair)]
            decoy = rng.choice([other for other in trained if other not in used])
            used.add(decoy)
            group.append(_STATEMENT.format(key=decoy, answer=next(answers)))
        decoys.append(group)
    return decoys


def _spread(
    rng: random.Random, facts: list[str], decoys: list[list[str]], n_places: int
) -> tuple[list[str], list[tuple[int, int]]]:
    """Put facts and decoys at random into `n_places` evenly spaced places, with decoys away from their fact.

    Returns the joined lines of every place, and for every fact the place and the offset there, in characters.  The
    facts keep their order.
    """
    places = [""] * n_places
    at = []
    apart = min(_APART, n_places // 2)
    depths = sorted(rng.random() for _ in facts)
    for fact, depth, group in zip(facts, depths, decoys, strict=True):
        place = int(depth * n_places)
        at.append((place, len(places[place])))
        places[place] += fact + "\n"
        for decoy in group:
            places[(place + rng.randint(apart, n_places - apart)) % n_places] += decoy + "\n"
    return places, at

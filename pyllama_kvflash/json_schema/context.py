"""What is known while a schema is put together, and what is noted of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyllama_kvflash.json_schema import languages
from pyllama_kvflash.json_schema.branches import Branch
from pyllama_kvflash.json_schema.document import Document, Place, place_of, unescaped
from pyllama_kvflash.json_schema.keywords import is_annotation
from pyllama_kvflash.json_schema.shapes import Key
from pyllama_kvflash.json_schema.values import Checker, Unsure


@dataclass(frozen=True, slots=True)
class Loosened:
    """A keyword that is not enforced: where, and why. annotation: JSON Schema itself lets it be ignored."""

    pointer: str
    keyword: str
    why: str
    annotation: bool = False

    def __str__(self) -> str:
        """A sentence."""
        return f"{place_of(self.pointer, self.keyword)} is not enforced: {self.why}"


class Context:
    """A document, with what looks at it. loosened: what is not enforced, in its order."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.checker = Checker(document)
        self.loosened: dict[Loosened, None] = {}
        self._known: dict[languages.Language, bool] = {}
        self._states_left = 3 * languages.MAX_STATES  # a second or two

    def key(self, places: Iterable[Place]) -> Key:
        """Return the key of places that must all be met."""
        return tuple(sorted({p.index for p in places if not _trivial(p)}))

    def note(self, place: Place, keyword: str, why: str, *, annotation: bool = False) -> None:
        """Note that a keyword of a place is not enforced. If what the place was made of lacks it, that is not enforced."""
        pointer = place.pointer
        if not self.document.at(pointer).has(keyword) and pointer != "#":
            pointer, _, last = pointer.rpartition("/")
            keyword = unescaped(last)
        self.loosened.setdefault(Loosened(pointer, keyword, why, annotation))

    def note_all(self, branch: Branch, keywords: Iterable[str], why: str) -> None:
        """Note that keywords are not enforced, wherever a branch has them."""
        for keyword in keywords:
            for place, _ in branch.having(keyword):
                self.note(place, keyword, why)

    def has_grammar(self, language: languages.Language) -> bool:
        """Return whether a language is simple enough: of itself, and with all others of the document."""
        if languages.is_regular(language):
            return True
        if language not in self._known:
            found = languages.states(language) if self._states_left > 0 else None
            self._states_left -= languages.MAX_STATES if found is None else len(found) // 4  # which are quickly found
            self._known[language] = found is not None
        return self._known[language]

    def meets(self, value: Any, place: Place) -> bool:
        """Return whether a value meets a schema; True, with a note, if that cannot be determined."""
        try:
            return self.checker.meets(value, place)
        except Unsure as unsure:
            self.note(unsure.place, unsure.keyword, "whether a value keeps to it cannot be determined")
            return True


def _trivial(place: Place) -> bool:
    return place.schema is True or (isinstance(place.schema, dict) and all(map(is_annotation, place.schema)))

"""The state of a schema's conversion: its document, the checker of single values, and the keywords that are not enforced."""

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
    """A keyword that is not enforced. pointer: its schema's pointer. annotation: whether JSON Schema itself lets it be ignored."""

    pointer: str
    keyword: str
    why: str
    annotation: bool = False

    def __str__(self) -> str:
        """Return a sentence that names the place and the reason."""
        return f"{place_of(self.pointer, self.keyword)} is not enforced: {self.why}"


class Context:
    """A document during its conversion. loosened: the keywords that are not enforced, in the order in which they were noted."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.checker = Checker(document)
        self.loosened: dict[Loosened, None] = {}
        self._known: dict[languages.Language, bool] = {}
        self._states_left = 3 * languages.MAX_STATES  # a second or two

    def key(self, places: Iterable[Place]) -> Key:
        """Return the key of places that must all be met, leaving out those that allow any value."""
        return tuple(sorted({p.index for p in places if p.schema is False or not all(map(is_annotation, p.keywords))}))

    def note(self, place: Place, keyword: str, why: str, *, annotation: bool = False) -> None:
        """Note that a keyword is not enforced. If the document has no such keyword there, note the keyword that holds the schema."""
        pointer = place.pointer
        if not self.document.at(pointer).has(keyword) and pointer != "#":
            pointer, _, last = pointer.rpartition("/")
            keyword = unescaped(last)
        self.loosened.setdefault(Loosened(pointer, keyword, why, annotation))

    def note_all(self, branch: Branch, keywords: Iterable[str], why: str) -> None:
        """Note that some keywords are not enforced, at each place of a branch that has one of them."""
        for keyword in keywords:
            for place, _ in branch.having(keyword):
                self.note(place, keyword, why)

    def has_grammar(self, language: languages.Language) -> bool:
        """Return whether a language has few enough states for a grammar. Once a document's limit is used up, only regular ones pass."""
        if languages.is_regular(language):
            return True
        if language not in self._known:
            found = languages.states(language) if self._states_left > 0 else None
            self._states_left -= languages.MAX_STATES if found is None else len(found) // 4  # found quickly
            self._known[language] = found is not None
        return self._known[language]

    def meets(self, value: Any, place: Place) -> bool:
        """Return whether a value meets a schema. If a keyword makes this uncertain, note the keyword and return True."""
        try:
            return self.checker.meets(value, place)
        except Unsure as unsure:
            self.note(unsure.place, unsure.keyword, "whether a value keeps to it cannot be determined")
            return True

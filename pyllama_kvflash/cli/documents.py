"""The text of documents that are not text files: PDF with pypdf, DOCX with python-docx (the extra `documents`)."""

import io
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from pyllama_kvflash.errors import UsageError

_PDF, _ZIP, _BODY = b"%PDF-", b"PK\x03\x04", "word/document.xml"
_EDGE = 1024  # bytes at both ends in which to look for a PDF's marks: some files have mail headers before them


def text_of(data: bytes, what: str) -> str | None:
    """Return the text of a PDF or DOCX; None: the data is neither. what: the document's name in errors.

    Each page, paragraph and table row begins a new line, in the document's order. Raises UsageError if the library for the
    format is missing or cannot read the data, or if the document has no text.
    """
    if data.startswith(_PDF) or (_PDF in data[:_EDGE] and b"%%EOF" in data[-_EDGE:]):
        return _read(data, what, "a PDF", "pypdf", _pages, "pdftotext")
    if data.startswith(_ZIP) and _is_docx(data):
        return _read(data, what, "a DOCX", "docx", _paragraphs, "pandoc -t plain")
    return None


def _read(data: bytes, what: str, kind: str, library: str, parts: Any, tool: str) -> str:
    instead = f"give its text, such as from {tool}"
    try:
        found = import_module(library)
    except ImportError:
        msg = f"{what} is {kind}: install its reader with pip install 'pyllama-kvflash[documents]', or {instead}"
        raise UsageError(msg) from None
    try:
        text = "\n\n".join(filter(None, (part.strip() for part in parts(found, io.BytesIO(data)))))
    except Exception as err:  # noqa: BLE001 (broken documents make the libraries raise anything)
        why = (str(err).strip().splitlines() or [type(err).__name__])[0][:200]
        msg = f"{what} is {kind} that cannot be read ({why}): {instead}"
        raise UsageError(msg) from None
    # a wrong font table may give surrogates and zero bytes
    text = text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    if not text:
        msg = f"{what} is {kind} without text, perhaps of images: recognise its text first, such as with ocrmypdf"
        raise UsageError(msg)
    return text


def _pages(pypdf: Any, file: io.BytesIO) -> Iterator[str]:
    for page in pypdf.PdfReader(file).pages:
        yield page.extract_text()


def _is_docx(data: bytes) -> bool:
    try:
        return _BODY in zipfile.ZipFile(io.BytesIO(data)).namelist()
    except zipfile.BadZipFile:
        return False


def _paragraphs(docx: Any, file: io.BytesIO) -> Iterator[str]:
    yield from _blocks(docx.Document(file).element.body, docx.oxml.ns.qn)


def _blocks(node: Any, qn: Callable[[str], str]) -> Iterator[str]:
    """Yield the paragraphs and tables in a node, also those within content controls and insertions. A table has a line for each row."""
    for child in node:
        if child.tag == qn("w:p"):
            yield _line(child, qn)
        elif child.tag == qn("w:tbl"):
            rows = (row for row in child.iter(qn("w:tr")) if next(row.iterancestors(qn("w:tbl"))) is child)
            yield "\n".join(" | ".join(_cells(row, qn)) for row in rows)
        else:
            yield from _blocks(child, qn)


def _cells(row: Any, qn: Callable[[str], str]) -> Iterator[str]:
    for cell in row.iter(qn("w:tc")):
        if next(cell.iterancestors(qn("w:tr"))) is row:  # not of a nested table
            yield " ".join(filter(None, (block.strip() for block in _blocks(cell, qn))))


def _line(paragraph: Any, qn: Callable[[str], str]) -> str:
    marks = {qn("w:tab"): "\t", qn("w:br"): "\n", qn("w:cr"): "\n"}
    runs = (node for node in paragraph.iter() if node.tag in {qn("w:t"), *marks})
    return "".join(marks.get(node.tag) or node.text or "" for node in runs)

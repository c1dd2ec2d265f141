"""Documents that are not text files."""

import io

import pytest


def pdf(*pages: str) -> bytes:
    """A PDF of pages with a line each."""
    n = len(pages)
    kids = " ".join(f"{3 + 2 * i} 0 R" for i in range(n))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {n} >>"]
    font = "<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    for i, page in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({page}) Tj ET" if page else ""
        box = "/MediaBox [0 0 612 792]"
        objects.append(f"<< /Type /Page /Parent 2 0 R {box} /Resources {font} /Contents {4 + 2 * i} 0 R >>")
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    res, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        places.append(len(res))
        res += f"{number} 0 obj\n{text}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    )
    return res + f"{end}startxref\n{len(res)}\n%%EOF\n".encode()


def docx(*parts: str | list[list[str]]) -> bytes:
    """A DOCX of paragraphs and tables."""
    document = pytest.importorskip("docx").Document()
    for part in parts:
        if isinstance(part, str):
            document.add_paragraph(part)
            continue
        table = document.add_table(len(part), len(part[0]))
        for row, texts in zip(table.rows, part, strict=True):
            for cell, text in zip(row.cells, texts, strict=True):
                cell.text = text
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()

"""Write docs/API.md from the signatures and docstrings of the public names; with --check, fail if it is out of date."""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pyllama_kvflash as package
from pyllama_kvflash import errors

TARGET = Path(__file__).with_name("API.md")

HEAD = """# The Python API

Made from the code by `make docs`. These names are in `pyllama_kvflash.__all__`; everything else may change from one
version to the next. Sizes are in tokens, and times in seconds, unless a line says otherwise.
[examples/](../examples/README.md) has short scripts that run as they are.

```python
from pyllama_kvflash import KVFlash, Token

with KVFlash.from_file("model.gguf", n_ctx=65536, pool=2048) as kv:
    for event in kv.generate(prompt, max_tokens=64):
        if isinstance(event, Token):
            print(event.text, end="")
```
"""

SECTIONS = {
    "A model and its pool": ("KVFlash", "KVSequence", "Options", "Rope", "Sampling"),
    "Events": ("Event", "Prefill", "Token", "Reselect", "Paged", "Warn", "Done", "Stats", "as_dict"),
    "Policies": ("Scorer", "View", "Residency"),
}
"""All public names but the errors and the version."""


def definition(name: str) -> tuple[ast.ClassDef | ast.FunctionDef | None, list[str]]:
    """Return a public class or function, and the lines of its module; None: the name is a type alias."""
    value = getattr(package, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return None, []
    source = inspect.getsource(sys.modules[value.__module__])
    kinds = ast.ClassDef, ast.FunctionDef
    return next(n for n in ast.parse(source).body if isinstance(n, kinds) and n.name == name), source.splitlines()


def comments(lines: list[str]) -> dict[int, str]:
    """Return the comments of a source, by line."""
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def prose(node: ast.AST) -> str:
    """Return a docstring as paragraphs, and as a list what it says of arguments and fields."""
    text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    return re.sub(r"^([a-z_]+(?:, [a-z_]+)*): ", r"- `\1`: ", text, flags=re.MULTILINE) + "\n" if text else ""


def signature(node: ast.FunctionDef, owner: str = "") -> str:
    """Return a function as code, without its body."""
    args = ast.unparse(node.args)
    bound = args.split(", ", 1) if owner else ["", args]
    args = bound[1].removeprefix("/, ") if len(bound) > 1 else ""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{owner}{node.name}({args}){result}"


def fields(node: ast.ClassDef, lines: list[str]) -> str:
    """Return the fields of a dataclass as a table, without those for measurements; nothing for other classes."""
    said = comments(lines)
    rows = []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or ast.unparse(item.annotation).startswith("InitVar"):
            continue
        of = range(item.lineno, (item.end_lineno or item.lineno) + 1)
        default = f"`{ast.unparse(item.value)}`" if item.value else ""
        what = " ".join(said[i] for i in of if i in said)
        if what.startswith("for measurements: "):
            continue
        rows.append((f"`{ast.unparse(item.target)}`", f"`{ast.unparse(item.annotation)}`", default, what))
    if not rows:
        return ""
    table = [("field", "type", "default", "what"), ("---",) * 4, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in table) + "\n"


def methods(node: ast.ClassDef) -> Iterator[str]:
    """Yield the public methods and properties of a class."""
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or item.name.startswith("_"):
            continue
        kinds = [ast.unparse(d) for d in item.decorator_list]
        if "property" in kinds:
            result = f": {ast.unparse(item.returns)}" if item.returns else ""
            yield f"**`{item.name}{result}`**\n\n{prose(item)}"
        else:
            owner = f"{node.name}." if "classmethod" in kinds or "staticmethod" in kinds else "."
            yield f"**`{signature(item, owner)}`**\n\n{prose(item)}"


def entry(name: str) -> str:
    """Return what the page says about a public name."""
    node, lines = definition(name)
    if node is None:
        return f"### {name}\n\n`{getattr(package, name)}`\n".replace("pyllama_kvflash.events.", "")
    if isinstance(node, ast.FunctionDef):
        return f"### {name}\n\n**`{signature(node)}`**\n\n{prose(node)}"
    return "\n".join(part for part in (f"### {name}\n", prose(node), fields(node, lines), *methods(node)) if part)


def known_errors() -> str:
    """Return all errors, with what each is."""
    rows = [
        (f"`{name}`", f"`{value.__base__.__name__}`", (value.__doc__ or "").split("\n")[0])
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.KVFlashError)
    ]
    table = [("error", "a kind of", "when"), ("---",) * 3, *rows]
    lines = "\n".join("| " + " | ".join(row) + " |" for row in table)
    return f"## Errors\n\nThey are in `pyllama_kvflash.errors`.\n\n{lines}\n"


def render() -> str:
    """Return the page."""
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts += [f"## {title}\n", *map(entry, names)]
    return "\n".join([*parts, known_errors()])


if __name__ == "__main__":
    text = render()
    if "--check" in sys.argv:
        sys.exit("docs/API.md is out of date: run `make docs`" if TARGET.read_text() != text else 0)
    TARGET.write_text(text)

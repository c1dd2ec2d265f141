"""What the documents name exists: files, headings, options and tests. And the page of results stays a page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pages import IDS, PAGES, ROOT, fences

PACKAGE = ROOT / "pyllama_kvflash"
TESTS = ROOT / "tests"
MAX_RESULTS = 130  # lines of docs/RESULTS.md; details are in docs/results/
MAX_COMMAND = 100  # columns of a command in README.md

# files of llama.cpp, and names that stand for many
OTHER_FILES = (
    "llama.cpp",
    "vendor/llama.cpp",
    "common/speculative.cpp",
    "convert_hf_to_gguf.py",
    "patches/NNNN-name.patch",
)
# options of llama.cpp's tools, and of the script that trained needle-7m, which is not in the repository
OTHER_OPTIONS = {"--vocab-only", "--layers", "--d", "--heads", "--kv", "--ff", "--minutes"}
OTHER_OPTIONS |= {"--no-kv-offload", "--load-mode"}
OTHER_PROGRAMS = ("python", "pip", "make", "hf", "bench/", ".venv/", ".ci/", "compute-sanitizer")

SOURCES = (".py", ".cpp", ".h", ".sh")  # a bare name with such an end is a file of the repository, wherever it is
FILES = (*SOURCES, ".md", ".json", ".patch", ".gguf", ".svg", ".png", ".toml", ".txt", ".lock")


def without_fences(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^ *```[^\n]*\n.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """What is in backticks, code blocks apart."""
    return re.findall(r"`([^`]+)`", without_fences(text))


#
# files
#


def folders() -> set[str]:
    """Names that a path of the repository, or of the package, begins with."""
    made = {"build", ".git", ".venv"}
    return {p.name for base in (ROOT, PACKAGE) for p in base.iterdir() if p.is_dir()} - made


def paths(text: str) -> set[str]:
    """Words in backticks and code blocks that look like files of the repository: they have a slash and begin with a folder
    of the repository or of the package, or end like a file; or they are the bare name of a source file.
    """
    words = " ".join([*spans(text), *fences(text)]).split()
    found = {word.rstrip(".,:;)").strip("\"'([").split("::")[0] for word in words}
    first = folders()
    return {
        word
        for word in found
        if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", word)
        and not word.startswith(OTHER_FILES)
        and (
            ("/" in word.rstrip("/") and (word.split("/")[0] in first or word.endswith(FILES)))
            or (word.endswith("/") and word.rstrip("/") in first)
            or (word.endswith(SOURCES) and not word.startswith((".", "*")))
        )
    }


def there(word: str, folder: Path) -> bool:
    """Whether a path, or a pattern with *, leads to a file from the page's folder, the repository or the package, or is the
    bare name of one.
    """
    name = word.rstrip("/")
    if any(any(base.glob(name)) for base in (folder, ROOT, PACKAGE, PACKAGE / "native" / "src")):
        return True
    own = (PACKAGE, TESTS, ROOT / "bench", ROOT / "docs")  # not all of vendor/: llama.cpp has most names
    return "/" not in word and (any(any(base.rglob(name)) for base in own) or (ROOT / "vendor" / name).exists())


def missing_paths(text: str, folder: Path = ROOT) -> list[str]:
    """Paths that lead nowhere."""
    return sorted(word for word in paths(text) if not there(word, folder))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_paths_lead_somewhere(page: Path):
    assert missing_paths(page.read_text("utf-8"), page.parent) == []


def test_a_path_that_leads_nowhere_is_found():
    text = """`tests/test_nowhere.py`, `docs/NOWHERE.md`, `pyllama_kvflash/nowhere/`, `policy/nowhere.py`, `nowhere.cpp`,
    `nowhere/here.json`, `python bench/nowhere.py --plot docs/figures/nowhere.svg`; `policy/*.h`

```sh
.ci/nowhere
```
"""
    assert missing_paths(text) == [
        ".ci/nowhere",
        "bench/nowhere.py",
        "docs/NOWHERE.md",
        "docs/figures/nowhere.svg",
        "nowhere.cpp",
        "nowhere/here.json",
        "policy/*.h",
        "policy/nowhere.py",
        "pyllama_kvflash/nowhere/",
        "tests/test_nowhere.py",
    ]


def test_a_path_that_leads_somewhere_is_none():
    text = """`tests/test_docs.py`, `docs/RESULTS.md`, `policy/`, `policy/*.py`, `native/lib.py`, `errors.py`, `kvflash.h`,
    `make test`, `qk/tau=1/share=0`, `f16/q8_0`, `user/model:Q8_0`, `/v1/models`, `long.txt`, `application/json`, `drafter/`
"""
    assert missing_paths(text) == []
    assert paths(text) == {
        "tests/test_docs.py",
        "docs/RESULTS.md",
        "policy/",
        "policy/*.py",
        "native/lib.py",
        "errors.py",
        "kvflash.h",
    }


#
# links
#


def anchors(text: str) -> set[str]:
    """What a link can name after #, as GitHub makes it of headings."""
    titles = re.findall(r"^#+ (.+)$", without_fences(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-") for title in titles}


def dead_links(text: str, page: Path) -> list[str]:
    """Links to a file that is not there, or to a heading that it does not have."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_fences(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8") if name else text)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path):
    assert dead_links(page.read_text("utf-8"), page) == []


def test_a_link_that_leads_nowhere_is_found():
    text = "# Here\n[a](docs/RESULTS.md) [b](docs/NOWHERE.md) [c](#here) [d](#there) [e](docs/RESULTS.md#nothing) [f](https://x)"
    assert dead_links(text, ROOT / "README.md") == ["docs/NOWHERE.md", "#there", "docs/RESULTS.md#nothing"]


#
# options
#


def commands(text: str) -> Iterator[list[str]]:
    """Words of the commands in code blocks, in lines that begin with kvflash, and in backticks. A line may go on after a
    backslash, and have several commands.
    """
    for block in fences(text):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            if line.strip().startswith("kvflash "):
                for command in re.split(r"&&|\||  +#|;", line.split("  # ")[0]):
                    yield command.split()
    for span in spans(text):
        if not span.startswith(OTHER_PROGRAMS):
            yield span.split()


def option_names(command: Any) -> set[str]:
    """Of a click command, its own, without hidden ones; and the short name of a mode."""
    shown = [
        param
        for param in command.params
        if not getattr(param, "hidden", False) or param.expose_value or param.opts == ["--kvflash-exact"]
    ]
    return {name for param in shown for name in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}


def all_option_names(command: Any) -> set[str]:
    """And those of its commands."""
    return option_names(command).union(*map(all_option_names, subcommands(command).values()))


def subcommands(command: Any) -> dict[str, Any]:
    """The commands of a group, by name; a command has none."""
    names = command.list_commands(None) if hasattr(command, "list_commands") else ()
    return {name: command.get_command(None, name) for name in names}


def unknown_options(text: str, main: Any) -> list[str]:
    """Options that no command has, or not the one that they are given to."""
    unknown = []
    for words in commands(text):
        command, known = main, all_option_names(main)
        if words and words[0] == "kvflash":
            rest = iter(words[1:])
            while (found := subcommands(command)) and (word := next(rest, None)) in found:
                command = found[word]
            known = all_option_names(command)
        options = [re.split(r"[=,;:)\]|]", word)[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
        if not words or words[0] != "kvflash":  # -x may be anything there
            options = [option for option in options if option.startswith("--")]
        unknown += [option for option in options if option not in known | OTHER_OPTIONS and option.rstrip("-") != ""]
    return sorted(set(unknown))


@pytest.mark.native
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_options_are_known(page: Path):
    pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
    from pyllama_kvflash.cli import main  # noqa: PLC0415

    assert unknown_options(page.read_text("utf-8"), main) == []


@pytest.mark.native
def test_an_option_that_is_not_known_is_found():
    pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
    from pyllama_kvflash.cli import main  # noqa: PLC0415

    text = """`--kvflash-nothing 4`, `--kvflash-host 1G --nothing`, `kvflash bench niah --docs 3 --quick`, `python x.py --y`, `--vocab-only`

```
kvflash run model.gguf -f long.txt --kvflash 4K \\
    --absent && kvflash demo --tokens 8K --stats -zz
make x --other
```
"""
    assert unknown_options(text, main) == [
        "--absent",
        "--kvflash-nothing",
        "--nothing",
        "--quick",
        "--stats",
        "-zz",
    ]


#
# tests
#


def missing_tests(text: str) -> list[str]:
    """Names of tests, and of their files, that there are not."""
    files = {path.name for path in TESTS.rglob("*.py")}
    functions = {
        name for path in TESTS.rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    names = set(re.findall(r"\btest_\w+(?:\.py)?", text))
    return sorted(n for n in names if n not in files and n not in functions and f"{n}.py" not in files)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_tests_exist(page: Path):
    assert missing_tests(page.read_text("utf-8")) == []


def test_a_test_that_does_not_exist_is_found():
    # put together, or the names would stand here
    name, file = "test" + "_nothing", "test" + "_nothing.py"
    text = f"`tests/test_docs.py`, `test_tests_exist`, test_docs, {name}, `tests/{file}`"
    assert missing_tests(text) == [name, file]


#
# size
#


def test_the_results_are_a_page():
    assert len((ROOT / "docs/RESULTS.md").read_text("utf-8").splitlines()) <= MAX_RESULTS


def test_commands_of_the_readme_are_short():
    lines = "\n".join(fences((ROOT / "README.md").read_text("utf-8"))).splitlines()
    assert [line for line in lines if line.startswith("kvflash ") and len(line) > MAX_COMMAND] == []

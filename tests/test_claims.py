"""What the documents claim holds: figures and defaults are the code's, tables are complete, and commands run as they are written.

tests/test_docs.py looks at names only.
"""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

import click
import starlette.applications
from support import commands, documents, drafters, forks, needles, tiny
from support.pages import IDS, PAGES, ROOT, fences
from support.rewritten import with_template

from pyllama_kvflash import Options, Sampling
from pyllama_kvflash.cli import main, settings
from pyllama_kvflash.engine import decoder, meter
from pyllama_kvflash.errors import number
from pyllama_kvflash.json_schema import branches, document, merged, normal, numbers, patterns
from pyllama_kvflash.loading import need
from pyllama_kvflash.native.chat import TEMPLATE_SECONDS
from pyllama_kvflash.native.sampler import MAX_BIASES
from pyllama_kvflash.options import Spec
from pyllama_kvflash.policy import fresh, scorers, sizing
from pyllama_kvflash.pool import checkpoints
from pyllama_kvflash.serve import app, prefixes
from pyllama_kvflash.serve.metrics import Metrics
from pyllama_kvflash.serve.protocols import answer_fields, fields, openai_request, responses_store
from pyllama_kvflash.serve.scheduler import Scheduler

pytestmark = pytest.mark.native

environment = commands.environment

SERVER = (ROOT / "docs" / "SERVER.md").read_text("utf-8")
LIMITS = (ROOT / "pyllama_kvflash" / "native" / "src" / "api" / "template.h").read_text("utf-8")


#
# figures in sentences
#

usual = Options()
coded, qk = Options(policy="fresh", coarse="4"), Options(policy="qk")
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"]
MIB = 1 << 20
(TEMPLATE_TEXT,) = re.findall(r"max_text\s*= (\d+) << 20;", LIMITS)

FIGURES = {
    "README.md": [
        f"A **chunk** of {usual.chunk} tokens fills one block",
        f"each layer chooses units of {fresh.UNIT} tokens, by its attention",
        f"on a GPU up to {sizing.AUTO_FULL >> 10}K tokens; beyond, a pool of half of the free device memory",
        f"of {sizing.AUTO_CAP >> 10}K tokens at most",
        f"beside codes of 4 bits, the first {qk.n_opening} tokens of an answer",
    ],
    "docs/SCORERS.md": [
        f"A pool holds some of a text's chunks ({usual.chunk} tokens each)",
        f"each layer's own attention to units of {fresh.UNIT} tokens",
        f"the first chunk, the last {WORDS[usual.tail]}, pinned ones and the one being written",
        f"(*replay*, {usual.replay} tokens at most)",
        f"every second token (every {Options(spec=Spec(kind='ngram')).interval}th with `--spec`)",
        f"At most {WORDS[qk.n_swaps]} chunks come back each time",
        f"for at most {100 * usual.share:.0f} % of the decode time",
        f"If they have more than {100 * usual.again:.0f} % of its attention",
        f"the token is decoded again, at most {WORDS[decoder._ROUNDS]} times",
        f"a chunk keeps {WORDS[round(5 * scorers.FADES)]} fifths of its last share",
        f"**At most {scorers.MOST_LAYERS} layers.**",
        f"exchanges at most {coded.n_swaps} guests for a token",
        f"With `fresh` and codes of 4 bits {'none' if coded.n_opening == 0 else 'some'} are",
        f"else the first {qk.n_opening} tokens of an answer",
    ],
    "docs/ARCHITECTURE.md": [
        f"**guest**: a *unit* of {fresh.UNIT} positions",
        f"by default {qk.n_opening}, and {'none' if coded.n_opening == 0 else 'some'} with `fresh` and codes of 4 bits",
        f"The pool drafts {decoder._OPENING_DRAFT} tokens a round",
        f"then the logits of {meter.N_CHECKED} tokens",
    ],
    "docs/FAQ.md": [
        f"up to {sizing.AUTO_FULL >> 10}K tokens a GPU decodes",
        f"A GPU's driver takes some {need.DRIVER // MIB} MiB for itself",
    ],
    "docs/SERVER.md": [
        f"Unless policy `fresh` has codes of 4 bits, the first {qk.n_opening} tokens of an answer (`--set opening=N`)",
        f"1 to {openai_request.MAX_ANSWERS} answers",
        f"of up to {openai_request.MAX_LOGPROBS} others",
        f"`max_tokens` is {openai_request.LEGACY_MAX_TOKENS} unless given",
        f"a string or up to {answer_fields.MAX_STOP}",
        f"up to {number(MAX_BIASES)} token ids with -100 to 100",
        f"A body may be {fields.MAX_DEPTH} objects and arrays deep",
        f"At most {number(responses_store.MAX_RESPONSES)} responses and {responses_store.MAX_BYTES // MIB} MiB are kept",
        f"every {number(checkpoints._EVERY)} tokens, where a batch ends",
        f"A sequence keeps up to {checkpoints.MOST}, of which",
        f"all sequences together {usual.checkpoint_limit >> 30} GiB",
        f"a file has the last {WORDS[checkpoints._SAVED]} checkpoints",
        f"(a long one: every {number(prefixes._READ_MUCH)} tokens)",
        f"It has {TEMPLATE_SECONDS:.0f} seconds",
        f"a text {TEMPLATE_TEXT} MiB",
        f"up to {branches.MAX_BRANCHES} combinations",
        f"the range has up to {number(merged.MAX_MULTIPLES)} multiples",
        f"at most {numbers.LONGEST} digits, unless a bound has more",
        f"at most {number(document.MAX_SCHEMAS)} schemas in it, {document.MAX_DEPTH} deep, and {document.MAX_TEXT // MIB} MiB of text",
        f"at most {number(document.MAX_NAME)} characters, patterns {number(patterns.MAX_PATTERN)}, lengths are",
        f"lengths are at most {number(document.MAX_COUNT)}, and the grammar has at most {number(normal.MAX_RULES)} rules",
        f"guests, {fresh.UNIT} tokens of a layer each",
    ],
}
"""Parts of the documents' sentences, with the figures of the code."""


def missing(page: str, parts: list[str]) -> list[str]:
    """Those that a page does not have, however its lines are broken."""
    text = " ".join(page.split())
    return [part for part in parts if part not in text]


@pytest.mark.parametrize("page", FIGURES)
def test_figures_are_those_of_the_code(page: str) -> None:
    assert missing((ROOT / page).read_text("utf-8"), FIGURES[page]) == []


def test_another_figure_is_found() -> None:
    page = "A **chunk** of 32 tokens\nfills one block"
    assert missing(page, [f"chunk** of {n} tokens fills" for n in (32, 64)]) == ["chunk** of 64 tokens fills"]


#
# settings that are named
#


def unknown_settings(text: str) -> list[str]:
    """Fields that `--set` or `Options.` names in a text, and that are not there."""
    unset = set(re.findall(r"--set ([a-z_.]+)\b", text)) - settings.settable(main.commands["run"]).keys() - {"help"}
    return sorted(unset | set(re.findall(r"\bOptions\.([a-z_]+)\b", text)) - Options.__dataclass_fields__.keys())


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_settings_are_fields(page: Path) -> None:
    assert unknown_settings(page.read_text("utf-8")) == []


def test_a_setting_that_is_not_there_is_found() -> None:
    text = "`--set panes=2`, `--set nothing=1`, `--set share=2`, `--set help`, `Options.share`, `Options.rest`."
    assert unknown_settings(text) == ["nothing", "rest", "share"]


#
# tables of the server
#


def rows(section: str) -> list[list[str]]:
    """The rows of the tables of a section of SERVER.md, in cells."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", SERVER, re.MULTILINE | re.DOTALL)
    assert text, section
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text[1].splitlines() if line[:2] == "| "
    ]


def test_defaults_of_the_server_are_those_of_its_options() -> None:
    """What the table says of each option's default, unless it is a word."""
    options = {name: p for p in main.commands["serve"].params if isinstance(p, click.Option) for name in p.opts}
    said = {
        names: (options[name].default, cell.strip("`"))
        for names, told, *_ in rows("Options")
        for name, cell in zip(re.findall(r"`(--[\w-]+)`", names), told.split(", "), strict=False)
        if re.fullmatch(r"`?-?[\d.]+\w*`?", cell)
    }
    assert len(said) >= 8
    assert {names for names, (value, told) in said.items() if str(value).removesuffix(".0") != told} == set()


def test_all_metrics_are_in_the_table() -> None:
    names = set(re.findall(r"^# TYPE kvflash_(\w+)", Metrics().text(), re.MULTILINE))
    told = {name for row in rows("Metrics") for name in re.findall(r"`(\w+)(?:\{\w+\})?`", row[0])}
    assert names == told


def test_all_paths_are_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[starlette.applications.Starlette] = []

    class Seen(starlette.applications.Starlette):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(app, "Starlette", Seen)
    server = app.Server(Scheduler(lambda _: pytest.fail("a model is loaded"), n_queue=1), app.Settings("m", Sampling()))
    server.app()
    server.close()
    paths = {re.sub(r"\{name(:path)?\}", "{id}", route.path) for route in made[0].routes}  # type: ignore[attr-defined]
    told = set(re.findall(r"/[\w/{}-]*", " ".join(re.findall(r"`([^`]*)`", SERVER))))
    assert {path for path in paths - told if not path.startswith("/static/")} == set()


#
# commands
#

NOT_RUN = {
    r"-hf |hf:": "the Hub is not reached",
    r"--rpc ": "needs servers",
    r"convert-draft drafter/ (?!--dry-run)": "tests/test_convert.py runs it, with a model that the drafter is for",
    r"bench ": "takes minutes: bench/tests/test_bench_commands.py runs all with small figures",
    r"demo": "takes a minute: tests/test_cli_relevance.py runs it on a shorter text",
    r"cache ": "of the user's own folder",
    r"plan model.gguf -c": "plans for this machine's GPU",
}
"""Commands that are not run, each with the reason."""


class Line(NamedTuple):
    """A command line of a page."""

    page: str
    text: str


def lines() -> list[Line]:
    """The command lines of the pages that begin with kvflash, or pipe something into it. Results tell of other machines."""
    res = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if "results" in name or name == "CONTRIBUTING.md":
            continue
        text = page.read_text("utf-8")
        blocks = [*fences(text), *re.findall(r"^(?:    .*\n)+", text, re.MULTILINE)]
        for line in re.sub(r" *\\\n *", " ", "\n".join(blocks)).splitlines():
            words = re.split(r"  +", line.strip())[0].split(" # ")[0].strip()  # what follows says what it does
            if re.match(r"(cat \S+ \| |[A-Z_]+=\S+ )?kvflash (?!-?-h|\[)", words) and not re.match(
                r"kvflash [^-]* is ", words
            ):
                res.append(Line(name, words))
    return list({line.text: line for line in reversed(res)}.values())[::-1]


LINES = lines()


def options(line: Line) -> set[str]:
    """The command of a line and its options, without their values, and what the shell does."""
    return set(re.findall(r"kvflash (\w+)|(?<!\S)(--?[a-zA-Z][\w-]*|[|>]|&&)", line.text))


def adds_nothing(line: Line, others: list[Line]) -> bool:
    """Whether one of the others has all of its options. What writes a file that others read is needed."""
    return not re.search("--save-snapshot|--trace", line.text) and any(
        options(line) <= options(other) for other in others
    )


def to_run(lines: list[Line]) -> list[Line]:
    """Few lines that have all options of all of them."""
    res = [line for line in lines if not any(re.search(pattern, line.text) for pattern in NOT_RUN)]
    for line in reversed(res[:]):
        if adds_nothing(line, [other for other in res if other is not line]):
            res.remove(line)
    return res


RUN = to_run(LINES)


def test_the_commands_of_the_pages_are_found() -> None:
    pages = {line.page for line in LINES}
    assert {"README.md", "docs/CLI.md", "docs/CLIENTS.md", "docs/HUB.md", "docs/CONVERT.md"} <= pages
    assert len(RUN) > 20
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line.text) for line in LINES), f"no page has {pattern}"


TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(needle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands name: the bundled model with a template, and short texts."""
    res = tmp_path_factory.mktemp("as-written")
    model = with_template(res / "model.gguf", TEMPLATE)
    (res / "small.gguf").symlink_to(model)
    tiny.write_worded(res / "moe.gguf", "qwen3moe", tiny.MODELS["qwen3moe"])
    drafters.write_drafter("dense", res / "drafter")
    text = needles.document(600, seed=1).text
    for name in ("book", "long", "a", "b", "one", "two", "story", "half-a-story", "report", "minutes"):
        (res / f"{name}.txt").write_text(text)
    (res / "report.pdf").write_bytes(documents.pdf(text[:60].partition("(")[0]))
    (res / "questions.txt").write_text("Who is the heir?\nWhere does it end?\n")
    return res


@pytest.fixture(scope="module")
def shell_environment(folder: Path) -> dict[str, str]:
    """Short answers on one thread, at once on a free port; what is kept goes into the folder."""
    said = {k: v for k, v in os.environ.items() if not k.startswith(("KVFLASH_", "LLAMA_"))}
    short = {"LLAMA_ARG_N_PREDICT": "6", "LLAMA_ARG_THREADS": "1", "LLAMA_ARG_PORT": "0"}
    home = {"XDG_CACHE_HOME": str(folder / "cache"), "MPLCONFIGDIR": str(folder / "matplotlib")}
    return {**said, **short, **home, "PATH": f"{commands.SCRIPT.parent}:{os.environ['PATH']}"}


def answers(line: Line) -> bool:
    """Whether a command writes an answer to stdout: one that only reads a text for a snapshot (-n 1) need not."""
    return "kvflash run " in line.text and not re.search(r" > | -n 1$|kvflash plot", line.text)


def in_a_shell(text: str, folder: Path, environ: dict[str, str], stdin: str) -> subprocess.CompletedProcess[str]:
    """A server is stopped once it is ready."""
    with subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", text], cwd=folder, env=environ, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            if "kvflash serve" in text:
                assert any(said == "kvflash: ready\n" for said in process.stderr or ()), "it becomes ready"
                os.killpg(process.pid, signal.SIGTERM)
            out, err = process.communicate(stdin, timeout=300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(text, process.returncode, out, err)


@pytest.mark.nightly(r"README\.md|docs/[A-Z]+\.md|pyllama_kvflash/cli/.*")
@pytest.mark.slow
@pytest.mark.parametrize("line", RUN, ids=[f"{line.page}: {line.text}" for line in RUN])
def test_a_command_runs_as_it_is_written(
    line: Line, folder: Path, shell_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = "Hello\n" if re.search("kvflash (ask|chat)", line.text) else ""
    name, *args = shlex.split(line.text)
    if name == "kvflash" and args[0] != "serve" and not {"|", ">", "&&"} & set(args):
        monkeypatch.chdir(folder)
        done = forks.forked(args, stdin.encode(), 300, shell_environment)
        code, out, err = done.returncode, done.stdout.decode(), done.stderr.decode()
    else:
        done_text = in_a_shell(line.text, folder, shell_environment, stdin)
        code, out, err = done_text.returncode, done_text.stdout, done_text.stderr
    assert code == 0, err
    assert "Traceback" not in err
    if answers(line):
        assert out.strip(), f"there is no answer: {err}"

"""The options of all commands: their environment variables, and llama.cpp's that they leave out."""

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.commands import USAGE, check_error, good, invoke, summary

from pyllama_kvflash.cli import flags, main, params, roles, settings
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Rope
from pyllama_kvflash.options import Options, Spec

pytestmark = pytest.mark.native

environment = commands.environment
long_file = commands.long_file
ROOT = Path(__file__).resolve().parent.parent
COMMANDS = dict(commands.leaves(main))


def options(*names: str) -> list[click.Option]:
    return [param for param in COMMANDS[names].params if isinstance(param, click.Option)]


POOLED = [names for names in COMMANDS if any(option.name == "settings" for option in options(*names))]


def parsed(command: str, *args: str) -> dict[str, Any]:
    """What a command's options mean, without running it."""
    return main.commands[command].make_context(command, list(args)).params


#
# how many there are
#

OURS = {
    *("pool", "coarse", "policy", "prefill", "mode", "spec_kind", "host_limit", "disk"),
    *("save_snapshot", "restore", "append", "prefix_cache"),
}
"""Options of `run` that llama.cpp has no like of: about the pool, drafts, memory and snapshots."""
SHORT = {"--kvflash-exact"}
"""Names that are short for another option's value. Its help says so."""
TAKEN = {"--jinja", "--rope-scaling", "--rope-scale", "--rope-freq-scale", "--rope-freq-base"}
TAKEN |= {f"--yarn-{name}" for name in ("orig-ctx", "ext-factor", "attn-factor", "beta-slow", "beta-fast")}
"""Options of llama.cpp that change nothing, or that only the help of another one names."""
MEASURED = {"chunk", "tail", "codes_in_panes", "tau", "swaps", "share", "again", "replay"}
"""Fields that measurements and tests vary, and nobody else."""


def test_run_has_few_options() -> None:
    shown = [option.name for option in options("run") if not option.hidden]
    assert len(shown) <= 49
    assert set(shown) >= OURS
    assert len(OURS) <= 12


@pytest.mark.parametrize("command", ["run", "chat", "serve", "inspect"])
def test_help_has_groups(command: str) -> None:
    """Each option is in one of them."""
    known = [name for names in roles.GROUPS.values() for name in names]
    assert len(known) == len(set(known))
    assert {option.name for option in options(command) if not option.hidden} <= set(known)
    titles = re.findall(r"^([A-Z][a-z ]+):$", good(command, "--help").stdout, re.MULTILINE)
    assert titles == [title for title in roles.GROUPS if title in titles]
    assert {"Model", "Pool", "Devices", "Memory and disk", "Output"} <= set(titles)


#
# llama.cpp's that are not here
#


@pytest.mark.parametrize("names", POOLED, ids=" ".join)
def test_an_option_that_only_llama_cpp_has_is_told_by_what_to_do(names: tuple[str, ...]) -> None:
    hidden = {name for option in options(*names) if option.hidden for name in option.opts}
    assert hidden - SHORT - TAKEN == set(params.NOT_HERE)
    for name, what in params.NOT_HERE.items():
        sentence = check_error(invoke(*names, name, "1"), USAGE)
        assert sentence == f"kvflash: error: {name} is not an option here: {what}"


@pytest.mark.parametrize(
    ("args", "want"), [((), None), (("-q",), True), (("--verbose",), False), (("-q", "-v"), False)]
)
def test_quiet_or_verbose(args: tuple[str, ...], want: bool | None) -> None:
    for command in ("run", "chat", "serve"):
        assert parsed(command, *args)["quiet"] is want


def test_the_size_of_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's variable holds for a run, too: else a run would take from the server's files."""
    assert params.cache_size() == 20 << 30
    monkeypatch.setenv("KVFLASH_PREFIX_CACHE_SIZE", "64GiB")
    assert params.cache_size() == 64 << 30


@pytest.mark.parametrize("option", ["--grammar", "--grammar-file"])
def test_a_grammar_is_a_text_or_a_file(tmp_path: Path, option: str) -> None:
    (tmp_path / "a.gbnf").write_text('root ::= "yes"')
    args = ("-p", "Hello", "-n", "4", "-c", "1K")
    assert summary(*args, option, 'root ::= "yes"')["text"] == "yes"
    assert summary(*args, option, str(tmp_path / "a.gbnf"))["text"] == "yes"
    check_error(invoke("run", *args, option, str(tmp_path / "none")), USAGE, "the grammar file", "cannot be read")


@pytest.mark.parametrize("option", ["-j", "-jf", "--json-schema", "--json-schema-file"])
def test_a_schema_is_a_text_or_a_file(tmp_path: Path, option: str) -> None:
    (tmp_path / "a.json").write_text('{"const": "yes"}')
    args = ("-p", "Hello", "-n", "8", "-c", "1K")
    assert summary(*args, option, '{"const": "yes"}')["text"].strip() == '"yes"'
    assert summary(*args, option, str(tmp_path / "a.json"))["text"].strip() == '"yes"'
    check_error(invoke("run", *args, option, "none"), USAGE, "the JSON schema file none cannot be read")


#
# --set
#


def fault(*args: str) -> str:
    return check_error(invoke("run", "-p", "Hello", "-c", "1K", "-n", "1", "-q", *args), USAGE)


def test_commands_that_have_a_pool_have_it() -> None:
    assert {("run",), ("chat",), ("serve",), ("inspect",)} <= set(POOLED)


def test_few_fields_are_set() -> None:
    assert len(settings.settable(COMMANDS["run",])) <= 20


@pytest.mark.parametrize("names", POOLED, ids=" ".join)
def test_no_field_has_two_ways_to_be_set(names: tuple[str, ...]) -> None:
    known = {name.removeprefix("sampling.").replace(".", "_") for name in settings.settable(COMMANDS[names])}
    assert not known & {option.name for option in options(*names)}


@pytest.mark.parametrize("names", POOLED, ids=" ".join)
def test_the_fields_are_listed_with_their_meaning_and_default(names: tuple[str, ...]) -> None:
    text = " ".join(good(*names, "--set", "help").stdout.split())
    for name, setting in settings.settable(COMMANDS[names]).items():
        assert setting.what
        assert f"{name}=" in text
        assert setting.kind in text
    assert (
        "panes=0 a whole number: layers that each device holds while a prompt is read exactly; 1: least memory; "
        in text
    )


def test_a_field_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*args: str) -> Any:
        return parsed("run", *args)["settings"]

    assert found("--set", "auto_cap=4K", "--set", "meter=0", "--set", "kv-offload=false") == {
        "auto_cap": 4096,
        "meter": 0.0,
        "kv_offload": False,
    }
    assert found("--set", "panes=1", "--set", "panes=2") == {"panes": 2}
    assert found("--set", "checkpoint_limit=4GiB") == {"checkpoint_limit": 4 << 30}
    monkeypatch.setenv("KVFLASH_SET", "panes=3 meter=0.1")
    assert found() == {"panes": 3, "meter": 0.1}


def test_the_environment_may_set_what_only_another_command_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_SET", "spec.gate=0 panes=3")
    assert parsed("inspect")["settings"] == {"panes": 3}
    monkeypatch.setenv("KVFLASH_SET", "spec.gates=0")
    check_error(invoke("inspect"), USAGE, "--set spec.gates: there is no such field: ")


def test_it_reaches_the_run(long_file: Path) -> None:
    """Pins that leave no room make the pool larger."""
    args = ("-f", str(long_file), "-c", "4K", "-b", "64", "--kvflash", "768", "-n", "1")
    assert summary(*args)["stats"]["n_pool"] == 768
    assert summary(*args, "--set", "pins=64:576")["stats"]["n_pool"] > 768


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("pane=4", ("--set pane: there is no such field: did you mean panes? --set help lists them",)),
        ("tau=4", ("--set tau: there is no such field: --set help lists them",)),
        ("", ("there is no such field",)),
        ("panes", ("--set panes has no value: give one, such as panes=0",)),
        ("panes=many", ("--set panes: 'many' is not a whole number",)),
        ("meter=some", ("--set meter: 'some' is not a number",)),
        ("kv_offload=perhaps", ("'perhaps' is not true or false",)),
        ("panes=-1", ("--set panes is -1, and must be from 0",)),
        ("policy=lru", ("policy has an option of its own: give --kvflash-policy",)),
        ("spec=ngram", ("there is no such field",)),
    ],
)
def test_bad_settings(given: str, words: tuple[str, ...]) -> None:
    assert all(word in fault("--set", given) for word in words)


#
# names in messages
#


@pytest.mark.parametrize(
    ("names", "text", "want"),
    [
        (("run",), "a larger `n_ctx`, or `type_k` q8_0", "a larger -c/--ctx-size, or -ctk/--cache-type-k q8_0"),
        (("run",), "`max_tokens` is 0, `spec.model` is gone", "-n/--predict is 0, -md/--model-draft is gone"),
        (("run",), "`panes`, `spec.p_min`", "--set panes, --set spec.p_min"),
        (("run",), "`n_parallel`, `panes is 3`, `ls`", "`n_parallel`, `panes is 3`, `ls`"),
        (("serve",), "`n_parallel`", "-np/--parallel"),
        (("bench", "niah"), "`n_ctx` of `contexts`", "`n_ctx` of --contexts"),
        (("bench", "spec"), "`n_max`, `spec.n_max`, `drafter`", "--draft-max, --draft-max, -md/--model-draft"),
    ],
)
def test_messages_name_what_a_command_has(names: tuple[str, ...], text: str, want: str) -> None:
    assert flags.spelled(text, COMMANDS[names]) == want


def test_messages_of_the_library_keep_its_names() -> None:
    assert flags.spelled("`n_ctx` is 3") == "`n_ctx` is 3"
    with pytest.raises(UsageError, match=r"^`panes` is -1, and must be"):
        Options(panes=-1)


#
# environment variables
#


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_an_option_has_one_variable_or_none(names: tuple[str, ...]) -> None:
    for option in options(*names):
        assert option.envvar is None or re.fullmatch(r"(LLAMA|KVFLASH)_[A-Z_]+", str(option.envvar)), option.name


def test_no_two_options_share_a_variable() -> None:
    """Nor does an option have another one in another command."""
    spellings, variables = defaultdict(set), defaultdict(set)
    for names in COMMANDS:
        own = [option.envvar for option in options(*names) if option.envvar]
        assert sorted(map(str, own)) == sorted(map(str, set(own))), names
        for option in options(*names):
            if option.envvar:
                spellings[option.envvar].add(option.opts[-1])
                variables[option.opts[-1]].add(option.envvar)
    assert {name: found for name, found in spellings.items() if len(found) > 1} == {}
    assert {name: found for name, found in variables.items() if len(found) > 1} == {}


def test_the_address_of_the_server_is_not_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_HOST", "2G")
    found = parsed("serve")
    assert (found["host"], found["host_limit"]) == ("127.0.0.1", 2 << 30)
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")
    found = parsed("serve")
    assert (found["host"], found["host_limit"]) == ("0.0.0.0", 2 << 30)


def test_a_bad_value_names_the_variable_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one who set KVFLASH_HOST for the server's address, which is LLAMA_ARG_HOST."""
    monkeypatch.setenv("KVFLASH_HOST", "0.0.0.0")
    check_error(
        invoke("serve"), USAGE, "--kvflash-host (the environment variable KVFLASH_HOST): '0.0.0.0' is not a size"
    )


def test_the_page_has_every_variable_that_the_package_reads() -> None:
    page = (ROOT / "docs/ENVIRONMENT.md").read_text()
    for source in (ROOT / "pyllama_kvflash").rglob("*.py"):
        for name in re.findall(r"""environ(?:\.get\(|\[)["'](\w+)""", source.read_text()):
            assert f"`{name}`" in page, f"{source.name} reads {name}"


def test_every_field_is_spelled_as_an_option() -> None:
    """Those without one of their own are set by --set; `serve` has them all but those for measurements."""
    fields = set(Options.__dataclass_fields__) | {f"spec.{name}" for name in Spec.__dataclass_fields__}
    fields |= {f"rope.{name}" for name in Rope.__dataclass_fields__}
    kept = {name for name in fields if not flags.spelled(f"`{name}`", COMMANDS["serve",]).startswith("-")}
    assert kept == {"spec", "rope", "snapshots", "spec.window"} | MEASURED, "the first two are made of other fields"


def test_messages_name_fields_as_the_commands_can_spell_them() -> None:
    """A field of Options is in backticks wherever a message names it: only so it becomes the option that was typed."""
    names = "|".join(name for name in Options.__dataclass_fields__ if "_" in name)
    bare = re.compile(rf"(?<![`\w.])({names})(?![`\w=])")
    found = []
    for path in sorted((ROOT / "pyllama_kvflash").rglob("*.py")):
        if path.relative_to(ROOT).parts[1] in {"bench", "cli", "convert", "needle"}:
            continue  # their own words
        tree = ast.parse(path.read_text("utf-8"))
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found += [
            f"{path.name}:{node.lineno}: {node.value}"
            for node in texts
            if " " in node.value and id(node) not in documented and bare.search(node.value)
        ]
    assert found == []
    assert bare.search("use a larger n_batch") is not None, "it finds one"

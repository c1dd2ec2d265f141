"""The part that each file plays in a command, and what is refused because of it before anything is loaded."""

import os
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.commands import USAGE, check_error, good, invoke, process
from support.formats import in_parts

from kvflash_bench.shapes import kept_file
from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli import fetch, main, roles
from pyllama_kvflash.convert import source as drafter_source
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.snapshot.file import SnapshotFile

pytestmark = pytest.mark.native

environment = commands.environment


def module(name: str) -> ModuleType:
    """A module of the benches' commands, which may have a command of its own name."""
    return import_module(f"kvflash_bench.cli.{name}")


COMMANDS = dict(commands.leaves(main))
TEXTS = {
    *("prompt", "stop", "system", "api_key", "alias", "host", "hf_repo"),
    *("variants", "tasks", "names", "settings", "questions"),
}
"""Parameters that are plain text. Another one that is must be added here, if it does not name a file."""


def test_a_scorer_model_that_is_set_is_read(tmp_path: Path) -> None:
    model = tmp_path / "small.gguf"
    model.write_bytes(BUNDLED_MODEL.read_bytes())
    res = invoke("run", "-p", "Hello", "--set", f"scorer_model={model}", "-o", model)
    check_error(res, USAGE, "-o/--output", "--set scorer_model")
    assert model.read_bytes() == BUNDLED_MODEL.read_bytes()


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_option_that_names_a_file_has_a_role(names: tuple[str, ...]) -> None:
    command = COMMANDS[names]
    assert isinstance(command, roles.Command)
    for param in command.params:
        if isinstance(param.type, roles.Role):
            assert type(param.type) is not roles.Role
        else:
            assert not re.search(r"FILE|DIR|FOLDER|SRC|\.\w", param.metavar or ""), param.name
            assert not isinstance(param.type, click.File | click.Path)
            gone = isinstance(param, click.Option) and param.hidden  # a value is an error
            assert param.type is not click.STRING or gone or param.name in TEXTS, param.name


#
# each output over each input
#


def roles_of(names: tuple[str, ...], *kinds: type[roles.Role]) -> list[click.Parameter]:
    return [param for param in COMMANDS[names].params if isinstance(param.type, kinds)]


def outputs(names: tuple[str, ...]) -> list[click.Parameter]:
    return [p for p in roles_of(names, roles.Prints, roles.Replaces, roles.Declared) if p.name == "output"] + [
        p for p in roles_of(names, roles.Prints, roles.Replaces) if p.name != "output"
    ]


def inputs(names: tuple[str, ...]) -> list[click.Parameter]:
    found = roles_of(names, roles.Reads, roles.ReadsSnapshot, roles.Declared)
    return [p for p in found if p.name != "output"]


PAIRS = [
    (names, output, read)
    for names in COMMANDS
    for output in outputs(names)
    for read in inputs(names)
    if (output.name, read.name) != ("save_snapshot", "restore")
]


def naming(names: tuple[str, ...], param: click.Parameter, file: Path) -> list[str | Path]:
    """Arguments that give a file to a parameter; to one that takes a folder, as one of its files."""
    folder = file.with_name(f"{file.name}-folder")
    value = file
    if param.name == "shape_dir":
        value = folder
        folder.mkdir()
        os.link(file, kept_file("tiny", folder))
        return ["--shape", "tiny", "--shape-dir", value]
    if (names[0], param.name) in {("bench", "output"), ("convert-draft", "source")}:
        value = folder
        folder.mkdir()
        os.link(file, folder / ("results.md" if param.name == "output" else "config.json"))
    return [param.opts[-1], value] if isinstance(param, click.Option) else [value]


def needed(names: tuple[str, ...], read: click.Parameter) -> list[str | Path]:
    """What else a command wants before it looks for its model."""
    if names == ("convert-draft",):
        return ["--target", BUNDLED_MODEL] if read.name == "source" else ["source"]
    model = read.name in {"model", "model_arg", "shape_dir"}
    if names[0] == "bench" and not model:
        return [BUNDLED_MODEL]
    return ["-p", "a"] if names == ("run",) and model else []


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*args: object, **options: object) -> None:
        msg = "something was loaded"
        raise AssertionError(msg)

    monkeypatch.setattr(KVFlash, "from_file", loads)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("names", "output", "read"), PAIRS, ids=[" ".join([*n, str(o.name), str(r.name)]) for n, o, r in PAIRS]
)
def test_no_output_goes_over_an_input(
    names: tuple[str, ...], output: click.Parameter, read: click.Parameter, tmp_path: Path
) -> None:
    """Not even under another name."""
    file, link = tmp_path / "input.png", tmp_path / "link.png"
    data = b"GGUF" + b"mine" * 100
    file.write_bytes(data)
    os.link(file, link)
    res = invoke(*names, *naming(names, read, file), *naming(names, output, link), *needed(names, read))
    check_error(res, USAGE, "would overwrite the file of", "give another file")
    assert file.read_bytes() == data
    assert link.samefile(file)


def test_the_pairs_are_all_there() -> None:
    """So that a command that declares nothing is seen."""
    found = {(" ".join(names), output.name, read.name) for names, output, read in PAIRS}
    for output in ("output", "trace", "save_snapshot"):
        for read in ("model", "model_arg", "prompt_files", "spec_model", "grammar", "json_schema", "restore"):
            assert ("run", output, read) in found or (output, read) == ("save_snapshot", "restore")
    assert {
        ("plot", "output", "trace"),
        ("convert-draft", "output", "source"),
        ("convert-draft", "output", "target"),
    } <= found
    for bench in ("niah", "facts", "kld", "ruler", "spec", "speed", "paging"):
        assert (f"bench {bench}", "output", "model") in found
    assert len(found) > 40


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("pair", [("-o", "--trace"), ("-o", "--save-snapshot"), ("--trace", "--save-snapshot")])
@pytest.mark.parametrize("exists", [True, False])
def test_two_outputs_are_two_files(pair: tuple[str, str], exists: bool, tmp_path: Path) -> None:
    both, link = tmp_path / "both", tmp_path / "link"
    link.symlink_to(both)
    if exists:
        both.write_text("mine")
    res = invoke("run", "-p", "a", pair[0], both, pair[1], link)
    check_error(res, USAGE, "are one file", *pair, "give each a file of its own")
    assert both.exists() == exists
    assert not exists or both.read_text() == "mine"


#
# what no option names
#


@pytest.mark.usefixtures("nothing_loads")
def test_implicit_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model, one of the Hub, the parts of a split one, and a scorer model that is found."""
    monkeypatch.chdir(tmp_path)
    names = ["bundled.gguf", "hub.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "m.gguf", "m-draft.gguf"]
    for name in names:
        Path(name).write_bytes(b"GGUF mine")
    monkeypatch.setattr(fetch, "BUNDLED_MODEL", Path("bundled.gguf"))
    monkeypatch.setattr(fetch, "fetch", lambda *_: Path("hub.gguf"))
    for target, *args in (
        ("bundled.gguf",),
        ("hub.gguf", "-hf", "user/model"),
        ("big-00002-of-00002.gguf", "big-00001-of-00002.gguf"),
        ("big-00002-of-00002.gguf", "m.gguf", "--spec", "draft", "-md", "big-00001-of-00002.gguf"),
        ("m-draft.gguf", "m.gguf", "--kvflash-policy", "drafter"),
        ("m-draft.gguf", "m.gguf", "--kvflash-policy", "crosstok"),
    ):
        for option in ("-o", "--trace", "--save-snapshot"):
            check_error(invoke("run", "-p", "a", *args, option, target), USAGE, "would overwrite", target)
    assert {name: Path(name).read_bytes() for name in names} == dict.fromkeys(names, b"GGUF mine")
    for args in (("m.gguf", "-o", "m-draft.gguf"), ("big-00001-of-00002.gguf", "-o", "m.gguf")):  # neither is read
        with pytest.raises(AssertionError, match="something was loaded"):
            main.main(["run", "-p", "a", *args], standalone_mode=False)
    assert Path("m-draft.gguf").read_bytes() == b"GGUF mine"


@pytest.mark.usefixtures("nothing_loads")
def test_implicit_inputs_of_benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has no name, a text and a drafter of the package, and a variant's scorer model."""
    monkeypatch.chdir(tmp_path)
    for kind in ("ruler", "spec", "niah"):
        Path(f"kvflash-{kind}").mkdir()
    (mine := tmp_path / "mine.gguf").write_bytes(b"GGUF mine")
    for kind, home, name in (("ruler", "answers", "SAMPLE"), ("spec", "spec", "BUNDLED_DRAFTER")):
        monkeypatch.setattr(module(home), name, mine)
        Path(f"kvflash-{kind}/results.csv").symlink_to(mine)
        check_error(
            invoke("bench", kind, *[BUNDLED_MODEL] * (kind == "ruler")), USAGE, "would overwrite", "results.csv"
        )
    Path("kvflash-niah/results.json").symlink_to(mine)
    check_error(
        invoke("bench", "niah", "--variants", "full,drafter/scorer_model=mine.gguf"),
        USAGE,
        "would overwrite",
        "mine.gguf",
    )
    assert mine.read_bytes() == b"GGUF mine"


@pytest.mark.usefixtures("nothing_loads")
def test_files_that_a_snapshot_has_records_in(tmp_path: Path) -> None:
    path, *_ = in_parts(tmp_path, 3, 5)
    before = (tmp_path / "0.kvsnap").read_bytes()
    res = invoke("run", "-p", "a", "--restore", path, "--save-snapshot", tmp_path / "0.kvsnap")
    check_error(res, USAGE, "would overwrite the file of records of --restore")
    assert (tmp_path / "0.kvsnap").read_bytes() == before


@pytest.mark.usefixtures("nothing_loads")
def test_the_folder_of_the_prefix_cache_is_its_own(tmp_path: Path) -> None:
    cache, link = tmp_path / "cache", tmp_path / "link"
    (cache / "sub").mkdir(parents=True)
    link.symlink_to(cache)
    for option in ("-o", "--trace", "--save-snapshot"):
        for place in (cache / "x", link / "sub" / "x"):
            res = invoke("run", "-p", "a", "--prefix-cache", cache, option, place)
            check_error(res, USAGE, "is in the folder of --prefix-cache")
    assert [p.name for p in cache.rglob("*")] == ["sub"]


@pytest.mark.usefixtures("nothing_loads")
def test_a_converter_may_write_beside_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over files of the folder that it does not read, too; a drafter of the Hub is looked at when it is there."""
    (tmp_path / "config.json").write_text("mine")
    (tmp_path / "old.gguf").write_text("mine")
    monkeypatch.setattr(drafter_source.hub, "snapshot", lambda *_: tmp_path)
    command = ("convert-draft", "hf:owner/drafter", "--target", BUNDLED_MODEL, "-o")
    check_error(invoke(*command, tmp_path / "config.json"), USAGE, "would overwrite the file of SRC")
    assert "would overwrite" not in invoke(*command, tmp_path / "old.gguf").stderr
    assert (tmp_path / "config.json").read_text() == (tmp_path / "old.gguf").read_text() == "mine"


#
# what is not a file
#


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("command", [("run", "-p", "a", "--save-snapshot"), ("convert-draft", "source", "-o")])
def test_a_whole_file_needs_a_regular_one(command: tuple[str, ...], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for place, what in (("pipe", "a pipe"), ("link", "a pipe"), (".", "a directory"), ("/dev/null", "a device")):
        check_error(invoke(*command, tmp_path / place), USAGE, f"is {what}", "give the name of a file")
    check_error(invoke(*command, "-"), USAGE, "is -, and only a text can go to stdout")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_picture_goes_through_a_pipe_name(tmp_path: Path) -> None:
    check_error(invoke("plot", tmp_path / "t", "-o", "-"), USAGE, ".png, .svg, .pdf")
    assert not Path("-").exists()


@pytest.mark.usefixtures("nothing_loads")
def test_stdout_has_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for args in (("--trace", "-"), ("--trace", "-", "-o", "-")):
        check_error(invoke("run", "-p", "a", *args), USAGE, "both go to stdout")
    assert list(tmp_path.iterdir()) == []


def test_the_file_that_stdin_comes_from_is_an_input(tmp_path: Path) -> None:
    (prompt := tmp_path / "prompt").write_text("mine")
    for args in (("-f", "-"), ("-p", "a", "--grammar-file", "-")):
        with prompt.open() as stdin:
            res = process("run", *args, "-o", prompt, stdin=stdin)
        check_error(res, USAGE, "-o/--output", "would overwrite the file of stdin")
    assert prompt.read_text() == "mine"


RUN = ("run", "-p", "The secret code", "-c", "1K", "-n", "4", "--temp", "0", "-q")


def test_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = good(*RUN).stdout
    assert good(*RUN, "-o", "-", "--trace", "/dev/null").stdout == text
    traced = good(*RUN, "-o", "answer", "--trace", "-")
    assert Path("answer").read_text() == text
    assert traced.stdout.startswith('{"event":"start"')
    assert [p.name for p in tmp_path.iterdir()] == ["answer"]


def test_a_snapshot_may_be_updated(tmp_path: Path) -> None:
    """--restore and --save-snapshot of one file: it is read to the end from the old inode, and replaced when whole."""
    snap = tmp_path / "s.kvsnap"
    good(*RUN, "--save-snapshot", snap)
    first = SnapshotFile(snap)
    n = len(first.contents.tokens)
    snap.chmod(0o640)
    for _ in range(2):
        more = ("-p", " of", *RUN[3:], "--restore", snap, "--append")
        text = good("run", *more).stdout
        assert good("run", *more, "--save-snapshot", snap).stdout == text
        now = SnapshotFile(snap)
        for _ in now.verify():
            pass
        assert len(now.contents.tokens) > n
        assert now.contents.tokens[:n].tolist() == first.contents.tokens.tolist()
        n = len(now.contents.tokens)
        first = now
    assert snap.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == [snap.name]

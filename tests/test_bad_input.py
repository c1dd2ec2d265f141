"""What is wrong is said in one sentence, with an exit code: no traceback, no signal, nothing that hangs or is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import CLI
from support.commands import (
    HELLO,
    RUNTIME,
    SCRIPT,
    TIMEOUT,
    USAGE,
    Ended,
    check_error,
    check_good,
    check_plain,
    in_process,
    kvflash,
    shell,
)
from support.oracles import ON_GPU

from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and /dev")]

environment = commands.environment


#
# numbers
#


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--kvflash", "0"), ("--kvflash is 0",)),
        (("--kvflash", "many"), ("--kvflash", "'many'", "auto", "off")),
        (("-c", "99999999999999999999"), ("-c/--ctx-size", "99,999,999,999,999,999,999")),
        (("-ub", "0"), ("-ub/--ubatch-size", "0")),
        (("-t", "0"), ("-t/--threads", "0")),
        (("-n", "-7"), ("-n/--predict is -7, and must be from 0 to 2,147,483,647, or -1",)),
        (("-ctk", "q9_9"), ("--cache-type-k", "'q9_9'", "q8_0")),
        (("-fa", "maybe"), ("--flash-attn", "'maybe'")),
        (("-ngl", "some"), ("--n-gpu-layers", "'some'")),
        (("-ncmoe", "-1"), ("-ncmoe/--n-cpu-moe", "is -1", '"auto"')),
        (("--n-cpu-moe", "lots"), ("--n-cpu-moe", "'lots'", '"auto"')),
        (("-ts", "3,x"), ("--tensor-split", "'3,x'", "3,1")),
        (("-ts", "0,0"), ("-ts/--tensor-split", "(0.0, 0.0)", "3,1")),
        (("-ts", "1" + ",1" * 99), ("-ts/--tensor-split", "100 shares", "at most")),
        (("--rpc", "somewhere"), ("--rpc", "'somewhere'", "host:port")),
        (("--kvflash-host", "99999999T"), ("--kvflash-host", "109,951,161,678,088,372,224")),
        (("--kvflash-host", "some"), ("--kvflash-host", "'some'", "64GiB", "512M")),
        (("--kvflash-host", "64"), ("--kvflash-host", "'64'", "64G")),
        (("--kvflash-prefill", "exactly"), ("--kvflash-prefill", "'exactly'")),
        (
            ("--kvflash-policy", "best"),
            ("--kvflash-policy", "'best'", "auto, fresh, qk, qk-cos, lru, drafter, crosstok"),
        ),
        (("--set", "pins=0:-1"), ("pin 0:-1", "give")),
        (("--set", "pins=0:some"), ("--set pins", "'some'")),
        (("--set", "pins=0:1M"), ("0:1048576", "67584")),
        (("--set", "pins=5"), ("--set pins", "'5'", "0:512")),
        (("--temp", "nan"), ("--temp", "nan")),
        (("--temp", "-1"), ("--temp is -1", "from 0", "0 is greedy")),
        (("--top-k", "99999999999"), ("--top-k", "99,999,999,999")),
        (("--repeat-penalty", "0"), ("--repeat-penalty", "0")),
        (("-s", "99999999999"), ("--seed", "99,999,999,999")),
        (("--frobnicate",), ("--frobnicate",)),
        (("-m", "another.gguf", "one.gguf"), ("another.gguf", "one.gguf")),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) and value[0].startswith("-") else "",
)
def test_bad_option(args: tuple[str, ...], words: tuple[str, ...]) -> None:
    sentence = check_error(in_process("run", "-p", "Hello", *args), USAGE, *words)
    assert "e+" not in sentence, "numbers are written out"


def test_quantised_v_without_flash_attention() -> None:
    res = kvflash("run", *HELLO, "-ctv", "q8_0", "-fa", "off")
    check_error(res, USAGE, "-ctv/--cache-type-v is q8_0", "-fa/--flash-attn is off")
    check_good(kvflash("run", *HELLO, "-ctv", "bf16", "-fa", "off"))


def test_rpc_server_that_is_not_there() -> None:
    check_error(kvflash("run", *HELLO, "--rpc", "127.0.0.1:1"), RUNTIME, "127.0.0.1:1")


def test_pool_smaller_than_the_floor_is_raised() -> None:
    """To what the batch needs, or to the least of all."""
    for args, n_pool in (((), 768), (("-b", "512"), 1024), (("--set", "pins=0:512"), 1024)):
        res = kvflash("run", "-p", "Hello", "-c", "8K", "--kvflash", "100", "-n", "4", "--temp", "0", "--json", *args)
        check_good(res)
        assert f"kvflash: warning: a pool of 100 tokens is too small: raised to {n_pool:,}" in res.err
        found = json.loads(res.out)
        assert found["stats"]["n_pool"] == n_pool
        assert any(f"raised to {n_pool:,}" in text for text in found["warnings"])
        assert found["text"]


def test_a_huge_context_costs_nothing_on_a_pool() -> None:
    res = kvflash(
        "run",
        "-p",
        "Hello",
        "-c",
        "1000000000",
        "--kvflash",
        "1K",
        "-n",
        "2",
        "--json",
        "--kvflash-prefill",
        "pool",
        "--kvflash-policy",
        "lru" if ON_GPU else "fresh",  # by which a GPU's block holds a bit for each unit of the context
    )
    check_good(res)
    assert json.loads(res.out)["stats"]["n_ctx"] == 1_000_000_000


def test_a_huge_context_with_the_full_cache() -> None:
    # the limit, so that this one is not tried on a machine that has the memory
    args = ("run", "-p", "Hello", "-c", "1000000000", "--kvflash", "off", "-n", "2")
    check_error(shell('ulimit -v 4000000; exec "$K" "$@"', *args), RUNTIME, "1,000,000,000", "full cache")


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens", "10"), ("10", "raise")),
        (("--tokens", "1M"), ("--tokens", "1048576", "67520")),
        (("--needles", "0"), ("needles", "0")),
        (("--seed", "-1"), ("seed", "-1")),
        (("--tokens", "1K", "--kvflash", "0"), ("--kvflash", "0")),
        (("--tokens", "1K", "--kvflash", "4K"), ("4,096", "--kvflash")),
    ],
)
def test_bad_demo(tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("mine")
    check_error(in_process("demo", "-o", path, *args), USAGE, *words)
    assert path.read_text() == "mine"


#
# prompts
#


def test_prompt_longer_than_the_context() -> None:
    res = kvflash("run", "-f", "-", "-c", "256", "-n", "4", stdin=b"word " * 500)
    check_error(res, USAGE, "tokens do not fit the context of 256", "-c/--ctx-size")


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf"])
def test_empty_prompt(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    for args in (("-p", ""), ("-f", path), ()):
        check_error(in_process("run", *args, stdin=content), USAGE, "the prompt", "empty")


def test_prompt_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "no-such.txt"
    check_error(kvflash("run", "-f", path), USAGE, str(path), "No such file")
    check_error(kvflash("run", "-f", tmp_path), USAGE, str(tmp_path), "directory")


def test_no_prompt_on_a_terminal() -> None:
    ours, theirs = os.openpty()
    try:
        res = subprocess.run(
            [SCRIPT, "run"], stdin=theirs, capture_output=True, timeout=TIMEOUT, text=True, check=False
        )
    finally:
        os.close(ours)
        os.close(theirs)
    check_error(Ended(res.returncode, res.stdout, res.stderr), USAGE, "no prompt", "-p", "-f")


#
# output
#


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such" / "answer.txt"
    model = ("no-such.gguf", "-p", "Hello")  # nothing is loaded before
    for option in ("-o", "--trace"):
        check_error(kvflash("run", *model, option, tmp_path), USAGE, f"{tmp_path} is a directory")
        check_error(kvflash("run", *model, option, missing), USAGE, f"{missing}: there is no folder {missing.parent}")
    assert not missing.parent.exists()
    small = ("--tokens", "1100", "--needles", "2", "--kvflash", "1K")
    check_error(kvflash("demo", *small, "-o", missing), USAGE, f"{missing}: there is no folder")


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize("form", [(), ("--json",), ("--jsonl",)])
def test_full_disk(form: tuple[str, ...]) -> None:
    res = kvflash("run", *HELLO, *form, "-o", "/dev/full", "--trace", "/dev/full")
    assert res.err.count("/dev/full cannot be written: No space left") == 2
    assert "No space left on device; free some, or write elsewhere; the answer is on stdout" in res.err
    if not form:
        assert res.out == kvflash("run", *HELLO).out
    else:
        assert json.loads(res.out.splitlines()[-1])["reason"] == "length"
    check_error(Ended(res.code, "", res.err), RUNTIME, "/dev/full")
    check_error(shell('"$K" "$@" >&- -o /dev/full', "run", *HELLO, *form), RUNTIME, "/dev/full", "No space left")
    check_error(shell('"$K" "$@" > /dev/full', "run", *HELLO, *form), RUNTIME, "no space left")


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize("command", [("inspect",), ("inspect", "--json"), ("--help",), ("run", "--help")])
def test_full_disk_behind_other_commands(command: tuple[str, ...]) -> None:
    check_error(shell('"$K" "$@" > /dev/full', *command), RUNTIME, "no space left")


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize(
    "args",
    [
        ("no-such.gguf", "-p", "Hello"),
        (str(BUNDLED_MODEL), "-p", "one two three four five six seven " * 20, "-c", "64"),
        (str(BUNDLED_MODEL), "-p", "Hello", "-c", "1K", "-ctv", "q8_0", "-fa", "off"),
        (str(BUNDLED_MODEL), "-p", "Hello", "-ub", "0"),
        (str(BUNDLED_MODEL), "-p", "Hello", "-c", "4K", "--kvflash", "1K", "--kvflash-policy", "drafter"),
        (str(BUNDLED_MODEL), "-p", ""),
    ],
    ids=["model", "prompt", "cache", "option", "drafter", "empty"],
)
def test_a_run_that_fails_writes_nothing_over(tmp_path: Path, args: tuple[str, ...]) -> None:
    path = tmp_path / "answer.txt"
    path.write_text("mine")
    res = kvflash("run", *args, "-o", path)
    check_plain(res)
    assert res.code in {RUNTIME, USAGE}
    assert path.read_text() == "mine"


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize(
    "args",
    [
        ("run", "-p", "Hello", "-c", "4K", "-n", "2000", "--temp", "0"),
        ("run", "-p", "Hello", "-c", "4K", "-n", "2000", "--temp", "0", "--jsonl"),
        ("inspect",),
        ("run", "--help"),
    ],
    ids=lambda args: "_".join(args[:1] + args[-1:]),
)
def test_reader_that_goes_away(args: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [SCRIPT, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as p:
        assert p.stdout
        assert p.stderr
        assert len(p.stdout.read(1)) == 1
        p.stdout.close()
        err = p.stderr.read().decode()
        code = p.wait(TIMEOUT)
    check_plain(Ended(code, "", err))
    assert code in {0, RUNTIME}
    assert "error" not in err  # `| head` is no error


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize("redirect", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(redirect: str) -> None:
    res = shell(f'"$K" "$@" {redirect}', "run", *HELLO)
    check_plain(res)
    if redirect == ">&-":
        check_error(res, RUNTIME, "stdout")
    elif "2>" not in redirect:
        assert res.code == 0, res.err
    res = shell(f'"$K" "$@" {redirect}', "run", "-c", "1K", "-n", "4", "-f", "-")
    check_plain(res)
    assert res.code in {RUNTIME, USAGE}  # stdin has nothing to read, or is closed


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize(
    "args", [("--version",), ("run", "--help"), ("inspect",), ("inspect", "--json"), ("chat", "-c", "256")]
)
def test_a_result_is_not_lost_with_stdout(args: tuple[str, ...]) -> None:
    check_error(shell('echo Hi | "$K" "$@" >&-', *args), RUNTIME, "stdout is closed: send it to a file with > FILE")


def test_stdin_that_cannot_be_read(tmp_path: Path) -> None:
    res = shell(f'"$K" "$@" 0>"{tmp_path}/out"', "chat", "-c", "256", "-t", "1")
    check_error(res, USAGE, "stdin cannot be read: Bad file descriptor")


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """It would have the messages of native code in it."""
    code = (
        "import os, sys; from pyllama_kvflash.cli.streams import refuse_what_is_lost;"
        " refuse_what_is_lost(); sys.exit(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT))"
    )
    shell_ = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, str(tmp_path / "out")]
    assert subprocess.run(shell_, check=False, timeout=TIMEOUT).returncode > 2


@pytest.mark.sampled(CLI)
@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&1 >$OUT | true"])
def test_messages_that_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redirect: str) -> None:
    """A full disk, or a reader that is gone: the answer is written, and the exit code the same."""
    want = kvflash("run", *HELLO).out
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    res = shell(f'"$K" "$@" {redirect}', "run", *HELLO, "--stats")
    assert (res.code, res.err) == (0, "")
    assert (res.out or (tmp_path / "out").read_text()) == want
    code = tmp_path / "code"
    shell(f'{{ "$K" "$@"; echo $? > {code}; }} {redirect}', "run", "no-such.gguf", "-p", "x")
    assert code.read_text() == f"{USAGE}\n"


@pytest.mark.nightly(CLI)
def test_output_encoding_that_cannot_show_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for args in (
        ("run", *HELLO, "-s", "1", "--temp", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "200"),
        ("demo", "--tokens", "1100", "--needles", "2", "--kvflash", "1K", "-t", "1", "-o", "/dev/null"),
        ("inspect",),
    ):
        check_good(kvflash(*args))

"""`-hf`: which file of a repository is the model, and what comes from the Hub, the cache, or as one sentence.

The Hub is a server of this machine that speaks as much of its API as the library asks; the library is the real one.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from click.testing import CliRunner
from support import commands, hubs
from support.changes import HUB
from support.commands import INTERRUPTED, RUNTIME, SCRIPT, TIMEOUT, USAGE
from support.forks import forked
from support.hubs import MIB, Hub, Repo

from pyllama_kvflash import hub
from pyllama_kvflash.cli import main
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.gguf_header import parts
from pyllama_kvflash.hub import Wanted, choose, models
from pyllama_kvflash.needle import BUNDLED_MODEL

pytestmark = [pytest.mark.native, pytest.mark.nightly(HUB)]

environ = hubs.environ
fake = hubs.fake


#
# which file
#

BARTOWSKI = [
    ".gitattributes",
    "README.md",
    *(
        f"Qwen_Qwen3-0.6B-{q}.gguf"
        for q in (
            *("bf16", "IQ2_M", "IQ3_M", "IQ3_XS", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "Q2_K", "Q2_K_L", "Q3_K_L", "Q3_K_M"),
            *("Q3_K_S", "Q3_K_XL", "Q4_0", "Q4_1", "Q4_K_L", "Q4_K_M", "Q4_K_S", "Q5_K_L", "Q5_K_M", "Q6_K", "Q8_0"),
        )
    ),
    "Qwen_Qwen3-0.6B-imatrix.gguf",
    "Qwen_Qwen3-0.6B.imatrix",
]
BARTOWSKI_LARGE = [
    *(f"Llama-3.3-70B-Instruct-Q8_0/Llama-3.3-70B-Instruct-Q8_0-0000{i}-of-00002.gguf" for i in (2, 1)),
    *(f"Llama-3.3-70B-Instruct-Q6_K/Llama-3.3-70B-Instruct-Q6_K-0000{i}-of-00002.gguf" for i in (1, 2)),
    "Llama-3.3-70B-Instruct-Q4_K_M.gguf",
    "Llama-3.3-70B-Instruct-Q4_0_4_4.gguf",
    "Llama-3.3-70B-Instruct.imatrix",
]
UNSLOTH = [
    *(f"BF16/GLM-4.5-BF16-0000{i}-of-00003.gguf" for i in (1, 2, 3)),
    *(f"Q4_K_M/GLM-4.5-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)),
    *(f"UD-Q4_K_XL/GLM-4.5-UD-Q4_K_XL-0000{i}-of-00002.gguf" for i in (1, 2)),
    *(f"UD-Q2_K_XL/GLM-4.5-UD-Q2_K_XL-0000{i}-of-00002.gguf" for i in (1, 2)),
    "GLM-4.5-UD-IQ1_M.gguf",
    "GLM-4.5-UD-IQ1_S.gguf",
    "GLM-4.5-UD-TQ1_0.gguf",
    "config.json",
    "imatrix_unsloth.gguf_file",
    "imatrix_unsloth.gguf",
]
UNSLOTH_VISION = [
    "gemma-3-4b-it-BF16.gguf",
    "gemma-3-4b-it-F16.gguf",
    "gemma-3-4b-it-Q4_K_M.gguf",
    "gemma-3-4b-it-UD-Q4_K_M.gguf",
    "gemma-3-4b-it-UD-Q8_K_XL.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
    "mmproj-F32.gguf",
]
GGML_ORG = ["Qwen3-0.6B-Q4_0.gguf", "Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-f16.gguf", "mmproj-Qwen3-0.6B-Q8_0.gguf"]
GGML_MXFP4 = [f"gpt-oss-120b-mxfp4-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
LMSTUDIO = [
    "README.md",
    "gemma-3-4B-it-QAT-Q4_0.gguf",
    "gemma-3-4B-it-Q3_K_L.gguf",
    "gemma-3-4B-it-Q4_K_M.gguf",
    "gemma-3-4B-it-Q8_0.gguf",
    "mmproj-model-f16.gguf",
]
MRADERMACHER = ["Tiny.i1-IQ1_S.gguf", "Tiny.i1-Q4_K_S.gguf", "Tiny.i1-Q6_K.gguf", "Tiny.imatrix.gguf"]
UNDERSCORES = ["tiny_1b_q4_k_m.gguf", "tiny_1b_q8_0.gguf", "tiny_1b_fp16.gguf"]
FOLDERS = ["Q8_0/ggml-model-00001-of-00002.gguf", "Q8_0/ggml-model-00002-of-00002.gguf", "F16/ggml-model.gguf"]
BOTH = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "sub/m-longer-Q8_0.gguf", "m-F16-Q8_0.gguf"]
DRAFTS = ["mtp-Qwen3.5-Q4_K_M.gguf", "eagle3-Q4_K_M.gguf", "Qwen3.5-dflash-Q4_K_M.gguf", "Qwen3.5-MTP-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    ("names", "quant", "wanted"),
    [
        (BARTOWSKI, None, "Qwen_Qwen3-0.6B-Q4_K_M.gguf"),
        (BARTOWSKI, "q8_0", "Qwen_Qwen3-0.6B-Q8_0.gguf"),
        (BARTOWSKI, "F16", None),
        (BARTOWSKI, "Q4_K", None),
        (BARTOWSKI, "Q3_K_L", "Qwen_Qwen3-0.6B-Q3_K_L.gguf"),
        (BARTOWSKI, "iq4_xs", "Qwen_Qwen3-0.6B-IQ4_XS.gguf"),
        (BARTOWSKI, "Q4_XS", None),
        (BARTOWSKI, "imatrix", None),
        (BARTOWSKI, "K_M", None),
        (BARTOWSKI_LARGE, None, "Llama-3.3-70B-Instruct-Q4_K_M.gguf"),
        (BARTOWSKI_LARGE, "Q4_0", None),
        (BARTOWSKI_LARGE, "Q8_0", "Llama-3.3-70B-Instruct-Q8_0/Llama-3.3-70B-Instruct-Q8_0-00001-of-00002.gguf"),
        (UNSLOTH, None, "Q4_K_M/GLM-4.5-Q4_K_M-00001-of-00002.gguf"),
        (UNSLOTH, "Q4_K_XL", "UD-Q4_K_XL/GLM-4.5-UD-Q4_K_XL-00001-of-00002.gguf"),
        (UNSLOTH, "ud-q4_k_xl", "UD-Q4_K_XL/GLM-4.5-UD-Q4_K_XL-00001-of-00002.gguf"),
        (UNSLOTH, "TQ1_0", "GLM-4.5-UD-TQ1_0.gguf"),
        (UNSLOTH_VISION, None, "gemma-3-4b-it-Q4_K_M.gguf"),
        (UNSLOTH_VISION, "UD-Q4_K_M", "gemma-3-4b-it-UD-Q4_K_M.gguf"),
        (UNSLOTH_VISION, "f16", "gemma-3-4b-it-F16.gguf"),
        (UNSLOTH_VISION, "F32", None),
        (GGML_ORG, None, "Qwen3-0.6B-Q8_0.gguf"),
        (GGML_MXFP4, None, "gpt-oss-120b-mxfp4-00001-of-00003.gguf"),
        (GGML_MXFP4, "MXFP4", "gpt-oss-120b-mxfp4-00001-of-00003.gguf"),
        (LMSTUDIO, None, "gemma-3-4B-it-Q4_K_M.gguf"),
        (LMSTUDIO, "Q4_0", "gemma-3-4B-it-QAT-Q4_0.gguf"),
        (MRADERMACHER, None, "Tiny.i1-IQ1_S.gguf"),
        (MRADERMACHER, "Q6_K", "Tiny.i1-Q6_K.gguf"),
        (MRADERMACHER, "i1-Q6_K", "Tiny.i1-Q6_K.gguf"),
        (UNDERSCORES, None, "tiny_1b_q4_k_m.gguf"),
        (FOLDERS, "Q8_0", "Q8_0/ggml-model-00001-of-00002.gguf"),
        (FOLDERS, None, "Q8_0/ggml-model-00001-of-00002.gguf"),
        (BOTH, "Q8_0", "m-F16-Q8_0.gguf"),
        (BOTH, "F16", "m-F16-Q8_0.gguf"),
        (DRAFTS, None, "Qwen3.5-MTP-Q4_K_M.gguf"),
        (["model.gguf"], None, "model.gguf"),
        (["model.gguf"], "Q4_K_M", None),
        (["model.safetensors", "config.json"], None, None),
        ([], None, None),
    ],
)
def test_choose(names: list[str], quant: str | None, wanted: str | None) -> None:
    """The same, whatever the order of the listing."""
    assert choose(names, quant) == wanted
    assert choose(names[::-1], quant) == wanted
    assert wanted is None or wanted in models(names)


def test_parts() -> None:
    assert parts("a/m-Q8_0.gguf") == ["a/m-Q8_0.gguf"]
    assert parts("a/m-00002-of-00003.gguf") == [f"a/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert parts("m-00001-of-00000.gguf") == ["m-00001-of-00000.gguf"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ggml-org/Qwen3-0.6B-GGUF", Wanted("ggml-org/Qwen3-0.6B-GGUF")),
        ("ggml-org/Qwen3-0.6B-GGUF:Q8_0", Wanted("ggml-org/Qwen3-0.6B-GGUF", None, "Q8_0")),
        ("a/b@v1.0:UD-Q4_K_XL", Wanted("a/b", "v1.0", "UD-Q4_K_XL")),
        ("a/b@refs/pr/1", Wanted("a/b", "refs/pr/1")),
    ],
)
def test_names(text: str, wanted: Wanted) -> None:
    assert Wanted.parse(text) == wanted
    assert str(wanted) == text


@pytest.mark.parametrize(
    "text",
    ["", "a", "a/", "/b", "a/b/c", "a/b:", "a/b@", "a/b@:Q8_0", "a b/c", "hf:a/b", "https://hf.co/a/b", "a/b:Q8_0@v1"],
)
def test_bad_names(text: str) -> None:
    with pytest.raises(UsageError, match="is not a model of the Hub: give user/model"):
        Wanted.parse(text)


#
# a Hub
#

Done = subprocess.CompletedProcess[str]


def process(environ: dict[str, str], *args: str, **more: str) -> Done:
    res = forked(list(args), b"", TIMEOUT, environ | more)
    return Done(res.args, res.returncode, res.stdout.decode(), res.stderr.decode())


def good(environ: dict[str, str], *args: str, **more: str) -> Done:
    res = process(environ, *args, **more)
    assert res.returncode == 0, res.stderr
    return res


def model_of(res: Done) -> Path:
    return Path(json.loads(res.stdout)["model"])


def check_error(res: Done, code: int, *words: str) -> None:
    """One sentence with these words, and nothing of the library's beside it."""
    commands.check_error(res, code, *words)
    assert all(line.startswith("kvflash: ") for line in res.stderr.splitlines()), res.stderr


#
# what is downloaded
#


def test_inspect(fake: Hub, environ: dict[str, str]) -> None:
    """From the Hub, then from the cache after one question, then without any; the file is the bundled one."""
    args = ("inspect", "-hf", "test/needle:q8_0", "--json")
    first = good(environ, *args)
    path = model_of(first)
    assert (json.loads(first.stdout)["architecture"], path.name) == ("qwen3", "needle-Q8_0.gguf")
    assert path.is_relative_to(Path(environ["HF_HOME"]) / "hub" / "models--test--needle" / "snapshots")
    assert path.read_bytes() == BUNDLED_MODEL.read_bytes()
    assert re.search(r"^kvflash: download needle-Q8_0.gguf: [\d.]+ MiB of [\d.]+ MiB$", first.stderr, re.MULTILINE)
    assert fake.downloads() == ["needle-Q8_0.gguf"]

    fake.asked.clear()
    again = good(environ, *args)
    assert (model_of(again), again.stderr) == (path, "")
    assert [method for method, *_ in fake.asked] == ["GET", "HEAD"]  # the listing, and the library's look at the file
    assert not fake.downloads()

    fake.asked.clear()
    for more, variables in ((("--offline",), {}), ((), {"HF_HUB_OFFLINE": "1"}), ((), {"LLAMA_ARG_OFFLINE": "1"})):
        offline = good(environ, *args, *more, **variables)
        assert model_of(offline) == path
        assert offline.stderr == "kvflash: hf:test/needle: offline; using needle-Q8_0.gguf from the cache\n"
    assert not fake.asked


def test_a_plan_downloads_the_header_alone(fake: Hub, environ: dict[str, str]) -> None:
    """By ranges, twice as much each time; what was downloaded is not asked for. The command that it prints downloads the model."""
    script = "from pyllama_kvflash import hub, cli; hub._HEADER = 1 << 16; cli.main()"
    plan = ("plan", "-hf", "test/needle:Q8_0", "--memory", "8G", "-c", "16K")

    def planned() -> str:
        res = subprocess.run(
            [sys.executable, "-c", script, *plan],
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert res.returncode == 0, res.stderr
        assert "kvflash run -hf test/needle:Q8_0 -f long.txt -c 16K" in res.stdout
        return res.stdout

    found = planned()
    ranges = [part for method, path, part in fake.asked if method == "GET" and path.endswith(".gguf")]
    assert ranges[:2] == ["bytes=0-65535", "bytes=0-131071"]
    assert int(str(ranges[-1]).partition("-")[2]) < len(BUNDLED_MODEL.read_bytes()) // 2
    good(environ, "inspect", "-hf", "test/needle:Q8_0")
    fake.asked.clear()
    assert [line for line in planned().splitlines() if "RAM" not in line] == [
        line for line in found.splitlines() if "RAM" not in line
    ]
    assert not [path for method, path, _ in fake.asked if method == "GET" and path.endswith(".gguf")]
    assert "there is no such" not in found


def test_revision(fake: Hub, environ: dict[str, str]) -> None:
    repo = fake.repos["test/needle"]
    for revision in ("v1", repo.commit):
        found = json.loads(good(environ, "inspect", "-hf", f"test/needle@{revision}:Q8_0", "--json").stdout)
        assert repo.commit in found["model"]
        good(environ, "inspect", "-hf", f"test/needle@{revision}:Q8_0", "--offline")
    check_error(process(environ, "inspect", "-hf", "test/needle:Q8_0", "--offline"), RUNTIME, "not in the cache")


def test_without_the_usual_quant_the_first(fake: Hub, environ: dict[str, str]) -> None:
    files = fake.repos["test/needle"].files
    files.pop("needle-F16.gguf")
    files["needle-Q6_K.gguf"] = files.pop("needle-Q8_0.gguf")
    res = good(environ, "inspect", "-hf", "test/needle")
    assert "kvflash: hf:test/needle has no Q4_K_M or Q8_0: taking its first model, needle-Q6_K.gguf\n" in res.stderr


def test_all_parts_of_a_split_model(fake: Hub, environ: dict[str, str]) -> None:
    """The first is the model, whichever is named; offline, a model of which a part is missing is none."""
    res = process(environ, "inspect", "-hf", "test/split")
    check_error(res, RUNTIME, "big-Q4_K_M-00001-of-00003.gguf is not a GGUF model")
    assert fake.downloads() == list(fake.repos["test/split"].files)
    res = process(environ, "inspect", "-hf", "test/split", "-hff", "Q4_K_M/big-Q4_K_M-00002-of-00003.gguf")
    check_error(res, RUNTIME, "00001-of-00003.gguf is not a GGUF model")
    assert len(fake.downloads()) == 3

    offline = ("inspect", "-hf", "test/split:Q4_K_M", "--offline")
    check_error(process(environ, *offline), RUNTIME, "is not a GGUF model")
    next(Path(environ["HF_HOME"]).rglob("*00003-of-00003.gguf")).unlink()
    check_error(process(environ, *offline), RUNTIME, "hf:test/split: Q4_K_M is not in the cache", "without --offline")


def test_a_download_that_breaks_off_goes_on(fake: Hub, environ: dict[str, str]) -> None:
    """Where it broke off: the library takes pieces of 10 MB."""
    data = BUNDLED_MODEL.read_bytes() + bytes(24 * MIB)
    fake.repos["test/large"] = Repo({"large-Q4_K_M.gguf": data})
    fake.truncate["large-Q4_K_M.gguf"] = 14 * MIB
    good(environ, "inspect", "-hf", "test/large")
    ranges = [r for method, path, r in fake.asked if method == "GET" and path.endswith("large-Q4_K_M.gguf")]
    assert len(ranges) == 2
    assert re.fullmatch(r"bytes=[1-9]\d+-", ranges[1] or "")
    (blob,) = Path(environ["HF_HOME"]).rglob("blobs/*")
    assert blob.read_bytes() == data


def test_interrupted(fake: Hub, environ: dict[str, str]) -> None:
    fake.stall = threading.Event()
    command = [str(SCRIPT), "inspect", "-hf", "test/needle:Q8_0"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr
        deadline = time.monotonic() + TIMEOUT
        while not fake.downloads():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        err = run.stderr.read()
    assert run.returncode == INTERRUPTED, err
    assert err.endswith("kvflash: error: interrupted\n")
    assert "Traceback" not in err


#
# what goes wrong
#


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("test/needle:Q5_K_M",), USAGE, ("hf:test/needle has no Q5_K_M: give one of F16, Q8_0",)),
        (("test/needle", "-hff", "no.gguf"), USAGE, ("has no file no.gguf: give one of needle-F16.gguf, needle-Q8_0",)),
        (("test/needle@v2",), USAGE, ("hf:test/needle@v2 has no such revision", "after the @")),
        (("test/torn",), USAGE, ("has no file Q4_K_M/big-Q4_K_M-00003-of-00003.gguf",)),
        (("test/weights",), USAGE, ("has no GGUF model", "convert it", "convert_hf_to_gguf.py")),
        (("test/weights", "-hff", "model.gguf"), USAGE, ("has no GGUF model",)),
        (("test/none",), USAGE, ("hf:test/none does not exist, or is private", "hf auth login")),
        (("test/private",), USAGE, ("does not exist, or is private",)),
        (("test/a..b",), USAGE, ("does not exist",)),
        (
            ("test/gated",),
            RUNTIME,
            ("gated", "accept its terms on https://huggingface.co/test/gated,", "hf auth login"),
        ),
        (("needle",), USAGE, ("-hf needle is not a model of the Hub: give user/model",)),
        (("test/needle", "--offline"), RUNTIME, ("hf:test/needle: a model is not in the cache", "without --offline")),
        (("test/needle", "-m", "a.gguf"), USAGE, ("two models are given, a.gguf and -hf test/needle: give one",)),
        (("test/needle:Q8_0", "b.gguf"), USAGE, ("two models are given, b.gguf and -hf test/needle:Q8_0",)),
    ],
)
def test_errors(fake: Hub, environ: dict[str, str], args: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    check_error(process(environ, "inspect", "-hf", *args), code, *words)
    assert code == USAGE or "gated" in args[0] or not fake.asked


def test_bad_token(fake: Hub, environ: dict[str, str]) -> None:
    fake.bad_token = True
    for more in ((), ("-hff", "needle-Q8_0.gguf")):
        res = process(environ, "inspect", "-hf", "test/needle:Q8_0", *more, HF_TOKEN="hf_wrong")
        check_error(res, RUNTIME, "hf:test/needle cannot be downloaded: the Hub rejects your token", "HF_TOKEN")


def test_without_a_network(fake: Hub, environ: dict[str, str]) -> None:
    """What is in the cache is used, and said; what is not, is an error."""
    nowhere, args = {"HF_ENDPOINT": "http://127.0.0.1:9"}, ("inspect", "--json", "-hf", "test/needle:Q8_0")
    words = ("hf:test/needle is not in the cache, and the Hub cannot be reached", "go online")
    for more in ((), ("-hff", "needle-Q8_0.gguf")):
        check_error(process(environ, *args, *more, **nowhere), RUNTIME, *words)
    path = model_of(good(environ, *args))
    for more in ((), ("-hff", path.name)):
        res = good(environ, *args, *more, **nowhere)
        assert model_of(res) == path
        assert res.stderr == f"kvflash: hf:test/needle: the Hub cannot be reached; using {path.name} from the cache\n"


def test_a_hub_that_is_down(fake: Hub, environ: dict[str, str]) -> None:
    args = ("inspect", "-hf", "test/needle:Q8_0")
    fake.down = True
    check_error(process(environ, *args), RUNTIME, "hf:test/needle cannot be downloaded: ", "503")
    fake.down = False
    good(environ, *args)
    fake.down = True
    res = good(environ, *args)
    assert "503" in res.stderr
    assert res.stderr.endswith("; using needle-Q8_0.gguf from the cache\n")


def test_what_was_downloaded_runs_when_access_is_lost(fake: Hub, environ: dict[str, str]) -> None:
    """Of a gated repository the Hub still lists the files, and the library then takes the cache without a word."""
    args = ("inspect", "-hf", "test/needle:Q8_0", "--json")
    path = model_of(good(environ, *args))
    for error, word in (((403, "GatedRepo"), ""), ((401, "RepoNotFound"), "private")):
        fake.repos["test/needle"].error = error
        res = good(environ, *args)
        assert model_of(res) == path
        assert word in res.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ("no space is left for the Hub's cache", "set HF_HOME")),
        (RuntimeError("I/O error: No space left on device (os error 28)"), ("no space is left for the Hub's cache",)),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), ("cannot be downloaded: ", "/cache")),
        (RuntimeError("\n  strange \n more"), ("cannot be downloaded: strange",)),
        (TimeoutError("slow"), ("the Hub cannot be reached", "give a file")),
    ],
)
def test_translated(error: Exception, words: tuple[str, ...]) -> None:
    res = hub.translated("hf:a/b", error, "a file")
    assert res.exit_code == RUNTIME
    assert "\n" not in str(res)
    for word in words:
        assert word in str(res)


#
# which model
#


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """What was asked of the Hub, which gives the bundled model, whatever it is."""
    for name in list(os.environ):
        if name.startswith(("KVFLASH_", "LLAMA_ARG_")):
            monkeypatch.delenv(name)
    res: list[Wanted] = []

    def fetch(model: Wanted, *_: Any) -> Path:
        res.append(model)
        return BUNDLED_MODEL

    monkeypatch.setattr("pyllama_kvflash.cli.fetch.fetch", fetch)
    return res


def inspected(*args: str) -> str:
    res = CliRunner().invoke(main, ["inspect", *args, "--json"])
    assert res.exception is None or isinstance(res.exception, SystemExit), repr(res.exception)
    return str(json.loads(res.stdout)["model"]) if res.exit_code == 0 else res.stderr


def test_what_is_typed_goes_before_the_environment(
    wanted: list[Wanted], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "typed.gguf"
    file.write_bytes(BUNDLED_MODEL.read_bytes())
    monkeypatch.setenv("LLAMA_ARG_HF_REPO", "a/b")
    monkeypatch.setenv("LLAMA_ARG_HF_FILE", "c.gguf")
    assert inspected() == str(BUNDLED_MODEL)
    assert wanted == [Wanted("a/b", None, None, "c.gguf")]
    assert inspected(str(file)) == inspected("-m", str(file)) == str(file)
    assert len(wanted) == 1
    monkeypatch.setenv("LLAMA_ARG_MODEL", "env.gguf")
    assert "the environment names two models, env.gguf and -hf a/b" in inspected()
    inspected("-hf", "d/e")
    assert wanted[1].repo == "d/e"


def test_benches_take_it(wanted: list[Wanted], tmp_path: Path) -> None:
    args = ("bench", "speed", "-hf", "a/b", "--shape", "tiny", "-o", str(tmp_path / "out"))
    res = CliRunner().invoke(main, list(args))
    assert res.exit_code == USAGE
    assert "both a/b and --shape tiny are given" in res.stderr
    assert not wanted


#
# the converter's downloads
#


def test_snapshot(fake: Hub, environ: dict[str, str], tmp_path: Path) -> None:
    """By the same code: the files that fit, and the same sentences."""
    res = process(environ, "convert-draft", "hf:test/weights", "--dry-run")
    assert res.returncode == RUNTIME
    assert "model.safetensors is not a safetensors file" in res.stderr
    assert sorted(fake.downloads()) == ["config.json", "model.safetensors"]
    res = process(environ, "convert-draft", "hf:test/none", "--dry-run")
    assert res.returncode == USAGE
    assert "hf:test/none does not exist" in res.stderr

"""`kvflash bench` and `kvflash plot` are commands of kvflash_bench, which need not be installed."""

import subprocess
import sys

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.commands import USAGE, check_error, good, invoke

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    "args", [("bench",), ("bench", "--help"), ("bench", "niah", "m.gguf", "--docs", "2"), ("plot", "x")]
)
def test_where_it_is_not_installed_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    monkeypatch.setitem(sys.modules, "kvflash_bench", None)
    said = check_error(invoke(*args), USAGE)
    assert said == f"kvflash: error: `kvflash {args[0]}` is a package of its own: pip install kvflash-bench"


def test_help_lists_both_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("Compare the answers of pools", "Not installed: pip install kvflash-bench"):
        text = good("--help").stdout
        assert f"  bench          {said}" in text
        assert "\n  plot  " in text
        monkeypatch.setitem(sys.modules, "kvflash_bench", None)


def test_other_commands_do_not_import_it() -> None:
    code = "import sys; from pyllama_kvflash.cli import main; sys.exit('kvflash_bench' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

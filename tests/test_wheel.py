"""The wheel: what release/make_wheel.py asks of one, and, where the library is a wheel's, what it loads."""

import importlib.util
import os
import platform
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
MACHINE = platform.machine()
GOOD = f"pyllama_kvflash-0.1.0-cp311-abi3-manylinux_2_34_{MACHINE}.whl"


@pytest.fixture(scope="module")
def make_wheel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_wheel", ROOT / "release" / "make_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, names: set[str]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "")
    return path


def test_a_wheel_is_complete_and_holds_nothing_twice(make_wheel: ModuleType, tmp_path: Path):
    names = make_wheel.needed(GOOD)
    make_wheel.check(write(tmp_path / GOOD, names))
    model = "pyllama_kvflash/needle/needle-7m-q8_0.gguf"
    for lost in (
        "pyllama_kvflash/py.typed",
        "pyllama_kvflash/serve/static/index.html",
        "pyllama_kvflash/serve/static/lib/purify.es.mjs",
        f"pyllama_kvflash/native/libggml-cpu-{make_wheel.OLDEST[MACHINE]}.so",
        model,
    ):
        with pytest.raises(make_wheel.WheelError, match=f"lacks {lost}: delete build/"):
            make_wheel.check(write(tmp_path / GOOD, names - {lost}))
    for more in ("pyllama_kvflash/native/libllama.so.0", "pyllama_kvflash/native/src/kvflash.h"):
        with pytest.raises(make_wheel.WheelError, match=f"has {more}, which nobody needs"):
            make_wheel.check(write(tmp_path / GOOD, {*names, more}))


@pytest.mark.parametrize(("local", "backend"), [("cu13", "cuda"), ("vulkan", "vulkan")])
def test_a_wheel_of_a_gpu_has_its_backend(make_wheel: ModuleType, tmp_path: Path, local: str, backend: str):
    name = GOOD.replace("0.1.0", f"0.1.0+{local}")
    with pytest.raises(make_wheel.WheelError, match=rf"lacks pyllama_kvflash/native/libggml-{backend}\.so"):
        make_wheel.check(write(tmp_path / name, make_wheel.needed(GOOD)))
    make_wheel.check(write(tmp_path / name, make_wheel.needed(name)))


@pytest.mark.parametrize(
    ("tag", "library", "module"),
    [
        ("manylinux_2_35_x86_64", "libllama.so", "libggml-cpu-x64.so"),
        ("manylinux_2_35_aarch64", "libllama.so", "libggml-cpu-armv8.0_1.so"),
        ("macosx_14_0_arm64", "libllama.dylib", "libggml-cpu-apple_m1.so"),
    ],
)
def test_a_wheel_is_judged_by_its_own_machine(
    make_wheel: ModuleType, tmp_path: Path, tag: str, library: str, module: str
):
    name = f"pyllama_kvflash-0.1.0-cp311-abi3-{tag}.whl"
    names = make_wheel.needed(name)
    assert {f"pyllama_kvflash/native/{file}" for file in (library, module)} <= names
    make_wheel.check(write(tmp_path / name, names))


@pytest.mark.parametrize("tag", ["cp311-cp311-manylinux_2_34", "cp311-abi3-linux", "cp311-abi3-musllinux_1_2"])
def test_a_wheel_for_this_machine_alone_is_refused(make_wheel: ModuleType, tmp_path: Path, tag: str):
    with pytest.raises(make_wheel.WheelError, match="is not tagged"):
        make_wheel.check(tmp_path / f"pyllama_kvflash-0.1.0-{tag}_{MACHINE}.whl")


@pytest.mark.native
def test_one_of_the_cpu_s_backends_is_loaded():
    native = pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
    folder = Path(sys.modules["pyllama_kvflash.native._kvflash"].__file__).parent
    if not list(folder.glob("libggml-cpu-*.so")):
        pytest.skip("the library was built for this processor alone")
    assert [device.name for device in native.devices() if not device.gpu] == ["CPU"]
    loaded = set(re.findall(r"/(libggml-\w+(?:-[\w.]+)?)\.so$", Path("/proc/self/maps").read_text(), re.MULTILINE))
    assert len({name for name in loaded if name.startswith("libggml-cpu-")}) == 1
    assert "libggml-rpc" in loaded


@pytest.mark.native
@pytest.mark.skipif("KVFLASH_WHEEL" not in os.environ, reason="the tests run on the tree: make wheel-test")
def test_the_tests_run_on_the_wheel():
    folder = Path(sys.modules["pyllama_kvflash"].__file__).parent.parent
    with zipfile.ZipFile(os.environ["KVFLASH_WHEEL"]) as file:
        sizes = {info.filename: info.file_size for info in file.infolist() if info.filename.endswith(".so")}
    assert sizes
    assert {name: (folder / name).stat().st_size for name in sizes} == sizes

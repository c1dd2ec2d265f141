"""What `kvflash run` says of its memory, and what it takes as the system sees it: RAM as /usr/bin/time -v, GPUs as nvidia-smi.

    python bench/peak.py model.gguf long.txt -c 16K --pools auto 1K off
    python bench/peak.py model.gguf long.txt -c 4K --slots 4

Each pool with a short prompt and with the long one. With slots: the server, whose clients have a part of the text each, all at once, and fill
their contexts.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

from kvflash_bench.grid import machine
from kvflash_bench.tables import Live
from served import Served, serving

COLUMNS = ["prompt", "--kvflash", "RAM at most", "RAM said", "RAM measured", "%", "GPU at most", "GPU measured", "%"]
SCRIPT = Path(sys.executable).with_name("kvflash")


def gpu_used() -> int:
    """Return the MiB in use of all GPUs; 0 without one."""
    if which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def taken(command: list[str]) -> tuple[dict[str, Any], str, int, int]:
    """Run a command. Return its JSON, what it said, and the most RAM and GPU memory that it took, in MiB."""
    before, most = gpu_used(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            most = max(most, gpu_used() - before)
            if pid:
                break
            time.sleep(0.05)
        process.returncode = status
        out, err = (pipe.read() for pipe in (process.stdout, process.stderr) if pipe)
    if status:
        sys.exit(err)
    return json.loads(out), err, usage.ru_maxrss // 1024, most


def at_most(name: str, text: str) -> float | None:
    """Return the MiB that a run says a device takes at most."""
    found = re.search(rf"(?:: |; ){name} up to ([\d.]+) (MiB|GiB)", text)
    return float(found[1]) * (1024 if found[2] == "GiB" else 1) if found else None


def served(texts: list[str], *args: str) -> tuple[str, int]:
    """Start a server, and have it answer each text. Return what it said first, and the most RAM that it took, in MiB."""
    with serving(*args) as server, ThreadPoolExecutor(len(texts)) as clients:
        list(clients.map(partial(ask, server), texts))
        status = Path(f"/proc/{server.process.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s*(\d+)", status)
    return "".join(server.process.began), int(found[1]) // 1024 if found else 0


def ask(server: Served, text: str) -> None:
    """Have a server write a few tokens after a text, cut to its context."""
    while server.http.post("/v1/completions", json={"prompt": text, "max_tokens": 16, "temperature": 0}).is_error:
        text = text[: len(text) * 19 // 20]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", help="a text of nearly the context")
    parser.add_argument("-c", "--ctx-size", default="16K")
    parser.add_argument("--pools", nargs="+", default=["auto", "1K", "off"])
    parser.add_argument("--slots", type=int, default=0, help="measure `kvflash serve -np N`")
    args, options = parser.parse_known_args()  # others are the command's
    slots = f"{args.slots} slots, each of a " if args.slots else ""
    print(f"{machine()}, {slots}context of {args.ctx_size}; MiB\n")
    (slots_of if args.slots else runs_of)(args, options)


def slots_of(args: argparse.Namespace, options: list[str]) -> None:
    """Measure the server with each pool, and print a table."""
    text = Path(args.file).read_text()
    texts = [text[i * len(text) // args.slots :][: len(text) // args.slots] for i in range(args.slots)]
    table = Live("--kvflash", "RAM at most", "RAM measured", "%")
    for pool in args.pools:
        slots = ("-np", str(args.slots), "-c", args.ctx_size)
        said, ram = served(texts, "-m", args.model, *slots, "--kvflash", pool, "-v", *options)
        most = at_most("RAM", said) or 0
        table.row(pool, f"{most:,.0f}", f"{ram:,}", f"{100 * most / ram - 100:+.1f}")


def runs_of(args: argparse.Namespace, options: list[str]) -> None:
    """Measure a run with each pool, with a short prompt and with the long one, and print a table."""
    script = str(SCRIPT if SCRIPT.exists() else which("kvflash"))
    common = ["-c", args.ctx_size, "-n", "64", "--json", "-v", "--temp", "0", "-s", "1", *options]
    table = Live(*COLUMNS)
    for prompt, given in (("short", ["-p", "Say hello."]), ("long", ["-f", args.file])):
        for pool in args.pools:
            result, said, ram, gpu = taken([script, "run", args.model, *given, "--kvflash", pool, *common])
            peak, known = (result["stats"][name] / 2**20 for name in ("peak_bytes", "gpu_bytes"))
            cells = [f"{at_most('RAM', said) or 0:,.0f}", f"{peak:,.0f}", f"{ram:,}", f"{100 * peak / ram - 100:+.1f}"]
            cells += [f"{known:,.0f}", f"{gpu:,}", f"{100 * known / gpu - 100:+.1f}"] if gpu else ["-"] * 3
            table.row(prompt, pool, *cells)


if __name__ == "__main__":
    main()

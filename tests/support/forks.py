"""Commands of kvflash, each in a process of its own. One that has imported all forks for each: importing takes longer than most."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from pyllama_kvflash.native import devices

# streams and pipes are passed by number; the child exits as a script calling sys.exit(main()) would
PARENT = """
import json, os, signal, sys
import pyllama_kvflash.engine.engine, pyllama_kvflash.serve
from pyllama_kvflash.cli import main
assert "huggingface_hub" not in sys.modules, "it looks at the environment as it is imported"
asked, answers = os.fdopen(int(sys.argv[1]), "rb", 0), int(sys.argv[2])
while line := asked.readline():
    ask = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for fd, (path, flags) in enumerate(ask["streams"]):
            os.dup2(os.open(path, flags), fd)
        os.closerange(3, 64)
        os.environ.clear()
        os.environ.update(ask["environ"])
        os.chdir(ask["folder"])
        signal.alarm(ask["timeout"])
        sys.argv = ["kvflash", *ask["args"]]
        sys.exit(main())
    os.write(answers, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


SCRIPT = Path(sys.executable).with_name("kvflash")


class Parent(NamedTuple):
    """The process that forks, and the ends of its pipes."""

    process: subprocess.Popen[bytes]
    ask: int
    answers: Any

    def close(self) -> None:
        os.close(self.ask)
        self.answers.close()
        self.process.wait()


@functools.cache
def parent() -> Parent:
    """Started when it is first asked; ended with this process."""
    their_asked, ask = os.pipe()
    answers, their_answers = os.pipe()
    command = [sys.executable, "-c", PARENT, str(their_asked), str(their_answers)]
    process = subprocess.Popen(
        command, pass_fds=(their_asked, their_answers), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    os.close(their_asked)
    os.close(their_answers)
    res = Parent(process, ask, os.fdopen(answers, "rb", 0))
    atexit.register(res.close)
    return res


def forked(
    args: list[str], stdin: bytes, timeout: int, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as a script does, in this process's folder; and with its environment, except variables read at
    start-up by Python or by already imported modules. What takes too long ends by SIGALRM."""
    environ = dict(os.environ) if environ is None else environ
    if any(
        device.gpu for device in devices()
    ):  # the library initialises the GPU on load, and a process that uses a GPU must not fork
        command = [SCRIPT, *args]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=timeout, env=environ, check=False)
    with tempfile.TemporaryDirectory() as folder:
        given, out, err = (Path(folder) / name for name in ("stdin", "stdout", "stderr"))
        given.write_bytes(stdin)
        write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        ask = {
            "args": args,
            "streams": [(str(given), os.O_RDONLY), (str(out), write), (str(err), write)],
            "environ": environ,
            "folder": str(Path.cwd()),
            "timeout": timeout,
        }
        os.write(parent().ask, json.dumps(ask).encode() + b"\n")
        code = int(parent().answers.readline())
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(args, timeout, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess(args, code, out.read_bytes(), err.read_bytes())

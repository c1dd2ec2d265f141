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

# streams and pipes are passed by number; the child's exit is that of a script that ends with main()
PARENT = """
import json, os, signal, sys
import pyllama_kvflash.engine.engine, pyllama_kvflash.serve
from pyllama_kvflash.cli import main
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
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(command, pass_fds=(their_asked, their_answers), **nothing)  # type: ignore[call-overload]
    os.close(their_asked)
    os.close(their_answers)
    res = Parent(process, ask, os.fdopen(answers, "rb", 0))
    atexit.register(res.close)
    return res


def forked(args: list[str], stdin: bytes, timeout: int) -> subprocess.CompletedProcess[bytes]:
    """Run a command as a script does, with this process's environment and folder. What takes too long ends by SIGALRM."""
    with tempfile.TemporaryDirectory() as folder:
        given, out, err = (Path(folder) / name for name in ("stdin", "stdout", "stderr"))
        given.write_bytes(stdin)
        write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        ask = {
            "args": args,
            "streams": [(str(given), os.O_RDONLY), (str(out), write), (str(err), write)],
            "environ": dict(os.environ),
            "folder": str(Path.cwd()),
            "timeout": timeout,
        }
        os.write(parent().ask, json.dumps(ask).encode() + b"\n")
        code = int(parent().answers.readline())
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(args, timeout, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess(args, code, out.read_bytes(), err.read_bytes())

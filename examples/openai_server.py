"""The server, used through the `openai` package: this script starts it, asks, and stops it. Needs openai.

python examples/openai_server.py [MODEL.gguf]    without a model: the bundled one
"""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openai import OpenAI

from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Run `kvflash serve` on a free port. Yields its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    kvflash = str(Path(sys.executable).with_name("kvflash"))  # as installed beside this Python
    command = [kvflash, "serve", model, "-c", "8K", "--kvflash", "1K", "--port", port]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            while not is_ready(f"http://127.0.0.1:{port}/health"):
                if server.poll() is not None:
                    sys.exit("the server has ended: run `kvflash serve` by hand, and it says why")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def is_ready(url: str) -> bool:
    """Return whether the model is loaded."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def main(model: str = str(BUNDLED_MODEL)) -> None:
    """Ask four questions about a text. Only the first request reads the text."""
    prompt = make_prompt(4000, lambda text: len(text) // 4, n_needles=4)  # some four characters a token
    with serving(model) as url, OpenAI(base_url=url, api_key="-") as client:
        for needle in prompt.needles:
            text = prompt.text + needle.question
            answer = client.completions.create(model="-", prompt=text, max_tokens=16, temperature=0, stop=["\n"])
            n_read = answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens
            print(needle.question, answer.choices[0].text, f"   ({n_read:,} tokens read)")


if __name__ == "__main__":
    main(*sys.argv[1:])

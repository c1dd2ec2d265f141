"""Tokens in asyncio: a thread generates, a queue brings the text, and the event loop stays free.

python examples/asyncio_tokens.py [MODEL.gguf]    without a model: the bundled one
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from pyllama_kvflash import Done, KVFlash, Sampling, Token
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt


async def texts(kv: KVFlash, prompt: str, **options: Any) -> AsyncIterator[str]:
    """Yield the text of generate() as it comes. Whoever stops early ends it at the next event."""
    loop, queue, left = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

    def generate() -> None:
        end = None
        try:
            for event in kv.generate(prompt, **options):
                if left.is_set():
                    break
                loop.call_soon_threadsafe(queue.put_nowait, event)
        except Exception as err:  # noqa: BLE001 (raised again below)
            end = err
        loop.call_soon_threadsafe(queue.put_nowait, end)

    work = asyncio.create_task(asyncio.to_thread(generate))
    try:
        while (event := await queue.get()) is not None:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Token | Done):
                yield event.text
    finally:
        left.set()
        await work  # the engine is free again


async def main(model: str = str(BUNDLED_MODEL)) -> None:
    """Answer four questions about a text, each as its tokens come."""
    with KVFlash.from_file(model, n_ctx=8192, pool=1024) as kv:
        prompt = make_prompt(4000, lambda text: len(kv.tokenize(text, add_special=False)), n_needles=4)
        for needle in prompt.needles:
            print(needle.question, end="", flush=True)
            text = prompt.text + needle.question
            async for part in texts(kv, text, max_tokens=16, stop=["\n"], sampling=Sampling(temperature=0)):
                print(part, end="", flush=True)
            print()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

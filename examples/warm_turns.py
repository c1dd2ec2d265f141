"""A conversation by chat(): all messages are given each time, and only what is new is read.

python examples/warm_turns.py [MODEL.gguf]    without a model: the bundled one
"""

import sys

from pyllama_kvflash import Done, KVFlash, Sampling, Token, Warn
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt

# the bundled model was not trained for chat: it is given the texts alone. Other models have a template of their own
PLAIN = "{% for m in messages %}{{ m.content }}{{ '\\n' if m.role == 'assistant' }}{% endfor %}"


def say(kv: KVFlash, messages: list[dict[str, str]], template: str | None) -> str:
    """Show the answer to a conversation as it comes, and return it."""
    answer = ""
    for event in kv.chat(messages, max_tokens=64, stop=["\n"], sampling=Sampling(temperature=0), template=template):
        match event:
            case Warn():
                print(f"warning: {event.text}")
            case Token():
                answer += event.text
                print(event.text, end="", flush=True)
            case Done():
                answer += event.text
                print(event.text, f"   ({event.stats.n_prompt:,} tokens read)")
    return answer


def main(model: str = str(BUNDLED_MODEL)) -> None:
    """Talk about a text of 4,000 tokens with four codes in it."""
    template = PLAIN if model == str(BUNDLED_MODEL) else None
    with KVFlash.from_file(model, n_ctx=8192, pool=1024) as kv:
        prompt = make_prompt(4000, lambda text: len(kv.tokenize(text, add_special=False)), n_needles=4)
        messages: list[dict[str, str]] = []
        for needle in prompt.needles:
            question = needle.question if messages else prompt.text + needle.question
            messages.append({"role": "user", "content": question})
            print(needle.question, end="", flush=True)
            messages.append({"role": "assistant", "content": say(kv, messages, template)})


if __name__ == "__main__":
    main(*sys.argv[1:])

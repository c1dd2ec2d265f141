"""A long text, and several questions about it: the text is read once.

python examples/long_file.py                                     a generated text, with the bundled model
python examples/long_file.py MODEL.gguf FILE.txt "A question"...  each question goes after the file, as it is
"""

import sys
from pathlib import Path

from pyllama_kvflash import Done, KVFlash, Sampling, Token
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt


def generated(kv: KVFlash) -> tuple[str, list[str]]:
    """A text of 4,000 tokens with four codes in it, and a question about each."""
    prompt = make_prompt(4000, lambda text: len(kv.tokenize(text, add_special=False)), n_needles=4)
    return prompt.text, [needle.question for needle in prompt.needles]


def main(model: str = str(BUNDLED_MODEL), file: str = "", *questions: str) -> None:
    """Ask all questions."""
    with KVFlash.from_file(model, n_ctx=8192, pool=1024) as kv:
        text, asked = (Path(file).read_text(), questions) if file else generated(kv)
        for question in asked:
            print(question, end="", flush=True)
            # the second prompt begins as the first one did: only its question is read
            for event in kv.generate(text + question, max_tokens=64, stop=["\n"], sampling=Sampling(temperature=0)):
                if isinstance(event, Token | Done):
                    print(event.text, end="", flush=True)
                if isinstance(event, Done):
                    print(f"    ({event.stats.n_prompt:,} tokens read in {event.stats.prefill_s:.2f} s)")


if __name__ == "__main__":
    main(*sys.argv[1:])

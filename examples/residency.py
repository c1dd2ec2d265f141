"""Which chunks are on the device, as a picture: one row for each question about a text. Needs matplotlib.

python examples/residency.py [MODEL.gguf [PICTURE.png]]    without a model: the bundled one, residency.png
"""

import sys

import matplotlib as mpl
import numpy as np

from pyllama_kvflash import Done, KVFlash, Sampling, Token
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt

mpl.use("Agg")  # draws without a screen
from matplotlib import pyplot as plt


def main(model: str = str(BUNDLED_MODEL), picture: str = "residency.png") -> None:
    """Ask four questions, and draw in how many layers each chunk is after each answer."""
    rows, codes = [], []
    with KVFlash.from_file(model, n_ctx=8192, pool=1024) as kv:
        prompt = make_prompt(4000, lambda text: len(kv.tokenize(text, add_special=False)), n_needles=4)
        n_chunks = len(kv.tokenize(prompt.text)) // kv.options.chunk
        for needle in prompt.needles:
            text = prompt.text + needle.question
            events = kv.generate(text, max_tokens=16, stop=["\n"], sampling=Sampling(temperature=0))
            print(needle.question, "".join(e.text for e in events if isinstance(e, Token | Done)))
            where = kv.residency()  # arrays of all chunks; where.to_dict() is a table for pandas
            rows.append(where.layers[:n_chunks] / where.layers.max())
            codes.append(len(kv.tokenize(prompt.text[: needle.start])) // kv.options.chunk)
    shown = np.array(rows)
    print(f"a layer has {shown.mean():.0%} of the text on the device: {picture} shows which")

    figure, axes = plt.subplots(figsize=(10, 2.5), layout="constrained")
    image = axes.imshow(shown, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.plot(codes, range(len(codes)), "rx", label="the chunk with the code")
    axes.set(xlabel="chunk", ylabel="question", yticks=range(len(codes)))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1))
    figure.colorbar(image, label="share of the layers")
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])

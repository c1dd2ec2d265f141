"""Long needle prompts as text: generated prose with secret codes at even or random depths, and questions about them.

The bundled `needle-7m` model was trained on this document grammar.  Standard library only; nothing here imports another
part of the package, so prompts can be made without the native code.
"""

from pathlib import Path
from typing import Final

from .facts import MAX_DECOYS, MAX_FACTS, make_facts
from .prompt import MAX_NEEDLES, Needle, NeedlePrompt, make_prompt

__all__ = [
    "BUNDLED_DRAFTER",
    "BUNDLED_MODEL",
    "MAX_DECOYS",
    "MAX_FACTS",
    "MAX_NEEDLES",
    "Needle",
    "NeedlePrompt",
    "make_facts",
    "make_prompt",
]

BUNDLED_MODEL: Final = Path(__file__).with_name("needle-7m-q8_0.gguf")
"""The model that ships with the package: it recalls secret codes in up to 64K tokens, and can do nothing else."""

BUNDLED_DRAFTER: Final = Path(__file__).with_name("needle-draft-1m-q8_0.gguf")
"""The bundled model's draft model: smaller (2 layers), with the same vocabulary, trained on the same kind of text."""

"""Long needle prompts as text: generated prose with secret codes at even depths, and questions about them.

The document grammar is the one the bundled `needle-7m` model was trained on.  Standard library only; nothing
here imports another part of the package, so prompts can be made without the native code.
"""

from .prompt import MAX_NEEDLES, Needle, NeedlePrompt, make_prompt

__all__ = ["MAX_NEEDLES", "Needle", "NeedlePrompt", "make_prompt"]

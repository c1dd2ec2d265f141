"""Questions as a model gets them, and the right answers after them."""

import numpy as np

from kvflash_bench.questions import Question, Questions
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Model, Tokens

_SAID = "8d1e7c40"  # stands for an answer in a template


class Prompts:
    """Makes prompts for a model: its chat template, or plain text if it has none, then the beginning of the answer."""

    def __init__(self, model: Model) -> None:
        """Load the chat template. Raises UsageError for one that cannot be used."""
        from pyllama_kvflash.chat.engine import ChatTemplate  # noqa: PLC0415 (an extra)

        self._model = model
        self._template = ChatTemplate(model) if model.meta("tokenizer.chat_template") is not None else None

    def first(self, question: Question, said: str = "") -> Tokens:
        """Return the token ids (n,) int32 of a prompt that ends where the first answer continues. said: of that answer."""
        if self._template is None:
            return self._model.tokenize(question.text + question.prefix + said)
        from pyllama_kvflash.chat.engine import tokenize_chat  # noqa: PLC0415 (an extra)

        message = {"role": "user", "content": question.text}
        return tokenize_chat(self._model, self._template.render([message]) + question.prefix + said)

    def further(self, question: Question, said: str = "") -> Tokens:
        """Return the token ids (n,) int32 from an answer's end to where the next answer continues. said: of the next one.

        Raises UsageError.
        """
        if self._template is None:
            return self._model.tokenize(f"\n{question.text}{question.prefix}{said}", add_special=False)
        roles = (("user", "?"), ("assistant", _SAID), ("user", question.text))
        text = self._template.render([{"role": role, "content": content} for role, content in roles])
        _, found, rest = text.rpartition(_SAID)
        if not found:
            msg = (
                "the chat template leaves out what the assistant said: no question can be asked after another (in_turn,"
                " turns)"
            )
            raise UsageError(msg)
        return self._model.tokenize(rest + question.prefix + said, add_special=False, parse_special=True)

    def count(self, questions: Questions) -> int:
        """Return the tokens of all questions, without the answers."""
        first, *then = questions
        return len(self.first(first)) + sum(len(self.further(q)) for q in then)

    def answered(self, questions: Questions) -> tuple[Tokens, Tokens]:
        """Return the token ids of the first prompt (n,) int32 and of what follows it if each answer is right (m,) int32:
        the answers, and the questions between them.

        Prefix and answer are tokenized as one text. The prompt ends where that differs from first().
        """
        first, *then = questions
        prompt, whole = self.first(first), self.first(first, first.right)
        n = min(len(prompt), len(whole))
        same = prompt[:n] == whole[:n]
        at = n if same.all() else int(same.argmin())
        return whole[:at], np.concatenate([whole[at:], *(self.further(q, q.right) for q in then)])

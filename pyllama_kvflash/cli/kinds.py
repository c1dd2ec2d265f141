"""Types of the options' values."""

import math
import re
from decimal import Decimal
from typing import Any

import click

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.registry import policy_names

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Kind(click.ParamType[Any]):
    """The type of a value that is read from a text. Values other than texts, such as defaults, are taken as they are."""

    name = "value"

    def read(self, text: str) -> Any:
        """Return the value for a text. Raises UsageError, which says what is allowed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the value, or fail with a message that says what is allowed."""
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except UsageError as err:
            self.fail(str(err), param, ctx)


class TokenCount(Kind):
    """A number of tokens: 4096, or 4K or 1M in units of 1,024; or one of `words`."""

    name = "tokens"

    def __init__(self, *words: str) -> None:
        self.words = words

    def read(self, text: str) -> int | str:
        """Return the number of tokens, or the word."""
        if text.strip() in self.words:
            return text.strip()
        match = re.fullmatch(r"([+-]?\d+)([KM]?)", text.strip().upper())
        if not match:
            words = "".join(f', "{w}"' for w in self.words)
            raise UsageError(f"{text!r} is not a token count: give one such as 4096 or 4K{words}")
        return int(match[1]) * _UNITS[match[2]]


class ByteSize(Kind):
    """A number of bytes: 1048576, or 64G, 64GB, 64GiB, 15.2G or 512M in units of 1,024."""

    name = "size"

    def read(self, text: str) -> int:
        """Return the number of bytes."""
        match = re.fullmatch(r"([+-]?\d+(?:\.\d+(?=[KMGT]))?)(?:([KMGT])(?:I?B)?)?", text.strip().upper())
        if not match:
            raise UsageError(f"{text!r} is not a size: give bytes, or units of 1,024 such as 64GiB or 512M")
        if not match[2] and 0 < int(match[1]) < _UNITS["K"]:
            raise UsageError(f"{text!r} is a size in bytes: give it a unit, such as {int(match[1])}G")
        return round(Decimal(match[1]) * _UNITS[match[2] or ""])


class PathPrefix(Kind):
    """A prefix of a server's paths, such as /llm; "": none. A slash at its end is dropped."""

    name = "prefix"

    def read(self, text: str) -> str:
        """Return the prefix."""
        if not re.fullmatch(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*", text.rstrip("/")):
            raise UsageError(
                f"{text!r} is not a prefix of paths: give ASCII letters and digits after a slash, such as /llm"
            )
        return text.rstrip("/")


class Split(Kind):
    """Shares for devices, in their order: 3,1, or 3/1, which llama.cpp also takes."""

    name = "shares"

    def read(self, text: str) -> tuple[float, ...]:
        """Return the shares."""
        try:
            res = tuple(float(part) for part in re.split("[,/]", text)) if text else ()
        except ValueError:
            res = (math.nan,)
        if not all(map(math.isfinite, res)):
            raise UsageError(f"{text!r} is not a list of shares: give a number for each GPU, such as 3,1")
        return res


class Servers(Kind):
    """Servers, separated by commas: host:port,host:port. Options checks each."""

    name = "servers"

    def read(self, text: str) -> tuple[str, ...]:
        """Return the servers."""
        return tuple(part.strip() for part in text.split(",")) if text else ()


class Policy(Kind):
    """The name of a policy."""

    name = "policy"

    def read(self, text: str) -> str:
        """Return the name."""
        if text not in policy_names():
            raise UsageError(f"{text!r} is not a policy: there are {', '.join(policy_names())}")
        return text


class Spans(Kind):
    """Ranges of positions: 0:512,4K:5K."""

    name = "spans"

    def read(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return the ranges."""
        res = []
        for part in filter(None, text.split(",")):
            start, colon, end = part.partition(":")
            if not colon:
                raise UsageError(f"{part!r} is not a range of positions: give one such as 0:512, several with commas")
            res.append((int(TokenCount().read(start)), int(TokenCount().read(end))))
        return tuple(res)


class LogitBias(Kind):
    """A token and the number that is added to its logit, in llama.cpp's form: 15043+1, 29905-inf."""

    name = "bias"

    def read(self, text: str) -> tuple[int, float]:
        """Return the token and the number."""
        match = re.fullmatch(r"(\d{1,9})([+-](?:\d+\.?\d*|inf))", text.strip())
        if not match or match[2] == "+inf":
            raise UsageError(f"{text!r} is not a bias: give a token and a number, such as 15043+1 or 15043-inf")
        return int(match[1]), float(match[2])


class Layers(Kind):
    """A number of layers, or a word. words: the value of each word. least: replaces smaller numbers; None: they are kept."""

    name = "layers"

    def __init__(self, words: dict[str, int | str], least: int | None = None) -> None:
        self.words, self.least = words, least

    def read(self, text: str) -> int | str:
        """Return the number, or the word's value."""
        if text in self.words:
            return self.words[text]
        try:
            return int(text) if self.least is None else max(int(text), self.least)
        except ValueError:
            word = next(iter(self.words))
            raise UsageError(f'{text!r} is not a number of layers: give one such as 20, or "{word}"') from None


ALL_LAYERS = Layers({"all": -1, "auto": -1}, least=-1)
"""Layers on GPUs; "auto" is llama.cpp's word."""
HOST_LAYERS = Layers({"auto": "auto"})
"""Layers whose experts stay on the host."""

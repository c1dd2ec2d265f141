"""Types of the options' values."""

import math
import re
from decimal import Decimal
from typing import Any

import click

from pyllama_kvflash.registry import policy_names

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class TokenCount(click.ParamType[int | str]):
    """A number of tokens: 4096, or 4K or 1M in units of 1,024."""

    name = "tokens"

    def __init__(self, *words: str) -> None:
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Parse the value, or fail with what is allowed."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if text in self.words:
            return text
        match = re.fullmatch(r"([+-]?\d+)([KM]?)", text.upper())
        if not match:
            words = "".join(f', "{w}"' for w in self.words)
            self.fail(f"{value!r} is not a token count: give one such as 4096 or 4K{words}", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


class ByteSize(click.ParamType[int]):
    """A number of bytes: 1048576, or 64G, 64GB, 64GiB, 15.2G or 512M in units of 1,024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the value, or fail with what is allowed."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([+-]?\d+(?:\.\d+(?=[KMGT]))?)(?:([KMGT])(?:I?B)?)?", str(value).strip().upper())
        if not match:
            self.fail(f"{value!r} is not a size: give bytes, or units of 1,024 such as 64GiB or 512M", param, ctx)
        if not match[2] and 0 < int(match[1]) < _UNITS["K"]:
            self.fail(f"{value!r} is a size in bytes: give it a unit, such as {int(match[1])}G", param, ctx)
        return round(Decimal(match[1]) * _UNITS[match[2] or ""])


class PathPrefix(click.ParamType[str]):
    """What the paths of a server begin with: /llm; "" for nothing."""

    name = "prefix"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value. A slash at its end is left out."""
        text = str(value).rstrip("/")
        if text and not re.fullmatch(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)+", text):
            self.fail(
                f"{value!r} is not a prefix of paths: give ASCII letters and digits after a slash, such as /llm",
                param,
                ctx,
            )
        return text


class Split(click.ParamType[tuple[float, ...]]):
    """Shares for devices, in their order: 3,1, or 3/1, which llama.cpp also takes."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Parse the value, or fail with what is allowed."""
        if isinstance(value, tuple):
            return value
        try:
            res = tuple(float(part) for part in re.split("[,/]", value)) if value else ()
        except ValueError:
            res = (math.nan,)
        if not all(map(math.isfinite, res)):
            self.fail(f"{value!r} is not a list of shares: give a number for each GPU, such as 3,1", param, ctx)
        return res


class Servers(click.ParamType[tuple[str, ...]]):
    """Servers, separated by commas: host:port,host:port."""

    name = "servers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:  # noqa: ARG002
        """Split the value; Options checks each server."""
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in value.split(",")) if value else ()


class Policy(click.ParamType[str]):
    """The name of a policy."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name, or fail with the names that there are."""
        if value not in policy_names():
            self.fail(f"{value!r} is not a policy: there are {', '.join(policy_names())}", param, ctx)
        return str(value)


class Spans(click.ParamType[tuple[tuple[int, int], ...]]):
    """Ranges of positions: 0:512,4K:5K."""

    name = "spans"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        """Parse the value, or fail with what is allowed."""
        if isinstance(value, tuple):
            return value
        count = TokenCount()
        res = []
        for part in filter(None, str(value).split(",")):
            start, colon, end = part.partition(":")
            if not colon:
                self.fail(
                    f"{part!r} is not a range of positions: give one such as 0:512, several with commas", param, ctx
                )
            res.append((int(count.convert(start, param, ctx)), int(count.convert(end, param, ctx))))
        return tuple(res)


class LogitBias(click.ParamType[tuple[int, float]]):
    """A token and what is added to its logit, as llama.cpp has it: 15043+1, 29905-inf."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """Parse the value, or fail with what is allowed."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,9})([+-](?:\d+\.?\d*|inf))", str(value).strip())
        if not match or match[2] == "+inf":
            self.fail(f"{value!r} is not a bias: give a token and a number, such as 15043+1 or 15043-inf", param, ctx)
        return int(match[1]), float(match[2])


class Layers(click.ParamType[int]):
    """A number of layers. "all", llama.cpp's "auto" and negative numbers give -1."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the value, or fail with what is allowed."""
        if value in ("all", "auto"):
            return -1
        try:
            return max(int(value), -1)
        except ValueError:
            self.fail(f'{value!r} is not a number of layers: give one such as 20, or "all"', param, ctx)


class HostLayers(click.ParamType[int | str]):
    """A number of layers, or "auto"."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Parse the value, or fail with what is allowed."""
        if value == "auto":
            return "auto"
        try:
            return int(value)
        except ValueError:
            self.fail(f'{value!r} is not a number of layers: give one such as 20, or "auto"', param, ctx)

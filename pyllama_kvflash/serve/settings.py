"""The settings of a server."""

from dataclasses import dataclass
from pathlib import Path

from pyllama_kvflash.native import Sampling


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    name: the model's name in the protocol.
    sampling: the defaults for requests.
    n_predict: the most tokens of an answer; -1: until the context is full.
    max_body: the most bytes of a request's body.
    api_key: the key that requests must send; None: no key is needed.
    template: a chat template in place of the model's own.
    webui: whether there is a page at /.
    strict: whether a field that the server does not know is refused; else it is named in a header and in the log.
    log_format: of the lines about requests, "text" or "json". log_bodies: whether the log has the requests' bodies.
    responses: the folder in which responses are kept; None: they are kept in memory only.
    api_prefix: what all paths begin with, as in "/llm"; "" for nothing.
    """

    name: str
    sampling: Sampling
    n_predict: int = -1
    max_body: int = 32 << 20
    api_key: str | None = None
    template: str | None = None
    webui: bool = True
    strict: bool = False
    log_format: str = "text"
    log_bodies: bool = False
    responses: Path | None = None
    api_prefix: str = ""

"""The settings of a server."""

from dataclasses import dataclass
from pathlib import Path

from pyllama_kvflash.native import Sampling


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    name: the model's name for clients.
    sampling: the sampling settings, which a request may override.
    n_predict: limit for the tokens of an answer; -1: until the context is full.
    max_body: limit for a request's body, in bytes.
    api_key: the key that requests must send; None: no key is needed.
    template: a chat template in place of the model's own.
    webui: whether to serve the web page at /.
    strict: whether to refuse unknown fields. Otherwise they are named in a response header and in the log.
    log_format: format of the log lines about requests, "text" or "json". log_bodies: whether to log the requests' bodies.
    responses: folder for stored responses; None: they are stored in memory only.
    api_prefix: prefix of all paths, such as "/llm"; "": none.
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

"""`kvflash serve`: serve a model over HTTP."""

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from pyllama_kvflash import native
from pyllama_kvflash.cli import kinds, params
from pyllama_kvflash.cli.fetch import model_path
from pyllama_kvflash.cli.kept import default_folder
from pyllama_kvflash.cli.read import read_text
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Manages, Reads, manages
from pyllama_kvflash.engine.answer import check_max_tokens
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.loading.load import check_file
from pyllama_kvflash.snapshot.cache import PrefixCache
from pyllama_kvflash.text import printable

HELP = """Serve a model to clients of the OpenAI protocol.

Several requests are answered at once, each in a sequence of its own, and all sequences share one pool. The beginning
that a prompt shares with an earlier one is not read again if it is still in a sequence, or in the prefix cache on
disk. docs/SERVER.md lists the endpoints, and what is not supported.

\b
  kvflash serve model.gguf                                 http://127.0.0.1:8080/v1, two requests at once
  kvflash serve model.gguf -np 4 -c 128K --kvflash 16K     four, of up to 128K tokens each
  LLAMA_API_KEY=secret kvflash serve model.gguf --host 0.0.0.0

Without MODEL.gguf, the bundled needle-7m is served. Ctrl-C or SIGTERM
lets answers finish within --grace seconds; a second signal ends them at once.
"""

TEMPLATE = click.option(
    "--chat-template-file",
    "template_file",
    metavar="FILE",
    type=Reads(),
    default=None,
    envvar=params.env("CHAT_TEMPLATE_FILE"),
    help="Jinja chat template file, instead of the model's own template.",
)

SERVER = params.options(
    click.option("--host", default="127.0.0.1", show_default=True, envvar=params.env("HOST"),
                 help="Address to listen on; 0.0.0.0 for all."),
    click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, envvar=params.env("PORT"),
                 help="Port to listen on, 0: any free one."),
    click.option("--api-prefix", metavar="PREFIX", type=kinds.PathPrefix(), default="", envvar=params.env("API_PREFIX"),
                 help="Prefix of all paths, such as /llm, for a proxy that does not remove it."),
    click.option("-np", "--parallel", "n_parallel", type=click.IntRange(1), default=2, show_default=True,
                 envvar=params.env("N_PARALLEL"), help="Sequences that share the pool: requests answered at once."),
    click.option("--queue", "n_queue", type=click.IntRange(0), default=32, show_default=True, envvar="KVFLASH_QUEUE",
                 help="Requests that may wait for a sequence; more are refused (429)."),
    click.option("--api-key", metavar="KEY", default=None, envvar="LLAMA_API_KEY",
                 help="API key that clients must send as a bearer token. Other users see it in the list of processes:"
                 " better set LLAMA_API_KEY."),
    click.option("-a", "--alias", metavar="NAME", default=None, envvar=params.env("ALIAS"),
                 help="Model name for clients.  [default: the file's, without .gguf]"),
    click.option("-n", "--predict", "--n-predict", "n_predict", type=int, default=-1, show_default=True,
                 envvar=params.env("N_PREDICT"),
                 help="Most tokens to predict in an answer, whatever a request asks for, -1: until the context is"
                 " full."),
    click.option("--max-body", metavar="SIZE", type=kinds.ByteSize(), default="32M", show_default=True,
                 envvar="KVFLASH_MAX_BODY", help="Most bytes of a request."),
    click.option("--keep-alive", type=click.FloatRange(0, 86_400), default=75.0, show_default=True,
                 envvar="KVFLASH_KEEP_ALIVE", help="Seconds until a connection without a request is closed."),
    click.option("--grace", type=click.FloatRange(0), default=30.0, show_default=True, envvar="KVFLASH_GRACE",
                 help="Seconds that answers have to finish once the server is told to stop."),
    TEMPLATE,
    click.option("--webui/--no-webui", default=True, show_default=True, envvar=params.env("UI"),
                 help="Serve a page at / to chat on and to watch the pool."),
    click.option("--strict/--no-strict", default=False, show_default=True, envvar="KVFLASH_STRICT",
                 help="Refuse requests with unknown fields (400), to test a client. Otherwise the fields are named in the"
                 " log and in the header KVFlash-Warning."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
                 envvar="KVFLASH_LOG_FORMAT",
                 help="Format of the log on stderr: a line for people about each request, or a JSON object. -v adds the"
                 " bodies of requests."),
    click.option("--prefix-cache", metavar="FOLDER|off", type=Manages(), default=None,
                 envvar="KVFLASH_PREFIX_CACHE",
                 help="Folder that keeps prompts that were read; it needs a pool. off: no folder.  [default: ~/.cache/kvflash/prefix,"
                 " off with --kvflash off]"),
    click.option("--prefix-cache-size", metavar="SIZE", type=kinds.ByteSize(), default=params.CACHE_SIZE, show_default=True,
                 envvar="KVFLASH_PREFIX_CACHE_SIZE", help="Size limit of that folder; the least recently used prompts go first."),
    click.option("--cache-min", type=kinds.TokenCount(), default=1024, show_default=True, envvar="KVFLASH_CACHE_MIN",
                 help="Fewest new tokens for which a sequence is written there."),
)  # fmt: skip


@click.command(cls=Command, help=HELP, short_help="Serve a model to clients of the OpenAI protocol.")
@params.MODEL
@SERVER
@params.POOL
@params.SPEC
@params.CONTEXT
@params.COMPUTE
@params.SAMPLING
@params.VERBOSITY
def serve(
    model_arg: str | None,
    model: str | None,
    host: str,
    port: int,
    api_prefix: str,
    n_queue: int,
    api_key: str | None,
    alias: str | None,
    n_predict: int,
    max_body: int,
    keep_alive: float,
    grace: float,
    template_file: str | None,
    prefix_cache: str | None,
    prefix_cache_size: int,
    cache_min: int,
    log_format: str,
    *,
    webui: bool,
    strict: bool,
    quiet: bool | None,
    **options: Any,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM."""
    from pyllama_kvflash.serve.app import Server  # noqa: PLC0415 (slow)
    from pyllama_kvflash.serve.protocols.responses_store import FOLDER  # noqa: PLC0415
    from pyllama_kvflash.serve.scheduler import Scheduler  # noqa: PLC0415
    from pyllama_kvflash.serve.server import bound, run  # noqa: PLC0415
    from pyllama_kvflash.serve.settings import Settings  # noqa: PLC0415

    reporter = (_JSONReporter if log_format == "json" else Reporter)(quiet=quiet)
    logging.basicConfig(level=logging.WARNING, handlers=[_Handler(reporter)])
    sampling = params.sampling(options, None)
    check_max_tokens(n_predict, least=1)
    options["spec"] = params.spec(options)
    options = params.resolve(options)
    full = options.get("pool") == "off"
    if prefix_cache is None and full:
        prefix_cache = "off"
        reporter.note(_FULL_CACHE)
    cache = _prefix_cache(prefix_cache, prefix_cache_size)
    options["snapshots"] = cache is not None
    path = model_path(model_arg, model, reporter)
    check_file(path)
    template = read_template(template_file)
    if reporter.verbose:
        native.show_log()
    settings = Settings(
        printable(alias or path.stem), sampling, n_predict, max_body, api_key or None, template, webui, strict, log_format,
        log_bodies=reporter.verbose, responses=cache.folder / FOLDER if cache else None, api_prefix=api_prefix,
    )  # fmt: skip
    scheduler = Scheduler(
        _opener(path, options, reporter, template),
        n_queue=n_queue,
        cache=cache,
        cache_min=cache_min,
    )
    listening = bound(host, port)
    if not api_key and host not in {"127.0.0.1", "localhost", "::1"}:
        seen = ", and read all conversations on the page (--no-webui)" if settings.webui else ""
        reporter.warn(
            f"there is no --api-key, and {host} can be reached by others: anyone who does may use the model{seen}"
        )
    shown = f"[{host}]" if ":" in host else host
    reporter.note(f"listening on http://{shown}:{listening.getsockname()[1]}{api_prefix}/v1, model {settings.name}")
    log = reporter.line if isinstance(reporter, _JSONReporter) else reporter.note
    server = Server(scheduler, settings, reporter.note, log)
    run(server.app(), scheduler, listening, grace=grace, keep_alive=keep_alive, note=reporter.note, warn=reporter.warn)
    server.close()


class _JSONReporter(Reporter):
    """A reporter whose notes are JSON objects, one on each line."""

    _KEPT = "\t\n"  # JSON escapes them

    def note(self, text: str) -> None:
        """Show a line of information."""
        self.line(self._message("info", text))

    def warn(self, text: str, level: str = "warning") -> None:
        """Show a warning, or an error, even if quiet."""
        click.echo(self._message(level, text), err=True)

    def line(self, text: str) -> None:
        """Show a line that is JSON already."""
        if not self.quiet:
            click.echo(text, err=True)

    def _message(self, level: str, text: str) -> str:
        now = datetime.now(UTC).astimezone().isoformat("T", "milliseconds")
        return json.dumps({"time": now, "level": level, "message": self._shown(text)})


class _Handler(logging.Handler):
    """Shows log records as the reporter shows warnings: with the command line's names of options."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record, with the traceback of its exception."""
        text = self.format(record)
        for part in [text] if isinstance(self._reporter, _JSONReporter) else text.splitlines():
            self._reporter.warn(part, record.levelname.lower())


def _opener(
    path: Path, options: dict[str, Any], reporter: Reporter, template: str | None
) -> Callable[[Callable[[float], None]], KVFlash]:
    """Return the function with which the scheduler's thread loads the model. It reports on the model as `kvflash run` does."""
    from pyllama_kvflash.chat.engine import ChatTemplate  # noqa: PLC0415 (slow)

    def open_(progress: Callable[[float], None]) -> KVFlash:
        kv = KVFlash.from_file(path, progress=progress, **options)
        try:
            reporter.opened(kv, *(w for s in kv.sequences for w in s.warnings))
            try:
                warning = ChatTemplate(kv.model, template).warning
            except UsageError as err:
                warning = f"{err}; /v1/completions needs none"
            if warning:
                reporter.warn(warning)
        except BaseException:
            kv.close()
            raise
        return kv

    return open_


def read_template(name: str | None) -> str | None:
    """Return the chat template in a file; None: no file is given. Raises UsageError."""
    return None if name is None else read_text(name, "chat template")


_FULL_CACHE = "prompts are kept in memory only: a prefix cache keeps the chunks of a pool, and --kvflash is off"


def _prefix_cache(folder: str | None, limit: int) -> PrefixCache | None:
    if folder == "off":
        return None
    if not folder:
        manages("--prefix-cache", default_folder())
    return PrefixCache(folder or default_folder(), limit)

"""The command line. Only here do library errors become messages and exit codes."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click
from click.core import ParameterSource

from pyllama_kvflash import __version__
from pyllama_kvflash.cli import settings
from pyllama_kvflash.cli.ask import ask
from pyllama_kvflash.cli.cache import cache
from pyllama_kvflash.cli.chat import chat
from pyllama_kvflash.cli.convert import convert_draft
from pyllama_kvflash.cli.demo import demo
from pyllama_kvflash.cli.inspect import inspect
from pyllama_kvflash.cli.plan import plan
from pyllama_kvflash.cli.run import run
from pyllama_kvflash.cli.serve import serve
from pyllama_kvflash.cli.streams import drop_what_fails, refuse_what_is_lost
from pyllama_kvflash.errors import KVFlashError, UsageError
from pyllama_kvflash.text import printable

EXIT_RUNTIME, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
OF_BENCHES = ("bench", "plot")
"""The commands of kvflash_bench, a package of its own that is imported only for these commands."""

HELP = """Run long prompts through a fixed pool of KV cache.

A model's KV cache grows with the context. kvflash keeps a fixed pool of it on the device and pages the rest, in chunks
of 64 tokens, to host memory and back, bit for bit. Device memory and decode speed then do not depend on the context.

\b
  kvflash demo                                        a 16K prompt, full cache against a 2K pool
  kvflash run model.gguf -f long.txt                  a prompt file; the cache that suits it
  kvflash run model.gguf -f long.txt --kvflash 4K     a pool of 4,096 tokens
  kvflash run model.gguf -f long.txt --kvflash off    the full cache: the control
  kvflash run model.gguf -f long.txt --trace t.jsonl  record what stayed and came back, for the next line
  kvflash plot t.jsonl                                a picture of the record
  kvflash ask model.gguf book.txt                     questions about files, read while you type
  kvflash chat model.gguf                             a conversation, kept in the context
  kvflash serve model.gguf -np 4                      a server for the OpenAI protocol, on one pool
  kvflash bench niah                                  what a pool recalls, against the full cache
  kvflash inspect model.gguf                          what can be pooled, and what it costs
  kvflash plan model.gguf --memory 12G -c 128K        which options for this card and context
  kvflash convert-draft drafter/ --target model.gguf -o draft.gguf

A command that would overwrite a file that it reads is refused before anything is loaded. An existing file is replaced
only once the new one is complete; it keeps its mode and owner, and a link to it stays a link.

\b
Exit codes: 0 done; 2 the command is wrong: an option, the name of a file, or the prompt; 1 anything else failed: a model cannot
be loaded, memory or a disk is full, or less memory is allowed than the text takes; 130 stopped by Ctrl-C.
"""


class Group(click.Group):
    """A group whose commands end with one sentence and an exit code, never with a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted([*super().list_commands(ctx), *OF_BENCHES])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name; None: there is no such command."""
        return _of_benches(cmd_name) if cmd_name in OF_BENCHES else super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command. Raises UsageError if a model's file name is in the command's place."""
        if args[0].endswith(".gguf"):
            msg = (
                f'{args[0]} is not a command: kvflash run {args[0]} -p "text" asks this model, and -f FILE reads a file'
            )
            raise UsageError(msg)
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run the command line and exit."""
        extra["standalone_mode"] = False
        drop_what_fails()
        refuse_what_is_lost()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # show a question mark for what the terminal cannot show
        try:
            sys.exit(super().main(args, **extra) or 0)
        except click.exceptions.NoArgsIsHelpError as err:
            err.show()
            sys.exit(err.exit_code)
        except click.ClickException as err:
            _fail(_sentence(err), err.exit_code)
        except KVFlashError as err:
            _fail(str(err), err.exit_code)
        except (KeyboardInterrupt, click.Abort):
            _fail("interrupted", EXIT_INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has read enough
            sys.exit(EXIT_RUNTIME)
        except OSError as err:
            what = f"{err.filename}: {err.strerror}" if err.filename else str(err.strerror)
            if err.errno == errno.ENOSPC:
                os.dup2(
                    os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
                )  # otherwise the flush at exit fails again
                what = "no space left on the device that the output goes to: free some, or write elsewhere"
            _fail(what, EXIT_RUNTIME)
        except MemoryError:
            _fail("out of host memory: use a shorter context, a smaller cache type (-ctk, -ctv) or batch", EXIT_RUNTIME)


def _of_benches(name: str) -> click.Command:
    """Return a command of kvflash_bench or, if that is not installed, a command that says so, whatever its arguments."""
    if find_spec("kvflash_bench"):
        found: click.Command = getattr(import_module("kvflash_bench.cli"), name)
        return found

    def refuse() -> None:
        msg = f"`kvflash {name}` is a package of its own: pip install kvflash-bench"
        raise UsageError(msg)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    help_text = "Not installed: pip install kvflash-bench."
    return click.Command(name, anything, refuse, help=help_text, add_help_option=False)


def _sentence(err: click.ClickException) -> str:
    """Return the text of click's error in the form of our errors: one sentence, and where to read more."""
    what = err.format_message()
    if isinstance(err, click.BadParameter) and err.param and err.message:
        what = f"{_given(err.param, err.ctx)}: {err.message}"
    if isinstance(err, click.NoSuchOption) and err.ctx and (field := settings.called(err.option_name, err.ctx.command)):
        what = f"No such option '{err.option_name}': give --set {field}=VALUE"
    what = " ".join(what.split()).rstrip(".")
    what = what[:1].lower() + what[1:]
    where = f"; {err.ctx.command_path} --help tells more" if isinstance(err, click.UsageError) and err.ctx else ""
    return what + where


def _given(param: click.Parameter, ctx: click.Context | None) -> str:
    """Return the option's name, and its environment variable if the value came from there."""
    name = "/".join(param.opts)
    by = ctx.get_parameter_source(param.name) if ctx and param.name else None
    return f"{name} (the environment variable {param.envvar})" if by == ParameterSource.ENVIRONMENT else name


def _fail(message: str, code: int) -> None:
    click.echo(f"kvflash: error: {printable(message)}", err=True)
    sys.exit(code)


@click.group(cls=Group, help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="kvflash")
def main() -> None:
    """The command `kvflash`."""


main.add_command(run)
main.add_command(ask)
main.add_command(chat)
main.add_command(serve)
main.add_command(demo)
main.add_command(inspect)
main.add_command(plan)
main.add_command(convert_draft)
main.add_command(cache)

"""The command `kvflash`, and `python -m pyllama_kvflash`."""

import signal
import sys


def main() -> None:
    """Run the command line and exit, without a traceback on Ctrl-C, even during imports and interpreter shutdown."""
    try:
        from pyllama_kvflash.cli import main as command_line  # noqa: PLC0415 (takes a while)

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()

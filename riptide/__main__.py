"""The command `riptide`, also as `python -m riptide`."""

import os
import sys

if not __package__:  # runs as a file: Python has put the folder of the package on the path, in place of the one above
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def main() -> None:
    """Runs the command line: `riptide COMMAND …`."""
    from riptide.jobs.common.starting import handle_signals

    handle_signals()
    from riptide import __version__
    from riptide.jobs.commands.console import run_command

    run_command(sys.argv[1:], __version__)


if __name__ == "__main__":
    main()

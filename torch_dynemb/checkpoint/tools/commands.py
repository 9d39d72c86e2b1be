"""Commands of ``python -m torch_dynemb``: they inspect and rewrite checkpoints."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch_dynemb.checkpoint import inspect as inspection
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.tools.account import account, described
from torch_dynemb.checkpoint.tools.export import export
from torch_dynemb.checkpoint.tools.merge import merge
from torch_dynemb.checkpoint.tools.reshard import reshard
from torch_dynemb.files.locations import Url, location_of

_FAILED, _USAGE, _INTERRUPTED, _NOT_READ = 1, 2, 130, 141
_EXPECTED = (OSError, ValueError, TypeError, RuntimeError, ImportError)

Command = Callable[[argparse.Namespace], int | None]  # an exit status; None: it is done


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"error: {message} ({self.prog} --help lists the options)\n")


def run(
    arguments: Sequence[str] | None = None, *, more: Sequence[Callable[[Any], None]] = ()
) -> int:
    """Run a command.

    Args:
        arguments: command line; default: that of this process.
        more: functions that add commands to the result of ``add_subparsers``.

    Returns:
        The exit status: 0 or that of the command; 1: failed; 130: interrupted; 141: the reader of
            the output, such as ``head``, has closed the pipe.

    Raises:
        SystemExit: the arguments are wrong (2), or ask for help (0).
    """
    parser = _parser(more)
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        parser.print_help(sys.stderr)
        return _USAGE
    chosen = parser.parse_args(given)
    command: Command = chosen.run
    for stream in (sys.stdout, sys.stderr):  # a path may have bytes that are not text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = command(chosen)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes it once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOT_READ
    except _EXPECTED as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status or 0


def _parser(more: Sequence[Callable[[Any], None]]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m torch_dynemb",
        description="Inspect saved tables and checkpoints, plan tables in advance, "
        "and check this machine. The model and a GPU are not needed.",
        epilog="python -m torch_dynemb COMMAND --help lists the options of a command.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="sizes and policies of the tables in a file of torch.save, histograms of scores",
        description="Describe the tables in a file of torch.save, or in a checkpoint.",
    )
    inspect.add_argument(
        "path", metavar="FILE", help="a file that torch.save wrote, or a checkpoint"
    )
    inspect.set_defaults(run=_inspect_file)
    checkpoint = commands.add_parser(
        "checkpoint",
        help="inspect, verify, reshard or export what torch_dynemb.checkpoint.save wrote",
        description="Commands for what torch_dynemb.checkpoint.save wrote. They take bounded "
        "memory, and need neither the model nor its ranks.",
    )
    _add_checkpoint_commands(checkpoint)
    for add_command in more:
        add_command(commands)
    return parser


def _add_checkpoint_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, run: Command, what: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=what, description=f"{what}.")
        command.add_argument("path", metavar="PATH", help="path or URL of the checkpoint")
        command.set_defaults(run=run)
        return command

    inspect = add("inspect", _inspect, "Describe the content of a checkpoint")
    inspect.add_argument("--json", action="store_true", help="as JSON, with more detail")
    add("verify", _verify, "Read all files and compare them with their checksums")
    to = add("reshard", _reshard, "Rewrite it as another number of ranks would save it")
    to.add_argument("out", metavar="OUT", help="path or URL of the new checkpoint")
    to.add_argument(
        "--parts", type=_positive, required=True, metavar="N", help="ranks that load it"
    )
    to.add_argument(
        "--columns",
        type=_positive,
        metavar="N",
        help="most column shards of a table, with multiples of 4 columns (default: as saved)",
    )
    to.add_argument(
        "--slots",
        type=_positive,
        metavar="N",
        help="slots that ids are assigned to (default: as many as parts, or as saved if the ranks "
        "shared a larger number, as RecIS's engine does)",
    )
    merging = commands.add_parser(
        "merge",
        help="Merge a checkpoint and its increments into one",
        description="Merge a checkpoint and the increments that continue it into one.",
    )
    merging.add_argument(
        "paths", nargs="+", metavar="PATH", help="a whole checkpoint, then increments"
    )
    merging.add_argument("out", metavar="OUT", help="path or URL of the new checkpoint")
    merging.add_argument(
        "--parts",
        type=_positive,
        metavar="N",
        help="ranks that will load it (default: as the last)",
    )
    merging.set_defaults(run=_merge)
    to = add("export", _export, "Write ids, rows and scores for other programs")
    to.add_argument("out", metavar="OUT", help="folder or URL for the folders of the tables")
    to.add_argument(
        "--format",
        choices=("npz", "parquet"),
        required=True,
        help="npz needs numpy, parquet needs pyarrow",
    )
    to.add_argument(
        "--table",
        action="append",
        metavar="NAME",
        help="name of a table; repeat for several (default: all)",
    )
    to.add_argument("--state", action="store_true", help="also write optimizer state")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return number


def _inspect_file(arguments: argparse.Namespace) -> None:
    path = location_of("inspect", arguments.path)
    if isinstance(path, Url) or path.is_dir():
        with open_checkpoint(arguments.path) as saved:
            print(described(account(saved)))
        return
    print("\n\n".join(inspection.describe(group) for group in inspection.load(path)))


def _inspect(arguments: argparse.Namespace) -> None:
    with open_checkpoint(arguments.path) as saved:
        about = account(saved)
    print(json.dumps(about, indent=2) if arguments.json else described(about))


def _verify(arguments: argparse.Namespace) -> None:
    with open_checkpoint(arguments.path) as saved:
        saved.verify()
        files = saved.manifest.files()
    total = sum(file.bytes for file in files)
    print(f"{saved.folder}: all {len(files)} files are whole, {total} bytes")


def _reshard(arguments: argparse.Namespace) -> None:
    if arguments.slots is not None and arguments.slots < arguments.parts:
        raise ValueError(
            f"--slots is {arguments.slots}, expected at least --parts, {arguments.parts}"
        )
    reshard(
        arguments.path,
        arguments.out,
        parts=arguments.parts,
        columns=arguments.columns,
        slots=arguments.slots,
    )


def _merge(arguments: argparse.Namespace) -> None:
    merge(arguments.paths, arguments.out, parts=arguments.parts)


def _export(arguments: argparse.Namespace) -> None:
    export(
        arguments.path,
        arguments.out,
        file_format=arguments.format,
        tables=arguments.table,
        state=arguments.state,
    )


__all__ = ["run"]

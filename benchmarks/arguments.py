"""Arguments of the command lines. Invalid ones are refused at once rather than after minutes of measuring."""

from __future__ import annotations

import json
from argparse import Action, ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


class HelpWithDefaults(ArgumentDefaultsHelpFormatter):
    """Help that shows defaults, except those that say nothing."""

    def _get_help_string(self, action: Action) -> str | None:
        if not action.default:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def program(name: str, description: str | None) -> ArgumentParser:
    """The parser of a command, described by the first line of a docstring.

    Args:
        name: the subcommand of ``fusible``, or the full name of a module that ``python -m`` runs.
    """
    line = (description or "").partition("\n")[0]
    started_by = f"python -m {name}" if name.startswith("fusible.") else f"fusible {name}"
    return ArgumentParser(prog=started_by, description=line, formatter_class=HelpWithDefaults)


def command(name: str, description: str | None) -> ArgumentParser:
    """The parser of a command that prints data as well, with ``--json``; see :func:`program`."""
    parser = program(name, description)
    parser.add_argument("--json", action="store_true", help="print only data, as JSON")
    return parser


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def duration(text: str) -> float:
    """A duration above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return number


def device(text: str) -> str:
    """A device that exists here."""
    try:
        torch.empty(1, device=text).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentTypeError(f"no device {text!r} here: {str(error).splitlines()[0]}") from None
    return text


def require_gpus(parser: ArgumentParser, device: str, ranks: int = 1) -> None:
    """Refuses ``cuda`` where not every rank has a GPU."""
    here = torch.cuda.device_count()
    if device == "cuda" and here < ranks:
        count = "a GPU" if ranks == 1 else f"{ranks} GPUs, one a rank"
        parser.error(f"argument --device: cuda needs {count}, and here are {here}: --device cpu needs none")


def require_cuda(parser: ArgumentParser) -> None:
    """Refuses a command that has no meaning on a CPU where no GPU is."""
    if not torch.cuda.is_available():
        parser.error("times kernels of a CUDA GPU, and here is none")


def require_packages(parser: ArgumentParser, *names: str) -> None:
    """Refuses a command that imports a package which is not installed."""
    missing = " ".join(name for name in names if find_spec(name) is None)
    if missing:
        parser.error(f"needs {missing}: pip install {missing}")


def file(text: str) -> Path:
    """A path, or the prefix of files, in an existing folder."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"no such folder: {str(path.parent)!r}")
    return path


def read_json(parser: ArgumentParser, path: Path, *keys: str) -> dict[str, Any]:
    """The data of a file, a dict with these keys; refuses other files."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"cannot read {str(path)!r} as JSON: {error}")
    if not isinstance(data, dict) or not data.keys() >= {*keys}:
        parser.error(f"expected a JSON object with the keys {', '.join(keys)} in {str(path)!r}")
    return data


def plot(text: str) -> Path:
    """The path of a drawing."""
    if find_spec("matplotlib") is None:
        raise ArgumentTypeError("needs matplotlib: pip install matplotlib")
    if Path(text).suffix not in (".svg", ".png"):
        raise ArgumentTypeError(f"expected a name that ends in .svg or .png, got {text!r}")
    return file(text)


def add_common_arguments(parser: ArgumentParser, rounds: int) -> None:
    """Adds the device, the number of rounds, and the files for the results."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=here, help="where it runs")
    parser.add_argument("--rounds", type=positive, default=rounds, help="how often each is timed; the median counts")
    parser.add_argument("--out", type=file, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well")


def add_plot_argument(parser: ArgumentParser) -> None:
    """Adds ``--plot FILE``."""
    parser.add_argument("--plot", type=plot, metavar="FILE", help="draw it as well; .svg or .png")

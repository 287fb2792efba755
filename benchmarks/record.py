"""What the benchmarks share: refusals before anything is measured, and the figures as a file of `book/measurements`.

The file says where, when and by which command they were measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch


def output_file(text: str) -> Path:
    """The `type` of an option for a file that is written at the end: its folder must be there at the start."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file, such as {file / 'here.json'}")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {str(file.parent)!r} to put {file.name!r} in; make it first"
        )
    return file


@contextlib.contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Around what loads and checks, not what measures: a ValueError ends the command with its message and the usage."""
    try:
        yield
    except ValueError as reason:
        parser.error(str(reason))


def write(file: Path, command: Sequence, values: dict[str, dict], device: str | None = None) -> None:
    """Record `values`, {key: {"value", "unit", "low", "high"}}; `command` holds the words after "python -m"."""
    origin = {"device": device_name(device), "date": datetime.date.today().isoformat()}
    words = shlex.join(["python", "-m", *map(str, command)])
    content = origin | {"command": words, "values": values}
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def device_name(device: str | None = None) -> str:
    """The GPU's or the processor's name, as its maker or its system gives it; of a CPU, the threads in use."""
    if torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda"):
        return torch.cuda.get_device_name()
    try:
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":")[1].strip()
    except (OSError, IndexError):
        name = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"

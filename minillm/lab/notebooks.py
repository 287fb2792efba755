"""The book's notebooks as files: normalize them for git, execute and build them into pages, serve the pages.

    python -m minillm.lab.notebooks normalize [--check] FILES...
    python -m minillm.lab.notebooks build
    python -m minillm.lab.notebooks serve

A build that can be trusted takes care in three places. Sphinx forgets the warnings of a page it does not
read again, so every build starts from an empty output. The cache of executed notebooks does not see a
change in an imported module, so it carries a key made from the package and is dropped when that changes.
And only a build without a warning leaves its key in the output; with the same key, nothing is built.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from minillm.lab import pages
from minillm.lab.pages import BUILDING

ROOT = Path(__file__).resolve().parents[2]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT_METADATA = ("mystnb", "tags")
CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")

CODE_INPUTS = ("minillm/**/*", "requirements*.txt", "book/measurements/*")
PAGE_INPUTS = ("book/**/*", "_config.yml", "_toc.yml")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
EVENT = re.compile(r"(?:.*/)?(?P<name>[^/]+)\.ipynb: (?:(?P<run>Executing)|Using cached|Executed .*?(?P<s>[\d.]+) s)")
KERNEL_NOISE = "Kernel is running over TCP without encryption"


def normalized(notebook: dict) -> str:
    """Text of a notebook as the repository stores it: no outputs, no counts, little metadata, sorted keys.

    Cells keep their ids; a missing or repeated one is made from the cell's content. Raises ValueError on
    another format than 4, and on a `raises-exception` tag: such a cell passes even where nothing is raised.
    """
    if notebook.get("nbformat") != 4:
        raise ValueError(f"nbformat must be 4, got {notebook.get('nbformat')!r}; open and save it in JupyterLab")
    cells = [_normalized_cell(cell) for cell in notebook["cells"]]
    while cells and not "".join(cells[-1]["source"]).strip():
        cells.pop()
    given = Counter(cell["id"] for cell in cells)
    seen: set[str] = set()
    for cell in cells:
        if not CELL_ID.fullmatch(cell["id"]) or (given[cell["id"]] > 1 and cell["id"] in seen):
            cell["id"] = _fresh_id(cell, seen)
        seen.add(cell["id"])
    whole = {"cells": cells, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _normalized_cell(cell: dict) -> dict:
    text = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
    metadata = {key: cell["metadata"][key] for key in KEPT_METADATA if cell.get("metadata", {}).get(key)}
    if "raises-exception" in metadata.get("tags", []):
        raise ValueError(f"cell {cell.get('id')!r} is tagged raises-exception; assert the error in its code instead")
    kept = {
        "cell_type": cell["cell_type"],
        "id": cell.get("id", ""),
        "metadata": metadata,
        "source": text.rstrip().splitlines(keepends=True),
    }
    if cell["cell_type"] == "code":
        kept |= {"execution_count": None, "outputs": []}
    elif cell.get("attachments"):
        kept["attachments"] = cell["attachments"]
    return kept


def _fresh_id(cell: dict, taken: set[str]) -> str:
    text = cell["cell_type"] + "".join(cell["source"])
    for salt in range(len(taken) + 1):
        fresh = hashlib.sha256(f"{salt}{text}".encode()).hexdigest()[:8]
        if fresh not in taken:
            return fresh
    raise AssertionError("unreachable: there are more salts than ids taken")


def normalize(files: Iterable[Path], check: bool = False) -> list[Path]:
    """Normalize notebooks in place, or only `check` them. Returns the files that differ from their normal form.

    Raises ValueError that names the file and what is wrong with it.
    """
    changed = []
    for path in map(Path, files):
        text = path.read_text(encoding="utf-8")
        try:
            normal = normalized(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a notebook that can be normalized: {error}") from error
        if text != normal:
            changed.append(path)
            if not check:
                path.write_text(normal, encoding="utf-8")
    return changed


def fingerprint(root: Path, patterns: Iterable[str]) -> str:
    """Hash over the names and contents of the files that match, and the Python version."""
    digest = hashlib.sha256(sys.version.encode())
    files = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    for path in sorted(files):
        name = path.relative_to(root).as_posix()
        if "__pycache__" in name or ".ipynb_checkpoints" in name:
            continue
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def is_current(root: Path = ROOT) -> bool:
    """Whether the pages were built without a warning from the files as they are now."""
    key = root / "_build" / "html" / ".inputs"
    return key.is_file() and key.read_text() == fingerprint(root, CODE_INPUTS + PAGE_INPUTS)


def build(root: Path = ROOT) -> int:
    """Execute the chapters that changed and build the pages in `_build/html`; returns the exit status."""
    output = root / "_build" / "html"
    if is_current(root):
        print("The book is up to date.")
        return 0
    start = time.monotonic()
    inputs = fingerprint(root, CODE_INPUTS + PAGE_INPUTS)
    _drop_stale_cache(root / "_build" / ".jupyter_cache", fingerprint(root, CODE_INPUTS))
    for stale in (output, root / "_build" / ".doctrees"):
        shutil.rmtree(stale, ignore_errors=True)
    print("Building the book; a chapter whose code has changed is executed first.", flush=True)
    status = _run_jupyter_book(root, root / "_build" / "build.log")
    if status:
        print(f"The build failed; the whole log is in {root / '_build' / 'build.log'}", file=sys.stderr)
        return status
    pages.lighten(output)
    (output / ".inputs").write_text(inputs)
    print(f"Built {output / 'index.html'} in {time.monotonic() - start:.0f} s")
    return 0


def _drop_stale_cache(cache: Path, key: str) -> None:
    stored = cache / "package-key"
    if not stored.is_file() or stored.read_text() != key:
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
        stored.write_text(key)


def _run_jupyter_book(root: Path, log: Path) -> int:
    """Run the build, warnings as errors; show which chapter runs and every warning, write all of it to `log`."""
    script = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", script, "build", str(root), "-W", "--keep-going"]
    environment = os.environ | {BUILDING: "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    with log.open("w", encoding="utf-8") as kept, subprocess.Popen(command, env=environment, **streams) as process:

        def show_errors():
            for line in process.stderr:
                kept.write(ANSI.sub("", line))
                if KERNEL_NOISE not in line:
                    print(ANSI.sub("", line), end="", file=sys.stderr, flush=True)

        errors = threading.Thread(target=show_errors)
        errors.start()
        for line in process.stdout:
            line = ANSI.sub("", line)
            kept.write(line)
            if event := EVENT.match(line):
                print(_progress(event), flush=True)
        errors.join()
    return process.returncode


def _progress(event: re.Match) -> str:
    if event["s"]:
        state = f"ran in {float(event['s']):.1f} s"
    else:
        state = "running" if event["run"] else "not changed, kept from an earlier run"
    return f"  {event['name']:32} {state}"


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def server(folder: Path, port: int = 8000) -> ThreadingHTTPServer:
    """A server of `folder` on 127.0.0.1, at `port` or, if that is taken, at any free one."""
    handler = partial(_QuietHandler, directory=str(folder))
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError:
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)


def serve(root: Path = ROOT) -> int:
    """Serve the built pages until Ctrl-C."""
    folder = root / "_build" / "html"
    if not (folder / "index.html").is_file():
        print(f"there is no {folder / 'index.html'}; build the book first: make html", file=sys.stderr)
        return 1
    with server(folder) as running:
        print(f"The book is at http://127.0.0.1:{running.server_address[1]}/  (Ctrl-C to stop)", flush=True)
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line described at the top of this file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minillm.lab.notebooks", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("normalize", help="rewrite notebooks without outputs, in one form")
    command.add_argument("--check", action="store_true", help="change nothing; fail if a notebook would change")
    command.add_argument("files", nargs="+", type=Path)
    commands.add_parser("build", help="execute the chapters and build the pages")
    commands.add_parser("serve", help="serve the built pages on 127.0.0.1")
    options = parser.parse_args(arguments)
    if options.command == "build":
        return build()
    if options.command == "serve":
        return serve()
    try:
        changed = normalize(options.files, options.check)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in changed:
        print(f"{path}: {'not normalized' if options.check else 'normalized'}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())

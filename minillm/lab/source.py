"""Show code from its file, so that the book and the package cannot drift apart."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from html import escape
from pathlib import Path
from types import ModuleType

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from minillm.lab import style

# The book's theme colours `.highlight`; in Jupyter these colours, of lower specificity, take its place.
SYNTAX = {
    "c,c1,cm,sd": "muted",
    "k,kc,kn,kr,ow": "prefill",
    "s,s1,s2,sa,se,si,sf,s4,dl": "activations",
    "mi,mf,mh": "kv-cache",
    "nf,nc,nd,fm": "weights",
    "nb,bp,ne": "bandwidth",
}
CSS = "".join(
    ",".join(f".minillm-source .{name}" for name in names.split(",")) + f"{{color:var(--mini-{token})}}"
    for names, token in SYNTAX.items()
) + (
    ".minillm-source{margin:1rem 0;padding:0}"
    ".minillm-source figcaption{margin:0 0 .3rem}"
    ".minillm-source .highlight{max-height:34.5rem;overflow:auto;margin:0;border:1px solid var(--mini-grid);"
    "border-radius:.25rem}"
    ".minillm-source pre{margin:0;padding:.7rem .9rem;border:0;overflow:visible;width:max-content;min-width:100%;"
    "box-sizing:border-box;line-height:1.45;font-size:.85em;white-space:pre}"
    "@media print{.minillm-source .highlight{max-height:none;overflow:visible}}"
    "@media print,(min-width:600px){.minillm-source pre{width:auto;white-space:pre-wrap}}"
)


COLUMNS = 92  # as many characters as a line of code has room for on a page of the book


class Source:
    """Source code of `thing` with its place: `.code`, `.path` relative to its package, `.line` of the first line."""

    def __init__(self, thing):
        # A property and a method hide the function that has the source.
        target = thing.fget if isinstance(thing, property) else thing
        target = inspect.unwrap(target) if callable(target) else target
        self.name = getattr(target, "__qualname__", None) or getattr(target, "__name__", repr(thing))
        try:
            file = Path(inspect.getfile(target))
            lines, start = inspect.getsourcelines(target)
        except (TypeError, OSError) as error:
            raise ValueError(
                f"no source file for {thing!r}; pass a module, class or function that was written in Python"
            ) from error
        self.line = max(start, 1)
        self.code = textwrap.dedent("".join(lines))
        self.path = relative_path(target, file)

    @property
    def html(self) -> str:
        """The code, highlighted, its docstrings as wide as the page, in a box that scrolls where it is long."""
        formatter = HtmlFormatter(cssclass="highlight", wrapcode=True)
        code = highlight(refill(self.code), PythonLexer(), formatter)
        name = escape(f"Source of {self.name}", quote=True)
        code = code.replace("<div ", f'<div role="region" tabindex="0" aria-label="{name}" ', 1)
        place = f"<code>{escape(self.path)}</code>, line {self.line}"
        return (
            f"<style>{style.CSS}{CSS}</style>"
            f'<figure class="minillm minillm-source"><figcaption>{place}</figcaption>{code}</figure>'
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": f"# {self.path}, line {self.line}\n{self.code}"}


def refill(code: str) -> str:
    """The code with the paragraphs of its docstrings set anew where a line of them is over COLUMNS."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a lambda, cut out of its statement
        return code
    lines = code.splitlines()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)]
    for docstring in sorted(found, key=lambda node: -node.lineno):
        here, margin = slice(docstring.lineno - 1, docstring.end_lineno), " " * docstring.col_offset
        text = "\n".join(lines[here])
        closing = "\n" + margin + text[-3:] if text[:-3].endswith("\n" + margin) else text[-3:]
        paragraphs = text.removesuffix(closing).split("\n\n")
        lines[here] = ("\n\n".join(refill_paragraph(p, margin) for p in paragraphs) + closing).splitlines()
    return "\n".join(lines) + "\n"


def refill_paragraph(paragraph: str, margin: str) -> str:
    """A paragraph behind its margin in lines of at most COLUMNS; lists, and what is indented further, stay."""
    lines = paragraph.splitlines()
    plain = all(line.startswith(margin) and not line[len(margin) :].startswith((" ", "-")) for line in lines)
    if not plain or all(len(line) <= COLUMNS for line in lines):
        return paragraph
    filler = textwrap.TextWrapper(COLUMNS, margin, margin, break_long_words=False, break_on_hyphens=False)
    return filler.fill(" ".join(paragraph.split()))


def relative_path(target, file: Path) -> str:
    """The file's place from its top package down ("minillm/kv_cache.py"), or its bare name outside a package."""
    name = target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", "") or ""
    top = sys.modules.get(name.partition(".")[0])
    for folder in getattr(top, "__path__", []):
        if file.is_relative_to(Path(folder).parent):
            return file.relative_to(Path(folder).parent).as_posix()
    return file.name


def show_source(thing) -> None:
    """Display a module, class, function, method or property as it stands in its file.

    The caption gives the file and the first line. Raises ValueError where there is no Python source.
    """
    style.display(Source(thing))

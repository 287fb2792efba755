"""Text that grows in place while a notebook runs, and stands as one piece in the built page."""

from __future__ import annotations

from html import escape

from minillm.lab import style


class LiveText:
    """`text = lab.LiveText()`, then `text.add(piece)` as the pieces come. Without IPython they are printed."""

    def __init__(self):
        self.text = ""
        try:
            from IPython.display import display
        except ImportError:
            self.handle = None
        else:
            self.handle = display(self, display_id=True)

    def add(self, piece: str) -> None:
        """Append a piece and show it at once."""
        self.text += piece
        if self.handle is not None:
            self.handle.update(self)
        else:
            print(piece, end="", flush=True)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        shown = escape(self.text).replace("\n", "<br>")
        css = f"{style.CSS}.minillm-text{{border-left:2px solid var(--mini-decode);padding:.1rem .9rem;margin:.5rem 0}}"
        return {
            "text/html": f'<style>{css}</style><div class="minillm minillm-text">{shown or "&nbsp;"}</div>',
            "text/plain": self.text,
        }

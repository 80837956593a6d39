"""An extension of mkdocstrings: what a docstring says of each argument or field ("name: meaning.") becomes a list."""

import re
from collections.abc import Iterable
from typing import Any

try:
    from griffe import Extension
except ImportError:  # mkdocstrings is an extra
    Extension = object


def listed(docstring: str, names: Iterable[str]) -> str:
    """The docstring with a list's item for every "name: " that begins a sentence, and a paragraph for "Raises"."""
    known = "|".join(map(re.escape, names)) or "(?!)"
    begins = re.compile(rf"(?:^|(?<=[.)])\s|\n)((?:(?:{known}), )*(?:{known})):\s")
    text = begins.sub(lambda found: f"\n\n- **{found[1]}**: ", docstring)
    return re.sub(r"(?<=\.)\s(?=Raises )", "\n\n", text)


class DocstringLists(Extension):
    """Changes docstrings of classes and functions as griffe reads them."""

    def on_function(self, *, func: Any, **_: Any) -> None:  # noqa: ANN401 - griffe is not always installed
        """Arguments."""
        if func.docstring:
            func.docstring.value = listed(func.docstring.value, [parameter.name for parameter in func.parameters])

    def on_class(self, *, cls: Any, **_: Any) -> None:  # noqa: ANN401
        """Fields."""
        if cls.docstring:
            cls.docstring.value = listed(cls.docstring.value, cls.members)

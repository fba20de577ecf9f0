"""Links between docstrings: a name in backticks leads to where it is documented, if it is on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAME = re.compile(r"(?<![`\w])(?::\w+:)?(`{1,2})([A-Za-z_][\w.]*)\1(?![`\w])")

PACKAGES = ("dapple_tf.", "graph_passes.")


class Names(griffe.Extension):
    """Makes references of names in docstrings: ``Plan``, `Plan.load` and :func:`dapple_tf.plan` alike."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites an object's docstring, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = NAME.sub(lambda name: _reference(obj, name[2]), obj.docstring.value)


def _reference(place: griffe.Object, name: str) -> str:
    try:
        path = place.resolve(name)
    except griffe.NameResolutionError:
        path = name
    if not path.startswith(PACKAGES):
        return f"`{name}`"
    return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'

"""Text that every Python has: the language reference behind `help()`, some 65,000 words."""

import platform
from pydoc_data.topics import topics


def reference_text() -> str:
    """All topics, in the order of their names. It differs a little between Python versions: record `text_version`."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def text_version() -> str:
    """What `reference_text` depends on."""
    return f"pydoc_data.topics of Python {platform.python_version()}"

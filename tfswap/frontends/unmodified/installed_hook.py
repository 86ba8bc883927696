"""`tfswap hook`: a file among Python's packages by which TFSWAP_MEMORY_LIMIT=6GiB python train.py keeps the limit.

Python runs the line of a `.pth` file at each start. This one does nothing unless the variable is set.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tfswap.errors import TfswapError
from tfswap.frontends.unmodified.settings import LIMIT, STARTUP
from tfswap.support.files import write_whole

NAME = "tfswap_hook.pth"
LINE = (
    "import os; path = {path!r}; os.environ.get({limit!r}) and os.path.exists(path) and "
    "exec(compile(open(path).read(), path, 'exec'), {{'__name__': 'tfswap_startup', '__file__': path}})\n"
)
OURS = "import os; path = "
"""How the file begins."""


def hook_path() -> Path:
    """The file."""
    return Path(sysconfig.get_path("purelib"), NAME)


def install() -> str:
    """Write the file; a message. Raises TfswapError where it can't be written."""
    path = hook_path()
    _require_own(path)
    write_whole(path, LINE.format(path=str(STARTUP), limit=LIMIT))
    return f"Written to {path}. Processes of this Python keep the limit that {LIMIT} names."


def remove() -> str:
    """Delete the file; a message. Raises TfswapError where it can't be deleted."""
    path = hook_path()
    if not path.exists():
        return f"There is no {path}."
    _require_own(path)
    try:
        path.unlink()
    except OSError as error:
        raise TfswapError(f"{path} can't be removed: {error.strerror}") from None
    return f"Removed {path}."


def _require_own(path: Path) -> None:
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(OURS):
        raise TfswapError(f"{path} was not written by tfswap hook: it stays as it is")

"""The command `quantshard`, also as `python -m quantshard` and, for processes that `launch` starts, as a script."""

from __future__ import annotations

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))

if __name__ == "__main__":
    # -m puts the working directory first, a script its own folder; neither may shadow a library.
    if sys.path[0] in (os.getcwd(), _FOLDER):
        del sys.path[0]
    if os.path.dirname(_FOLDER) not in sys.path:
        sys.path.append(os.path.dirname(_FOLDER))

# multiprocessing starts children with -c, which puts the working directory first; Python 3.10 does not read this.
os.environ["PYTHONSAFEPATH"] = "1"

from importlib.util import find_spec  # noqa: E402

EXTRA = ("matplotlib", "tomli_w", "typer")
"""What the extra `cli` of pyproject.toml installs."""

if missing := [name for name in EXTRA if find_spec(name) is None]:
    sys.exit(f"quantshard: missing packages; run: pip install {' '.join(missing)}")

from quantshard.tools.cli import main  # noqa: E402 (imports the extra)

if __name__ == "__main__":
    main()

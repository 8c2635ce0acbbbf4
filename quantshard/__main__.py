"""Entry point of `quantshard`, `python -m quantshard` and, as a script, the processes that `launch` starts."""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))

if __name__ == "__main__":
    # Python puts the working directory (-m) or this folder (script) first; neither may shadow a library.
    if sys.path[0] in (os.getcwd(), _FOLDER):
        del sys.path[0]
    if os.path.dirname(_FOLDER) not in sys.path:
        sys.path.append(os.path.dirname(_FOLDER))

# Keeps the working directory off the path of multiprocessing's children, which run by -c. Ignored by Python 3.10.
os.environ["PYTHONSAFEPATH"] = "1"

from importlib.util import find_spec  # noqa: E402

EXTRA = ("tomli_w", "typer")
"""Packages of the extra `cli` in pyproject.toml."""

if missing := [name for name in EXTRA if find_spec(name) is None]:
    sys.exit(f"quantshard: missing packages; run: pip install {' '.join(missing)}")

from quantshard.tools.cli import main  # noqa: E402 (imports the extra)

if __name__ == "__main__":
    main()

"""The command `quantshard`, also as `python -m quantshard`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

EXTRA = ("matplotlib", "tomli_w", "typer")
"""What the extra `cli` of pyproject.toml installs."""

if missing := [name for name in EXTRA if find_spec(name) is None]:
    sys.exit(f"quantshard: the command line needs {', '.join(missing)}, as pip install 'quantshard[cli]' installs")

from quantshard.cli import main  # noqa: E402 (imports the extra)

if __name__ == "__main__":
    main()

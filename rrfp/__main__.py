"""``python -m rrfp``: the console script without a script."""

from __future__ import annotations

from rrfp.cli import main

if __name__ == "__main__":
    main()

"""The console script ``rrfp``: imports the commands and runs one."""

import sys


def main() -> None:
    """The console script, and ``python -m rrfp``."""
    try:
        from rrfp.commands.app import app  # within, as Ctrl-C may come while it is imported

        app(prog_name="rrfp")
    except (KeyboardInterrupt, TypeError) as error:
        # Where Ctrl-C comes within `from ... import`, CPython loses it and raises this instead.
        if isinstance(error, TypeError) and str(error) != "expected a message argument":
            raise
        sys.stderr.write("rrfp: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
